"""Rows that are read from front to back only: a FASTA file, or a data set that is not downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torchtune_cp.datasets.fasta import read_fasta
from torchtune_cp.datasets.source import load_streamed_rows
from torchtune_cp.errors import UserError


class RowStream(Protocol):
    """Rows in a fixed order, which can be read again and again.

    Attributes:
        name: What messages call the data.
    """

    name: str

    def read(self, skip: int = 0) -> Iterator[Mapping[str, Any]]:
        """Read one pass over the rows.

        Args:
            skip: So many rows at the front are passed over, faster than they are read.

        Raises:
            UserError: While iterating: the data cannot be read, or have fewer rows than `skip`.
        """


class FastaStream:
    """The records of a FASTA file, gzipped or not, as rows with one column, "sequence"."""

    def __init__(self, path: str | Path) -> None:
        """Look at the first record.

        Raises:
            UserError: The file cannot be read as FASTA, or holds no record.
        """
        self.name = str(path)
        if next(read_fasta(path), None) is None:
            raise UserError(f"dataset.path={self.name!r} holds no FASTA record ('>name' lines)")

    def read(self, skip: int = 0) -> Iterator[Mapping[str, Any]]:
        """See `RowStream`."""
        return ({"sequence": sequence} for _, sequence in read_fasta(self.name, skip))


class HubStream:
    """A data set of the `datasets` library in its streaming mode."""

    def __init__(
        self, source: str, *, split: str, name: str, load_dataset_kwargs: Mapping[str, Any]
    ) -> None:
        """Look for the data set; its rows are read later.

        Args:
            source: See `load_rows`.
            split: One split, no part of one.
            name: What messages call the data.
            load_dataset_kwargs: For `datasets.load_dataset`.

        Raises:
            UserError: One line with the cause, when the data set cannot be had.
        """
        self.name = name
        self._rows = load_streamed_rows(source, split=split, **load_dataset_kwargs)

    def read(self, skip: int = 0) -> Iterator[Mapping[str, Any]]:
        """See `RowStream`; the library passes over rows without counting them."""
        try:
            yield from self._rows.skip(skip) if skip else self._rows
        except Exception as error:
            # Of the library, pyarrow or the network stack: the rows cannot be read.
            text = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"cannot read dataset {self.name!r} any further: {text}") from error


class FirstRows:
    """The first so many rows of a stream."""

    def __init__(self, rows: RowStream, count: int) -> None:
        """Keep the settings."""
        self.name = rows.name
        self._rows = rows
        self._count = count

    def read(self, skip: int = 0) -> Iterator[Mapping[str, Any]]:
        """See `RowStream`."""
        return islice(self._rows.read(skip), max(0, self._count - skip))
