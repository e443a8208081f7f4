"""Where a run continues: the newest intact checkpoint, or the weights of a folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_cp.checkpointing.folder import CONFIG_NAME
from torchtune_cp.checkpointing.manifest import MANIFEST_NAME, Manifest, is_misnamed
from torchtune_cp.checkpointing.rank_sync import RankSync
from torchtune_cp.checkpointing.stale_checkpoints import noted_stale, step_of
from torchtune_cp.checkpointing.training_state_store import (
    list_checkpoints,
    other_checkpoints,
    verify_checkpoint,
)
from torchtune_cp.config.output_dir import CHECKPOINTS_NAME
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.distributed.process_group import restart_count
from torchtune_cp.errors import UserError

_LOG = logging.getLogger(__name__)
_FORMS = (
    "a checkpoint (step_N), a folder of checkpoints, a run's output_dir,"
    " or a Hugging Face folder such as final (weights only)"
)


@dataclass(frozen=True)
class ResumePoint:
    """What a run continues from.

    Attributes:
        path: The checkpoint, verified; or a Hugging Face folder.
        manifest: Content of `checkpoint.json`; None for a Hugging Face folder.
        is_own: Whether it is a checkpoint in the run's own folder: the run continues itself.
    """

    path: Path
    manifest: Manifest | None
    is_own: bool = False

    @property
    def state(self) -> Mapping[str, Any] | None:
        """What was recorded with the checkpoint; None when there are weights only."""
        return None if self.manifest is None else self.manifest.state


@dataclass(frozen=True)
class _Candidates:
    """What rank 0 has found, newest first; `weights` when it is a Hugging Face folder."""

    paths: tuple[Path, ...]
    weights: bool = False


def find_resume_point(
    resume_from_checkpoint: bool | str, own: Path, rank_sync: RankSync
) -> ResumePoint | None:
    """Find what to continue from: rank 0 looks, all ranks verify and follow.

    A checkpoint that is damaged is skipped for the next older one, and a line gives the reason. After a
    restart by torchrun the run's own newest checkpoint takes precedence over the config.

    Args:
        resume_from_checkpoint: True for the newest checkpoint of `own`, a path (see the config key),
            or False.
        own: The run's own folder of checkpoints.
        rank_sync: Where the ranks wait for each other.

    Returns:
        None for a run that starts at its beginning.

    Raises:
        UserError: On every rank: nothing at the path, or checkpoints of which none is whole.
    """
    restarts = restart_count()
    candidates = _Candidates(())
    problem: str | None = None
    if rank_sync.rank == 0:
        try:
            candidates = _candidates(resume_from_checkpoint, own, restarted=restarts > 0)
        except (UserError, OSError) as error:
            problem = f"resume_from_checkpoint: {error}"
    problem, candidates = rank_sync.gather((problem, candidates))[0]
    if problem is not None:
        raise UserError(problem)
    if candidates.weights:
        (path,) = candidates.paths
        _LOG.warning(
            "%s holds weights only: the optimizer, the schedule, the step count and the position in the"
            " data start from the beginning",
            path,
        )
        return ResumePoint(path, None)
    why = f"start number {restarts + 1} of this run's processes: " if restarts else ""
    problems = []
    for path in candidates.paths:
        try:
            manifest = verify_checkpoint(path, rank_sync)
        except UserError as error:
            problems.append(str(error))
            if len(candidates.paths) > 1:
                _LOG.warning("skipped %s: %s", path.name, error)
            continue
        is_own = path.parent.resolve() == own.resolve()
        _LOG.info("%scontinuing from %s (step %d)", why, path, manifest.step)
        if is_own:
            _log_origin(manifest, own.parent)
        return ResumePoint(path, manifest, is_own)
    if problems:
        raise UserError(
            f"resume_from_checkpoint: no checkpoint to continue from is intact: {'; '.join(problems)};"
            " resume_from_checkpoint=false overwrite=true starts a new run"
        )
    if resume_from_checkpoint or restarts:
        _LOG.info("%sno checkpoint in %s yet: starting from the beginning", why, own)
    return None


def _log_origin(manifest: Manifest, output_dir: Path) -> None:
    """Log when a checkpoint in a run's folder was saved by a run with another folder."""
    config = manifest.state.get("config")
    saved = config.get("output_dir") if isinstance(config, Mapping) else None
    if isinstance(saved, str) and expand_home(saved).resolve() != output_dir.resolve():
        _LOG.warning(
            "%s was saved by a run with output_dir=%s: it was copied here, or that folder was moved",
            manifest.folder,
            saved,
        )


def _candidates(resume_from: bool | str, own: Path, *, restarted: bool) -> _Candidates:
    if restarted or resume_from is True:
        paths = list_checkpoints(own)
        if restarted:
            earlier = noted_stale(own)
            paths = [path for path in paths if path.name not in earlier]
        else:
            _mind_others(own, paths)
        if paths or isinstance(resume_from, bool):
            return _Candidates(tuple(paths))
    if isinstance(resume_from, bool):
        return _Candidates(())
    given = expand_home(resume_from).absolute()
    if not given.is_dir():
        raise UserError(f"{given} is not a folder; give {_FORMS}")
    if given.name.startswith(".step_"):
        raise UserError(f"{given} is an incomplete save; give {_FORMS}")
    if (given / MANIFEST_NAME).exists():
        return _Candidates((given,))
    for folder in (given, given / CHECKPOINTS_NAME):
        paths = list_checkpoints(folder)
        _mind_others(folder, paths)
        if paths:
            return _Candidates(tuple(paths))
    if (given / CONFIG_NAME).is_file():
        return _Candidates((given,), weights=True)
    raise UserError(f"{given} holds no checkpoint; give {_FORMS}")


def _mind_others(folder: Path, paths: list[Path]) -> None:
    """Say which checkpoints are passed over because of their names; refuse to pass over all of them."""
    others = other_checkpoints(folder)
    if not others:
        return
    names = ", ".join(path.name for path in others)
    hint = "rename a checkpoint to step_N, or give its path, to continue from it"
    if not paths:
        raise UserError(f"{folder} holds no step_N, only {names}: {hint}")
    _LOG.warning("skipped %s in %s: %s", names, folder, hint)


def not_continued(own: Path, found: ResumePoint | None, *, restarted: bool) -> list[Path]:
    """Return the checkpoints in a run's folder that are not of its own past.

    Args:
        own: The run's folder of checkpoints.
        found: What the run continues from.
        restarted: Whether torchrun has started the processes again.
    """
    others = list_checkpoints(own)
    if found is None or found.manifest is None or not found.is_own:
        return others
    earlier = noted_stale(own) if restarted else set()
    last = found.manifest.step
    return [
        path for path in others if step_of(path) > last or path.name in earlier or is_misnamed(path)
    ]
