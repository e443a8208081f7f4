"""What rows became, as an Arrow table: the tokens and labels of each, or why it gives no sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchtune_cp.data.packing import Int64
from torchtune_cp.datasets.source import Rows
from torchtune_cp.errors import UserError

Int32 = np.ndarray[Any, np.dtype[np.int32]]

#: The cause of a row that cannot be read or made a sample of; `note` says what is wrong.
MALFORMED = "malformed"

#: Of a row without a sample, `cause` says why. Labels that are the tokens are not kept twice.
SCHEMA = pa.schema(
    {
        "tokens": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),
        "cause": pa.string(),
        "note": pa.string(),
        "unread": pa.string(),
    }
)


@dataclass(frozen=True)
class Outcome:
    """What became of one row.

    Attributes:
        tokens: Of its sample; None without one.
        labels: As many, not shifted, -100 = not trained on.
        cause: Why there is no sample; None with one.
        note: What else is to be known about the row: what is wrong with it, or was found in it.
        unread: What of the row changes nothing, a line each.
    """

    tokens: Sequence[int] | None = None
    labels: Sequence[int] | None = None
    cause: str | None = None
    note: str | None = None
    unread: str | None = None


Transform = Callable[[Mapping[str, Any]], Outcome]
"""Makes the outcome of a row, of this row alone; can be pickled, for other processes to use."""


def outcome_at(rows: Rows, place: int, transform: Transform) -> Outcome:
    """The outcome of the row at a place, which may be one that cannot be read."""
    try:
        row = rows[place]
    except UserError as error:
        return Outcome(cause=MALFORMED, note=str(error))
    return transform(row)


def table_of(outcomes: Iterable[Outcome]) -> pa.Table:
    """Lay outcomes out as a table of `SCHEMA`."""
    columns: list[list[Any]] = [[] for _ in SCHEMA]
    for outcome in outcomes:
        same = outcome.labels == outcome.tokens
        columns[0].append(outcome.tokens)
        columns[1].append(None if same else outcome.labels)
        texts = (outcome.cause, outcome.note, outcome.unread)
        for column, text in zip(columns[2:], texts, strict=True):
            column.append(None if text is None else text.encode())
    arrays = [_array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


# The three below take what Arrow holds as it is: `pa.array` and `to_numpy` import pandas, which takes as
# long as a small run's data does.


def _lengths(column: pa.ChunkedArray) -> Int64:
    """Of each list or string of a column, 0 where it is null."""
    parts = [
        np.diff(np.frombuffer(chunk.buffers()[1], np.int32, len(chunk) + 1, 4 * chunk.offset))
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _numbers(values: pa.Array) -> Int32:
    if not len(values):
        return np.zeros(0, np.int32)
    return np.frombuffer(values.buffers()[1], np.int32, len(values), 4 * values.offset)


def _array(values: Sequence[Sequence[int] | bytes | None], kind: pa.DataType) -> pa.Array:
    """Lists or strings, some of them null."""
    valid = np.packbits(np.array([v is not None for v in values], bool), bitorder="little")
    ends = np.cumsum([0, *(len(value or ()) for value in values)])
    assert ends[-1] < 1 << 31, "a batch is of fewer tokens"
    head = [pa.py_buffer(valid), pa.py_buffer(ends.astype(np.int32))]
    if pa.types.is_string(kind):
        text = pa.py_buffer(b"".join(bytes(value) for value in values if value is not None))
        return pa.Array.from_buffers(kind, len(values), [*head, text])
    flat = np.fromiter(chain.from_iterable(value or () for value in values), np.int32, ends[-1])
    tokens = pa.Array.from_buffers(pa.int32(), len(flat), [None, pa.py_buffer(flat)])
    return pa.Array.from_buffers(kind, len(values), head, children=[tokens])


class TokenTable:
    """The outcomes of consecutive rows.

    Attributes:
        lengths: int64 [rows], tokens of each, 0 without a sample.
        has_sample: bool [rows].
    """

    def __init__(self, tables: Sequence[pa.Table], files: Sequence[Path] = ()) -> None:
        """Take over the tables, of `SCHEMA`, one behind the other.

        Args:
            tables: At least one.
            files: Where they are mapped from; none when they are in memory.
        """
        self._table = pa.concat_tables(tables)
        self.files = list(files)
        self.lengths: Int64 = _lengths(self._table["tokens"])
        self.has_sample = _lengths(self._table["cause"]) == 0

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def notes(self) -> Iterator[tuple[int, str | None, str | None]]:
        """(row, cause, note) of every row that has a cause or a note."""
        cause, note = self._table["cause"], self._table["note"]
        rows = np.flatnonzero(~self.has_sample | (_lengths(note) > 0))
        return ((row, cause[row].as_py(), note[row].as_py()) for row in rows.tolist())

    def unread(self) -> set[str]:
        """What of any row changes nothing."""
        texts = self._table["unread"].unique().to_pylist()
        return {name for text in texts if text for name in text.split("\n")}

    def first_trained(self) -> Int64:
        """int64 [rows]: the first place but 0 in each row's sample that is trained on, -1 without one."""
        parts = [np.zeros(0, np.int64)]
        for chunk in self._table["labels"].chunks:
            begin = np.frombuffer(chunk.buffers()[1], np.int32, len(chunk) + 1, 4 * chunk.offset)
            values = _numbers(chunk.values)
            places = np.flatnonzero(values[begin[0] : begin[-1]] != -100) + begin[0]
            rows = np.searchsorted(begin, places, side="right") - 1
            after_first = places > begin[rows]
            found, at = np.unique(rows[after_first], return_index=True)
            first = np.full(len(chunk), -1, np.int64)
            first[found] = places[after_first][at] - begin[found]
            parts.append(first)
        first = np.concatenate(parts)
        # Labels that are the tokens are not kept: all of them are trained on.
        whole = self.has_sample & (_lengths(self._table["labels"]) == 0)
        first[whole] = np.where(self.lengths[whole] > 1, 1, -1)
        return first

    def read(self, row: int, start: int = 0, length: int | None = None) -> tuple[Int32, Int32]:
        """(tokens, labels), int32 [length] each, of a part of a row's sample; not to be written to."""
        tokens, labels = (self._table[column][row].values for column in ("tokens", "labels"))
        part = _numbers(tokens.slice(start, length))
        return part, part if labels is None else _numbers(labels.slice(start, length))

    def __reduce__(self) -> Any:
        # A loader's worker maps the files too, instead of being sent their contents.
        return (map_files, (self.files,)) if self.files else super().__reduce__()


def joined(parts: Sequence[TokenTable]) -> TokenTable:
    """The rows of several tables, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    files = [file for part in parts for file in part.files] if all(p.files for p in parts) else []
    return TokenTable([part._table for part in parts], files)


def map_files(files: Sequence[Path]) -> TokenTable:
    """Map the files of a table into memory; OSError or pyarrow's errors when they are none."""
    tables = []
    for file in files:
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        tables.append(table.replace_schema_metadata().cast(SCHEMA))
    return TokenTable(tables, files)
