"""Samples of data that are read from front to back, a buffer of rows at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torchtune_cp.datasets.row_stream import RowStream
from torchtune_cp.datasets.sft import DatasetStats, SFTDataset
from torchtune_cp.errors import UserError

logger = logging.getLogger(__name__)

#: Rows that are held at a time.
BUFFER_SIZE = 10_000


class BufferedRows:
    """Some consecutive rows of a stream."""

    def __init__(self, rows: list[Mapping[str, Any]], first: int, name: str) -> None:
        """Keep them.

        Args:
            rows: The rows.
            first: The place of the first of them in the stream.
            name: What messages call the stream.
        """
        self._rows = rows
        self._first = first
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def place_of(self, index: int) -> str:
        """How messages name a row."""
        return f"row {self._first + index} of {self._name}"


@dataclass(frozen=True)
class StreamPlace:
    """Where a buffer of a stream begins.

    Attributes:
        epoch: Passes over the data before this one.
        buffer: Buffers of this pass before it.
        rows: Rows of this pass before it.
        samples: Samples of this pass before it.
    """

    epoch: int = 0
    buffer: int = 0
    rows: int = 0
    samples: int = 0


class SampleStream:
    """Samples of data that never end: after the last row comes the first again.

    Rows are read, checked and laid out by the thousand: `buffer_size` at a time become one map-style
    dataset, so that every rule for rows that are malformed or too long, and every count, is that of the
    dataset which would be made of all of them.
    """

    def __init__(
        self,
        rows: RowStream,
        make: Callable[..., SFTDataset],
        *,
        buffer_size: int = BUFFER_SIZE,
    ) -> None:
        """Keep the settings; nothing is read yet.

        Args:
            rows: The data.
            make: Makes a dataset of some rows; called with them, `name` and `partial=True`.
            buffer_size: Rows of a buffer.

        Raises:
            UserError: A buffer of less than one row.
        """
        if buffer_size < 1:
            raise UserError(f"dataset.shuffle_buffer_size must be 1 or more, not {buffer_size}")
        self.name = rows.name
        self.buffer_size = buffer_size
        self._rows = rows
        self._make = make
        self._warned = False

    def buffers(
        self, start: StreamPlace | None = None
    ) -> Iterator[tuple[StreamPlace, SFTDataset, StreamPlace]]:
        """Read buffer after buffer, without end.

        What became of the rows is counted, and logged after the first buffer and at the end of each pass
        that was read whole.

        Args:
            start: Where a buffer begins; None = the beginning of the first pass.

        Yields:
            Where a buffer begins, its dataset, and where the next one begins. A buffer may have no sample.

        Raises:
            UserError: A row that cannot be read or is refused; a whole pass without a sample.
        """
        place = start or StreamPlace()
        while True:
            begin, stats = place, DatasetStats()
            rows = iter(self._rows.read(place.rows))
            while held := list(islice(rows, self.buffer_size)):
                dataset = self._make(
                    BufferedRows(held, place.rows, self.name), name=self.name, partial=True
                )
                after = StreamPlace(
                    place.epoch,
                    place.buffer + 1,
                    place.rows + len(held),
                    place.samples + len(dataset),
                )
                stats += dataset.stats
                self._warn_of_cut_rows(dataset)
                if place == StreamPlace():
                    logger.info("the first of %s: %s", self.name, stats.describe())
                yield place, dataset, after
                place = after
            if not place.samples:
                raise UserError(f"no samples in {self.name}: {stats.describe()}")
            if begin.rows == 0:
                logger.info("%s was read once through: %s", self.name, stats.describe())
            place = StreamPlace(epoch=place.epoch + 1)

    def _warn_of_cut_rows(self, dataset: SFTDataset) -> None:
        count = dataset.stats.truncated
        if count and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d rows of %s, and maybe further ones, have more than %d tokens (max_seq_len) and"
                " are cut (overlong: split, drop or error handle them otherwise)",
                count,
                dataset.stats.rows,
                self.name,
                dataset.max_seq_len,
            )
