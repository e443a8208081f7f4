"""The data loader: one reader per data-parallel rank, resumable at any step on any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtune_cp.data.resumable_loader import ResumableLoader
from torchtune_cp.data.sampler import FILLER, GlobalBatchSampler
from torchtune_cp.errors import UserError

CollateFn = Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]

# A user's mistake met in a worker process travels to the main process under this key, because
# exceptions that cross processes arrive as a long traceback in which the one useful line drowns.
_ERROR = "__user_error__"


class MapDataset(Protocol):
    """A dataset with a length, whose samples are mappings with "tokens" and "labels"."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class _SamplesWithIds(Dataset):
    """Adds each sample's index as "sample_id", and turns FILLER into an empty sample."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset the epoch, if it wants to know (masks that are drawn anew)."""
        tell = getattr(self.dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == FILLER:
            return {"tokens": [], "labels": [], "sample_id": FILLER}
        try:
            return {**self.dataset[index], "sample_id": index}
        except UserError as error:
            return {_ERROR: str(error)}


class _CollateOrReport:
    """The user's collate function, or the first mistake met while reading the samples."""

    def __init__(self, collate_fn: CollateFn) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        for sample in samples:
            if _ERROR in sample:
                return sample
        try:
            return self.collate_fn(samples)
        except UserError as error:
            return {_ERROR: str(error)}


class TokenDataLoader(ResumableLoader, StatefulDataLoader):
    """A `StatefulDataLoader` whose state does not depend on mesh, batch size or workers.

    torchdata's own state counts this rank's batches and names its workers, so it could only be
    loaded into the same layout. Here the state is the place in the epoch's global order, counted
    when a batch is handed out: batches that workers have read ahead do not count, and a checkpoint
    taken with two data-parallel ranks continues with four.

    An iteration starts at the beginning of the epoch, except the first one after `load_state_dict`,
    which continues where the state was taken.
    """

    def __init__(
        self,
        dataset: MapDataset,
        sampler: GlobalBatchSampler,
        collate_fn: CollateFn,
        num_workers: int = 0,
    ) -> None:
        """See `build_dataloader`."""
        ResumableLoader.__init__(self, sampler)
        if sampler.endless and num_workers:
            raise UserError(
                f"num_workers={num_workers} must be 0 for data that never end (streaming): each worker"
                " would read all of them"
            )
        self.order_settings = getattr(dataset, "order_settings", "")
        self._samples = _SamplesWithIds(dataset)
        with warnings.catch_warnings():
            # torchdata calls a function of torch that has been deprecated; no user can mend it.
            warnings.filterwarnings("ignore", message=".*set_vital.*deprecated")
            StatefulDataLoader.__init__(
                self,
                self._samples,
                batch_sampler=sampler,
                collate_fn=_CollateOrReport(collate_fn),
                num_workers=num_workers,
            )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches of the current epoch. Raises UserError for a row that cannot be read."""
        self.global_sampler.start = self.begin()
        self._samples.set_epoch(self.epoch)
        return self._count(StatefulDataLoader.__iter__(self))

    def _count(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, torch.Tensor]]:
        for batch in batches:
            if _ERROR in batch:
                raise UserError(batch[_ERROR])
            # Counted before the batch is handed out: who saves a checkpoint while it holds this
            # batch has trained (or is about to train) on it.
            self._position = min(
                self._position + self.global_sampler.global_batch_size,
                self.global_sampler.num_samples,
            )
            yield batch

    def stream_place(self, position: int) -> dict[str, int]:
        """See `ResumableLoader`."""
        place: dict[str, int] = self._stream.place_of(position)
        return place

    def start_stream_at(self, place: dict[str, int]) -> None:
        """See `ResumableLoader`."""
        self._stream.start_at(place)

    @property
    def _stream(self) -> Any:
        """The dataset, where it never ends."""
        return self._samples.dataset


def build_dataloader(
    dataset: MapDataset,
    *,
    batch_size: int,
    dp_rank: int,
    dp_degree: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    collate_fn: CollateFn,
    num_workers: int = 0,
) -> TokenDataLoader:
    """The loader of one data-parallel rank.

    Args:
        dataset: Map-style; `dataset[i]` gives "tokens" and "labels". The same on every rank.
        batch_size: Samples that one data-parallel rank takes per step.
        dp_rank: This rank's place among the data-parallel ranks; ranks of one context-parallel
            group give the same value and get the same batches.
        dp_degree: Number of data-parallel ranks.
        shuffle: Whether each epoch has its own random order, fixed by (seed, epoch) alone.
        seed: Seed of the orders.
        drop_last: True leaves an incomplete last global batch out; False fills it with empty samples
            that carry no label. Either way every rank makes the same number of steps.
        collate_fn: Makes a batch of a list of samples, for example `torchtune_cp.data.collate`.
        num_workers: Worker processes that read ahead; 0 reads in the main process.

    Returns:
        A loader whose batches carry `sample_ids` [b] (index in the dataset, -1 for a filler) when
        the collate function passes them on, with `set_epoch`, `state_dict`, `load_state_dict`.

    Raises:
        UserError: For an empty dataset, or one smaller than a global batch under `drop_last`.
    """
    sampler = GlobalBatchSampler(
        len(dataset),
        batch_size=batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    return TokenDataLoader(dataset, sampler, collate_fn, num_workers)
