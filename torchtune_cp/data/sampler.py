"""Which samples a data-parallel rank reads in which step: one global order, cut into contiguous runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from torchtune_cp.errors import UserError

FILLER = -1
"""Index that stands for an empty sample: it fills the last batch of an epoch and carries no label."""

ENDLESS = 2**60
"""The length of a dataset that never ends, and is read in its own order."""

# An odd prime far above any realistic number of epochs keeps (seed, epoch) pairs apart.
_SEED_STRIDE = 1_000_003


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of sample indices for one data-parallel rank.

    An epoch has one order of the samples, which depends on (seed, epoch) alone. Each step takes the
    next `batch_size * dp_degree` samples of it, and rank r the r-th run of `batch_size` among them.
    So the samples of a step, and their order, do not depend on how a global batch is spread over
    data-parallel ranks or accumulation steps; ranks of one context-parallel or tensor-parallel group
    share `dp_rank` and so read the same samples.

    Every rank makes the same number of steps. When the samples of an epoch do not fill the last
    global batch, `drop_last=True` leaves it out and `drop_last=False` fills it with `FILLER`; no
    sample is ever read twice in an epoch.

    The place in an epoch is counted in samples of the global order, so it holds for any other
    `batch_size` and `dp_degree`.

    A dataset of `ENDLESS` samples is read in its own order, and has one epoch: all epochs go on in it.

    Attributes:
        epoch: The epoch whose order the next iteration follows.
        start: How many samples of that order the next iteration leaves out (they were read before).
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        dp_rank: int = 0,
        dp_degree: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        """Check the sizes.

        Args:
            num_samples: Size of the dataset.
            batch_size: Samples that one rank takes per step.
            dp_rank: This rank's place among the data-parallel ranks.
            dp_degree: Number of data-parallel ranks (replicate x shard).
            shuffle: Whether the order is a random permutation, another one each epoch.
            seed: Seed of the permutations.
            drop_last: Whether an incomplete last global batch is left out (else it is filled).

        Raises:
            UserError: When there would be nothing to train on, or a size makes no sense.
        """
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise UserError(f"batch_size must be a whole number of 1 or more, not {batch_size!r}")
        if not 0 <= dp_rank < dp_degree:
            raise UserError(f"dp_rank {dp_rank} is not one of the {dp_degree} data-parallel ranks")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        if num_samples < 1:
            raise UserError("the dataset has no samples (all rows were empty, skipped or dropped?)")
        if drop_last and num_samples < self.global_batch_size:
            raise UserError(
                f"the dataset has {num_samples} samples, fewer than one global batch of "
                f"{self.global_batch_size} (batch_size {batch_size} x {dp_degree} data-parallel "
                "ranks), so drop_last would leave nothing to train on; lower batch_size or the "
                "data-parallel degree, or set drop_last: false"
            )

    @property
    def endless(self) -> bool:
        """Whether the data never end."""
        return self.num_samples == ENDLESS

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    @property
    def global_batch_size(self) -> int:
        """Samples that all data-parallel ranks together take per step."""
        return self.batch_size * self.dp_degree

    def steps_after(self, start: int) -> int:
        """Number of batches of an epoch that remain when `start` samples have been read."""
        left = max(0, self.num_samples - start)
        if self.drop_last:
            return left // self.global_batch_size
        return -(-left // self.global_batch_size)

    def __len__(self) -> int:
        """Number of batches of a whole epoch, the same on every rank."""
        return self.steps_after(0)

    def order(self, epoch: int) -> torch.Tensor:
        """The global order of an epoch: int64 [num_samples], the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed((self.seed * _SEED_STRIDE + epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches of `epoch`, from `start` on; both are read now, not while iterating."""
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        order = None if self.endless else self.order(epoch)
        for step in range(self.steps_after(start)):
            begin = start + step * self.global_batch_size + self.dp_rank * self.batch_size
            if order is None:
                yield list(range(begin, begin + self.batch_size))
                continue
            batch = order[begin : begin + self.batch_size].tolist()
            yield batch + [FILLER] * (self.batch_size - len(batch))
