"""A stream of samples as something that the loaders can number: batches without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchtune_cp.data.loader import MapDataset
from torchtune_cp.data.sampler import ENDLESS
from torchtune_cp.datasets.sample_stream import SampleStream, StreamPlace
from torchtune_cp.datasets.sft import SFTDataset
from torchtune_cp.errors import UserError

# Keeps these draws apart from others that are seeded with the same numbers.
_STREAM = 0x53545245  # "STRE"


@dataclass(frozen=True)
class _Held:
    """The batches of a buffer.

    Attributes:
        first: The number of its first batch.
        place: Where its rows begin.
        batches: The batches as the rows have them.
        order: In which order they are taken.
    """

    first: int
    place: StreamPlace
    batches: MapDataset
    order: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.order)


class StreamedBatches(Dataset):
    """The batches of a `SampleStream`, numbered from the first pass over the data on.

    Made for reading in order. It keeps two buffers, so that a loader may go back by what it had read ahead;
    anything further back is found by reading from the start. Batch i is made of the rows, the seed and the
    settings alone: every rank of every mesh that asks for it gets the same.

    Each buffer's batches are taken in a random order of their own, another one in each pass.
    """

    def __init__(
        self,
        stream: SampleStream,
        make_batches: Callable[[SFTDataset, StreamPlace], MapDataset],
        *,
        shuffle: bool,
        seed: int,
        settings: str = "",
    ) -> None:
        """Keep the settings; nothing is read yet.

        Args:
            stream: The samples.
            make_batches: Makes batches of a buffer's samples (they may be none), given where it begins.
            shuffle: Whether a buffer's batches are taken in a random order.
            seed: Of these orders.
            settings: What `make_batches` does, in words: a place in the stream holds for the same only.
        """
        self._stream = stream
        self._make_batches = make_batches
        self._shuffle = shuffle
        self._seed = seed
        self.order_settings = f"shuffle_buffer_size {stream.buffer_size}" + (
            f", {settings}" if settings else ""
        )
        self.start_at({})

    def start_at(self, place: Mapping[str, int]) -> None:
        """Be ready to read on from a place.

        Args:
            place: From `place_of`; an empty one is the beginning.
        """
        fields = dict(place)
        self._next = fields.pop("first", 0), StreamPlace(**fields)
        self._held: tuple[_Held, ...] = ()
        self._coming = self._read(*self._next)

    def place_of(self, index: int) -> dict[str, int]:
        """Where to begin to read for batch `index`: plain numbers, empty for the beginning."""
        for held in self._held:
            if held.first <= index < held.end:
                return {"first": held.first, **asdict(held.place)}
        first, place = self._next
        return {"first": first, **asdict(place)} if first <= index else {}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Batch `index`.

        Raises:
            UserError: The data cannot be read, or give no batch.
        """
        begins = self._held[0].first if self._held else self._next[0]
        if index < begins:
            self.start_at({})
        for held in self._held:
            if held.first <= index < held.end:
                return held.batches[held.order[index - held.first]]
        for held in self._coming:
            if index < held.end:
                return held.batches[held.order[index - held.first]]
        raise AssertionError("a stream does not end")

    def _read(self, first: int, start: StreamPlace) -> Iterator[_Held]:
        pass_began = first
        for place, samples, after in self._stream.buffers(start):
            if place.rows == 0:
                if place.epoch > start.epoch and first == pass_began:
                    raise UserError(f"no batches in {self._stream.name}: all samples were left out")
                pass_began = first
            batches = self._make_batches(samples, place)
            held = _Held(first, place, batches, self._order(len(batches), place))
            first = held.end
            self._held = (*self._held, held)[-2:]
            self._next = first, after
            yield held

    def _order(self, count: int, place: StreamPlace) -> list[int]:
        if not self._shuffle:
            return list(range(count))
        generator = np.random.default_rng([_STREAM, self._seed, place.epoch, place.buffer])
        order: list[int] = generator.permutation(count).tolist()
        return order
