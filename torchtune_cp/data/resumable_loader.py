"""Where a loader stands in its data: the part of its state that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchtune_cp.data.sampler import ENDLESS, GlobalBatchSampler
from torchtune_cp.errors import UserError


class ResumableLoader:
    """A loader that knows its place in an epoch's global order, counted in samples.

    It is counted when a batch is handed out: batches that were read ahead do not count. It depends on
    neither mesh nor batch size nor workers.

    An iteration starts at the beginning of the epoch, except the first one after `load_state_dict`,
    which continues where the state was taken. Data that never end go on from epoch to epoch.

    Attributes:
        global_sampler: Knows the global order.
        order_settings: What the order of data that never end depends on, in words.
    """

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        """Stand at the beginning.

        Args:
            sampler: Knows the global order.
        """
        self.global_sampler = sampler
        self.order_settings = ""
        self._position = 0
        self._resume_at: tuple[int, int] | None = None  # epoch, samples

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        return len(self.global_sampler)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches of the current epoch."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads (or the running one reads)."""
        return self.global_sampler.epoch

    @property
    def samples_read(self) -> int:
        """Samples of the current epoch's global order handed out so far, by all ranks together."""
        return self._position

    @property
    def steps_left(self) -> int:
        """Batches that remain in the current epoch after those handed out."""
        return self.global_sampler.steps_after(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows.

        A place loaded from a checkpoint is kept when it belongs to this epoch, and forgotten
        otherwise.
        """
        if epoch == self.epoch and self._resume_at is not None:
            return
        self.global_sampler.epoch = epoch
        if self.global_sampler.endless:
            self._resume_at = (epoch, self._position)
            return
        self._position = 0
        self._resume_at = None

    def state_dict(self) -> dict[str, Any]:
        """The place in the data; plain values, the same on every rank.

        (Of data that never end, a rank that reads also tells where to begin to read, in "stream".)
        """
        sampler = self.global_sampler
        state: dict[str, Any] = {
            "epoch": sampler.epoch,
            "samples_read": self._position,
            "num_samples": sampler.num_samples,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
        }
        if sampler.endless:
            state |= {"order": self.order_settings, "stream": self.stream_place(self._position)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with any batch size, mesh or number of workers.

        A state taken after an epoch's last batch continues with the next epoch.

        Raises:
            UserError: When the dataset or its order is not the one the state was taken from.
        """
        sampler = self.global_sampler
        if (state_dict["num_samples"] == ENDLESS) != sampler.endless:
            raise UserError(
                "cannot resume in the middle of the data: dataset.streaming was"
                f" {str(not sampler.endless).lower()} in the checkpoint's run; use the same dataset"
            )
        for key, now in (
            ("num_samples", sampler.num_samples),
            ("seed", sampler.seed),
            ("shuffle", sampler.shuffle),
            ("order", self.order_settings),
        ):
            if state_dict.get(key, now) != now:
                raise UserError(
                    f"cannot resume in the middle of the data: the checkpoint has {key} "
                    f"{state_dict[key]}, this run has {now}; use the same dataset, seed and shuffle"
                )
        if sampler.endless:
            self.start_stream_at(state_dict["stream"])
        sampler.epoch = state_dict["epoch"]
        position = state_dict["samples_read"]
        if sampler.steps_after(position) == 0:
            sampler.epoch += 1
            position = 0
        self._position = position
        self._resume_at = (sampler.epoch, position)

    def stream_place(self, position: int) -> dict[str, int]:
        """Where to begin to read data that never end, on a rank that reads them.

        Args:
            position: Of the sample that is to come next.

        Returns:
            Plain numbers; empty on a rank that does not read.
        """
        return {}

    def start_stream_at(self, place: dict[str, int]) -> None:
        """Begin to read data that never end at a place, on a rank that reads them.

        Args:
            place: From `stream_place`.
        """

    def start_at(self, epoch: int, position: int) -> None:
        """Let the next iteration start at a place of an epoch.

        Args:
            epoch: The epoch.
            position: Samples of its order to leave out.
        """
        self.global_sampler.epoch = epoch
        self._position = position
        self._resume_at = (epoch, position)

    def begin(self) -> int:
        """Start an iteration.

        Returns:
            The place it starts at.
        """
        epoch, start = self._resume_at or (self.epoch, 0)
        if epoch != self.epoch:  # the sampler was told another one
            start = 0
        self._resume_at = None
        self._position = start
        return start
