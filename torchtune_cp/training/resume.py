"""Checkpoint handling of a recipe besides saving: where a run starts, and how it continues."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from torchtune_cp.checkpointing.plain_json import to_plain
from torchtune_cp.checkpointing.resume_point import ResumePoint
from torchtune_cp.checkpointing.training_checkpoints import TrainingCheckpoints
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.config import FullFinetuneConfig, resolved_dict
from torchtune_cp.config.output_dir import METRICS_NAME, NOTES_NAME
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.config.secrets import is_private
from torchtune_cp.distributed import ParallelDims
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.jsonl import set_metrics_aside
from torchtune_cp.training.fp8 import precompute_float8_scales
from torchtune_cp.training.progress import TrainingProgress
from torchtune_cp.training.saved_record import check_record

_LOG = logging.getLogger(__name__)
_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp")


def open_checkpoints(cfg: FullFinetuneConfig) -> tuple[TrainingCheckpoints, ResumePoint | None]:
    """Determine where the run starts; collective, every rank must call it.

    Args:
        cfg: The run's config.

    Returns:
        The run's checkpoints, and what it continues from (None: it starts at its beginning).

    Raises:
        UserError: The config names nothing to continue from, or nothing whole.
    """
    checkpoints = TrainingCheckpoints(
        cfg.output_dir,
        asynchronous=cfg.enable_async_checkpointing,
        keep_last_n=cfg.keep_last_n,
        keep_best=cfg.keep_best,
        on_save_error=cfg.on_save_error,
    )
    found = checkpoints.find(cfg.resume_from_checkpoint)
    if found is not None and found.manifest is not None:
        check_record(found.manifest)
    return checkpoints, found


def clear_earlier_report(cfg: FullFinetuneConfig) -> None:
    """Move away the reports of an earlier start that this one does not continue.

    Either `overwrite` lets its lines go, or it never came to a checkpoint (others are refused before
    the ranks start): then they are kept in another file. Called on rank 0.

    Args:
        cfg: The run's config.

    Raises:
        UserError: The folder cannot be written.
    """
    folder = expand_home(cfg.output_dir)
    try:
        if cfg.overwrite:
            (folder / METRICS_NAME).unlink(missing_ok=True)
        elif aside := set_metrics_aside(folder, "earlier"):
            _LOG.warning(
                "moved the lines of an earlier start, which left no checkpoint, to %s", aside
            )
        (folder / NOTES_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: cannot clear {folder}: {error}") from error


def saved_seed(resumed: ResumePoint | None) -> int | None:
    """The seed of the run that is continued; None for a new run."""
    return None if resumed is None or resumed.state is None else resumed.state["seed"]


def skipped_steps(resumed: ResumePoint | None) -> int:
    """Steps that the run that is continued has left out (`on_nonfinite`); 0 for a new run."""
    return 0 if resumed is None or resumed.state is None else resumed.state["nonfinite_steps"]


def run_record(cfg: FullFinetuneConfig, dims: ParallelDims, seed: int) -> dict[str, Any]:
    """What every checkpoint records about its run, as plain JSON.

    Args:
        cfg: The run's config; its secrets are masked.
        dims: The mesh.
        seed: The run's seed, also where the config leaves it open.
    """
    return {
        "seed": seed,
        "world_size": dims.world_size,
        "mesh": {name: getattr(dims, name) for name in _DEGREES},
        "config": to_plain(OmegaConf.to_container(OmegaConf.create(resolved_dict(cfg)))),
    }


def restore(
    resumed: ResumePoint | None,
    checkpoints: TrainingCheckpoints,
    state: TrainingState,
    progress: TrainingProgress,
    record: Mapping[str, Any],
) -> None:
    """Fill model, optimizer, schedule and random generators from a checkpoint, if there is one.

    On the mesh and with the config that it was saved with, the run continues bitwise equal. A line says
    what will be different otherwise.

    Args:
        resumed: What the run continues from.
        checkpoints: Reads it.
        state: What to fill; weights may be uninitialised.
        progress: Has been moved to the saved place.
        record: `run_record` of this run.

    Raises:
        UserError: The checkpoint is of another model or optimizer.
    """
    if resumed is None or resumed.state is None:
        return
    saved = resumed.state
    same_mesh = saved["mesh"] == record["mesh"] and saved["world_size"] == record["world_size"]
    changed = [
        key
        for key in ("optimizer", "lr_scheduler")
        if saved["config"].get(key) != record["config"].get(key)
    ]
    # Their values are not in the checkpoint, so they cannot be compared: the current ones are used.
    changed += [
        f"{key} has values from the environment and may have"
        for key in ("optimizer", "lr_scheduler")
        if key not in changed and is_private(str(record["config"].get(key)))
    ]
    if state.scheduler is not None and saved["total_steps"] != progress.total_steps:
        changed.append(f"the number of steps ({saved['total_steps']} before)")
    state.restore(
        saved,
        partial(checkpoints.load, resumed),
        step=progress.step,
        saved_world_size=saved["world_size"],
        same_mesh=same_mesh,
        same_hyperparameters=not changed,
    )
    if record["config"]["enable_fp8_training"] is not False:  # masked, it may be either
        precompute_float8_scales(state.model)  # as after every step
    _log_changes(saved, record, progress, changed, same_mesh)


def _log_changes(
    saved: Mapping[str, Any],
    record: Mapping[str, Any],
    progress: TrainingProgress,
    changed: list[str],
    same_mesh: bool,
) -> None:
    _LOG.info(
        "resumed after step %d of %d, in epoch %d",
        progress.step,
        progress.total_steps,
        progress.epoch,
    )
    if progress.step >= progress.total_steps:
        _LOG.info("the run was finished: there is nothing left to train")
    if not same_mesh:
        _LOG.info(
            "saved on %d processes (%s), resumed on %d (%s): sums are computed in a different order%s",
            saved["world_size"],
            _spelt(saved["mesh"]),
            record["world_size"],
            _spelt(record["mesh"]),
            ""
            if saved["world_size"] == record["world_size"]
            else "; random numbers of dropout, if used, are different",
        )
    loud = []
    if saved["global_batch_size"] != progress.global_batch_size:
        loud.append(
            f"the global batch is {progress.global_batch_size} samples instead of"
            f" {saved['global_batch_size']}, so the steps see other groups of samples; the place in"
            f" the data is kept ({progress.loader.samples_read} samples of epoch {progress.epoch}),"
            f" {progress.steps_left()} steps are left and the run has {progress.total_steps} in all"
            f" instead of {saved['total_steps']}"
        )
    if changed:
        loud.append(
            f"{', '.join(changed)} changed: rates and settings are those of this config, the schedule"
            f" is at step {progress.step}"
        )
    if loud:
        _LOG.warning("this is not the run that was saved: %s", "; ".join(loud))


def _spelt(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items() if size > 1) or "no mesh"
