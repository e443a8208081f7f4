"""Makes a failure on one rank known to all, and waits for slow writers without a time-out.

Saving is the one place where a rank may be busy for minutes while the others wait. A wait inside
the training's process group would run into its time-out (NCCL's watchdog then kills the job); so
the ranks use a separate gloo group. A rank that dies still ends the wait immediately:
its connection closes.
"""

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Note = TypeVar("Note")

_LONGEST_WAIT = timedelta(hours=12)


class RankSync:
    """A meeting point of all ranks for the time of a save; with one process it does nothing."""

    def __init__(self) -> None:
        """Make the group; collective, every rank must call it."""
        self.rank = 0
        self.world_size = 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
            self.world_size = dist.get_world_size()
            if self.world_size > 1:
                self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group of all ranks; None with one process."""
        return self._group

    def gather(self, note: Note) -> list[Note]:
        """Wait for every rank and return every rank's note, in the order of ranks.

        Args:
            note: Object sent by this rank (picklable).
        """
        notes = [note] * self.world_size
        if self._group is not None:
            dist.all_gather_object(notes, note, group=self._group)
        return notes

    def raise_together(self, error: Exception | None) -> None:
        """Wait for every rank; raise on all of them if any has an error.

        Args:
            error: This rank's error, or None.

        Raises:
            Exception: This rank's own error.
            RemoteError: Another rank's, naming the rank.
        """
        notes = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, note in enumerate(notes):
            if note is not None:
                raise RemoteError(f"rank {rank}: {note}")

    def close(self) -> None:
        """Destroy the group; collective, every rank must call it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class RemoteError(RuntimeError):
    """What this rank raises when another rank has failed."""
