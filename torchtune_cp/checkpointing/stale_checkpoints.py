"""Separates checkpoints of an earlier run in the same folder from those of this one.

A new run in a used `output_dir` counts from step 0, and the newest folder there is not its own.
Nothing of an earlier run is ever deleted: its checkpoints stay where they are until this run saves
its first one (a run started by mistake harms nothing), and are then moved to a sibling folder.
Until then a small file lists their names, so that a restart after a crash can distinguish them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from torchtune_cp.checkpointing.training_state_store import list_checkpoints
from torchtune_cp.durable import first_free, sync, write_text

_LOG = logging.getLogger(__name__)
_NOTE_NAME = ".of_an_earlier_run.json"
_MAX_LISTED = 4


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(folder.name.removeprefix("step_"))


def noted_stale(own: Path) -> set[str]:
    """Return the names that `note_stale` has noted.

    Args:
        own: The run's folder of checkpoints.
    """
    try:
        names = json.loads((own / _NOTE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return set()  # nothing was noted, or the note is damaged: all of them count
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def note_stale(own: Path, folders: Sequence[Path]) -> None:
    """Note which checkpoints in a run's folder the run does not continue.

    Args:
        own: The run's folder of checkpoints.
        folders: Those checkpoints; without any the note is deleted.

    Raises:
        OSError: The folder cannot be written.
    """
    note = own / _NOTE_NAME
    if folders:
        write_text(note, json.dumps([folder.name for folder in folders]))
    else:
        note.unlink(missing_ok=True)


def set_aside(own: Path, folders: Sequence[Path]) -> None:
    """Move checkpoints that the run does not continue out of its folder; called on one rank.

    Args:
        own: The run's folder of checkpoints.
        folders: Those to move; missing ones are skipped.

    Raises:
        OSError: They cannot be moved.
    """
    there = [folder for folder in list_checkpoints(own) if folder in folders]
    if there:
        real = own.resolve()  # a link leads to another disk, and a rename does not
        aside = first_free(lambda number: real.with_name(f"{own.name}.earlier_{number}"))
        aside.mkdir()
        for folder in there:
            folder.rename(aside / folder.name)
        sync(aside)
        sync(own)
        names = ", ".join(folder.name for folder in there[:_MAX_LISTED])
        _LOG.warning(
            "moved %s%s, which this run does not continue, from %s to %s; delete them if they are not"
            " needed",
            names,
            ", ..." if len(there) > _MAX_LISTED else "",
            own,
            aside,
        )
    note_stale(own, ())
