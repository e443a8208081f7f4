"""What rows became, as an Arrow table: the tokens and labels of each, or why it gives no sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    """

    tokens: Sequence[int] | None = None
    labels: Sequence[int] | None = None
    cause: str | None = None
    note: str | None = None


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
    columns: list[list[Any]] = [[], [], [], []]
    for outcome in outcomes:
        same = outcome.labels == outcome.tokens
        columns[0].append(outcome.tokens)
        columns[1].append(None if same else outcome.labels)
        columns[2].append(outcome.cause)
        columns[3].append(outcome.note)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


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
        lengths = pc.fill_null(pc.list_value_length(self._table["tokens"]), 0)
        self.lengths: Int64 = np.asarray(lengths, dtype=np.int64)
        self.has_sample = np.asarray(self._table["cause"].is_null(), dtype=bool)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def notes(self) -> Iterator[tuple[int, str | None, str | None]]:
        """(row, cause, note) of every row that has a cause or a note."""
        cause, note = self._table["cause"], self._table["note"]
        rows = np.flatnonzero(~(self.has_sample & np.asarray(note.is_null(), dtype=bool)))
        chosen = pa.array(rows)
        return zip(
            rows.tolist(),
            cause.take(chosen).to_pylist(),
            note.take(chosen).to_pylist(),
            strict=True,
        )

    def read(self, row: int, start: int = 0, length: int | None = None) -> tuple[Int32, Int32]:
        """(tokens, labels), int32 [length] each, of a part of a row's sample; not to be written to."""
        tokens = self._table["tokens"][row].values
        labels = self._table["labels"][row].values
        part = tokens.slice(start, length).to_numpy()
        return part, part if labels is None else labels.slice(start, length).to_numpy()

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
