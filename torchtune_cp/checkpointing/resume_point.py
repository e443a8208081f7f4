"""Where a run continues: the newest checkpoint that is whole, or the weights of a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_cp.checkpointing.agreement import Agreement
from torchtune_cp.checkpointing.earlier_runs import noted_earlier, step_of
from torchtune_cp.checkpointing.folder import CONFIG_NAME
from torchtune_cp.checkpointing.manifest import MANIFEST_NAME, Manifest
from torchtune_cp.checkpointing.training_state_store import list_checkpoints, verify_checkpoint
from torchtune_cp.errors import UserError

#: The folder of a run's checkpoints inside its ``output_dir``.
CHECKPOINTS_NAME = "checkpoints"
#: Set by torchrun: how often it has started the processes again after a failure.
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"

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
        manifest: What ``checkpoint.json`` says; None for a Hugging Face folder.
    """

    path: Path
    manifest: Manifest | None

    @property
    def state(self) -> Mapping[str, Any] | None:
        """What was recorded with the checkpoint; None when there are weights only."""
        return None if self.manifest is None else self.manifest.state


@dataclass(frozen=True)
class _Candidates:
    """What rank 0 has found, newest first; ``weights`` when it is a Hugging Face folder."""

    paths: tuple[Path, ...]
    weights: bool = False


def restart_count() -> int:
    """How often torchrun has started this run's processes again; 0 without it."""
    return int(os.environ.get(RESTARTS_VARIABLE, "0"))


def find_resume_point(
    resume_from_checkpoint: bool | str, own: Path, agreement: Agreement
) -> ResumePoint | None:
    """Find what to continue from: rank 0 looks, all ranks verify and follow.

    A checkpoint that is damaged is skipped for the next older one, and a line says why. After a
    restart by torchrun the run's own newest checkpoint goes first, whatever the config says.

    Args:
        resume_from_checkpoint: True for the newest checkpoint of ``own``, a path (see the config key),
            or False.
        own: The run's own folder of checkpoints.
        agreement: The meeting point of the ranks.

    Returns:
        None for a run that starts at its beginning.

    Raises:
        UserError: On every rank: nothing at the path, or checkpoints of which none is whole.
    """
    restarts = restart_count()
    candidates = _Candidates(())
    problem: str | None = None
    if agreement.rank == 0:
        try:
            candidates = _candidates(resume_from_checkpoint, own, restarted=restarts > 0)
        except (UserError, OSError) as error:
            problem = f"resume_from_checkpoint: {error}"
    problem, candidates = agreement.gather((problem, candidates))[0]
    if problem is not None:
        raise UserError(problem)
    if candidates.weights:
        (path,) = candidates.paths
        _LOG.warning(
            "%s holds weights only: the optimizer, the schedule, the step count and the place in the"
            " data start anew",
            path,
        )
        return ResumePoint(path, None)
    why = f"start number {restarts + 1} of this run's processes: " if restarts else ""
    problems = []
    for path in candidates.paths:
        try:
            manifest = verify_checkpoint(path, agreement)
        except UserError as error:
            problems.append(str(error))
            if len(candidates.paths) > 1:
                _LOG.warning("skipped %s: %s", path.name, error)
            continue
        _LOG.info("%scontinuing from %s", why, path)
        return ResumePoint(path, manifest)
    if problems:
        raise UserError(
            f"resume_from_checkpoint: no checkpoint to continue from is whole: {'; '.join(problems)};"
            " set resume_from_checkpoint=false to start anew"
        )
    if resume_from_checkpoint or restarts:
        _LOG.info("%sno checkpoint in %s yet: starting from the beginning", why, own)
    return None


def _candidates(resume_from: bool | str, own: Path, *, restarted: bool) -> _Candidates:
    if restarted or resume_from is True:
        paths = list_checkpoints(own)
        if restarted:
            earlier = noted_earlier(own)
            paths = [path for path in paths if path.name not in earlier]
        if paths or isinstance(resume_from, bool):
            return _Candidates(tuple(paths))
    if isinstance(resume_from, bool):
        return _Candidates(())
    given = Path(resume_from).expanduser().absolute()
    if not given.is_dir():
        raise UserError(f"{given} is not a folder; give {_FORMS}")
    if given.name.startswith(".step_"):
        raise UserError(f"{given} is a save that was never completed; give {_FORMS}")
    if (given / MANIFEST_NAME).exists():
        return _Candidates((given,))
    for folder in (given, given / CHECKPOINTS_NAME):
        if paths := list_checkpoints(folder):
            return _Candidates(tuple(paths))
    if (given / CONFIG_NAME).is_file():
        return _Candidates((given,), weights=True)
    raise UserError(f"{given} holds no checkpoint; give {_FORMS}")


def not_continued(own: Path, found: ResumePoint | None, *, restarted: bool) -> list[Path]:
    """Return the checkpoints in a run's folder that are not of its own past.

    Args:
        own: The run's folder of checkpoints.
        found: What the run continues from.
        restarted: Whether torchrun has started the processes again.
    """
    others = list_checkpoints(own)
    if found is None or found.manifest is None or found.path.parent.resolve() != own.resolve():
        return others
    earlier = noted_earlier(own) if restarted else set()
    last = step_of(found.path)
    return [path for path in others if step_of(path) > last or path.name in earlier]
