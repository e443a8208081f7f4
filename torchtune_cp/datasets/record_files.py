"""Rows of local JSON, JSON lines, text and CSV files, each read from its file when it is asked for.

The rows are what the files say: no column gets a type that other rows suggest, no key is added or moved.
A record that cannot be read is an error of that row alone, named with its file and line.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torchtune_cp.datasets.local_paths import unpacked
from torchtune_cp.errors import UserError

FORMATS = ("json", "text", "csv")

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 1 << 20


class WholeDocument(Exception):
    """A JSON file that is one object, not one a line."""


class RecordFile:
    """The records of one file.

    Attributes:
        path: As the user named it.
        blank_lines: Lines that hold no record.
        columns: Of a CSV file, its header; of others, the keys of the first row.
    """

    def __init__(self, path: Path, kind: str) -> None:
        """Look through the whole file; only the places of its records are kept, 16 bytes each.

        Args:
            path: The file; gzip, bz2 and xz files are unpacked first, into the cache of `datasets`.
            kind: One of `FORMATS`.

        Raises:
            UserError: The file cannot be read, is UTF-16, or as a whole is no JSON or CSV.
            WholeDocument: See there.
        """
        self.path = path
        self.blank_lines = 0
        self.columns: list[str] = []
        self._kind = kind
        self._starts, self._ends = array("q"), array("q")
        self._array: list[Any] | None = None  # of a file that is one JSON array
        self._open: IO[bytes] | None = None
        try:
            self._plain = unpacked(path)
            with self._plain.open("rb") as file:
                head = file.read(64)
                if head.startswith(_UTF16):
                    raise UserError(f"{path} is UTF-16 text; convert it to UTF-8")
                self._begin = len(_BOM) if head.startswith(_BOM) else 0
                file.seek(self._begin)
                self._find_records(file)
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read {path}: {error}") from error

    def _find_records(self, file: IO[bytes]) -> None:
        if self._kind == "csv":
            self._find_csv(file)
        elif self._kind == "text":
            for start, end in _text_lines(file, self._begin):
                self._add(start, end)
        else:
            first = file.read(_BLOCK).lstrip()
            file.seek(self._begin)
            if first.startswith(b"["):
                self._read_array(file)
            else:
                self._find_json_lines(file)
        if self._kind == "json" and len(self):
            try:
                self.columns = list(self[0])
            except UserError:  # told when the row is asked for
                self.columns = []

    def _add(self, start: int, end: int) -> None:
        self._starts.append(start)
        self._ends.append(end)

    def _find_json_lines(self, file: IO[bytes]) -> None:
        place = self._begin
        for line in file:
            if line.strip().removeprefix(_BOM):
                self._add(place, place + len(line))
            else:
                self.blank_lines += 1
            place += len(line)
        if len(self) > 1 and _parsed(self._bytes(0)) is None:
            # Its first line says nothing by itself: lines of one object, or a broken row.
            file.seek(self._begin)
            if isinstance(_parsed(file.read()), dict):
                raise WholeDocument

    def _read_array(self, file: IO[bytes]) -> None:
        try:
            # Bytes that are not UTF-8 become lone surrogates, which the row is refused for.
            rows = json.loads(file.read().decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"cannot read {self.path}: JSON parse error: {error}") from error
        self._array = [{"text": row} if isinstance(row, str) else row for row in rows]

    def _find_csv(self, file: IO[bytes]) -> None:
        csv.field_size_limit(sys.maxsize)
        taken = self._begin

        def lines() -> Iterator[str]:
            nonlocal taken
            for line in file:
                taken += len(line)
                yield line.decode("utf-8", "surrogateescape")

        start = taken
        try:
            for fields in csv.reader(lines(), strict=True):
                if not fields:
                    self.blank_lines += 1
                elif not self.columns:
                    self.columns = fields
                else:
                    self._add(start, taken)
                start = taken
        except csv.Error as error:
            raise UserError(
                f"cannot read {self.path}: CSV error in row {len(self)}: {error}"
            ) from error
        doubled = {name for name in self.columns if self.columns.count(name) > 1}
        if doubled:
            raise UserError(f"{self.path} has several columns named {', '.join(sorted(doubled))}")

    def __len__(self) -> int:
        return len(self._starts) if self._array is None else len(self._array)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """A row; UserError saying what is wrong with the record, not where it stands."""
        if self._array is not None:
            row = self._array[index]
            return _mapping(row)
        raw = self._bytes(index)
        try:
            text = raw.removeprefix(_BOM).decode("utf-8") if self._kind == "json" else raw.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {self._line(index)} is not UTF-8 text (0x{raw[error.start]:02X} at byte "
                f"{error.start + 1} of the line)"
            ) from error
        if "\0" in text:
            raise UserError(f"line {self._line(index)} has NUL bytes, which no text has")
        if self._kind == "text":
            return {"text": text}
        return self._json(text, index) if self._kind == "json" else self._csv(text, index)

    def _json(self, text: str, index: int) -> Mapping[str, Any]:
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"line {self._line(index)}, column {error.colno}"
            raise UserError(f"JSON parse error in {where}: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # numbers without end, nesting without end
            raise UserError(f"JSON parse error in line {self._line(index)}: {error}") from error
        return _mapping(row, escapes="\\u" in text)

    def _csv(self, text: str, index: int) -> Mapping[str, Any]:
        fields = next(csv.reader(io.StringIO(text, newline=""), strict=True))
        if len(fields) != len(self.columns):
            raise UserError(
                f"line {self._line(index)} has {len(fields)} fields, the header {len(self.columns)}"
            )
        return dict(zip(self.columns, fields, strict=True))

    def _bytes(self, index: int) -> bytes:
        if self._open is None:
            self._open = self._plain.open("rb")
        start, end = self._starts[index], self._ends[index]
        # At a place, not from where the file stands: processes that are forked share that.
        return os.pread(self._open.fileno(), end - start, start)

    def _line(self, index: int) -> int:
        with self._plain.open("rb") as file:
            return file.read(self._starts[index]).count(b"\n") + 1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": None}

    def fingerprint(self) -> str:
        """A hash of the file's content and of how it is read."""
        digest = hashlib.sha256(self._kind.encode())
        with self._plain.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()


class RecordRows:
    """The rows of several files, one behind the other; those of one split."""

    def __init__(self, files: Sequence[RecordFile], chosen: Sequence[int] | None = None) -> None:
        """Keep the files.

        Args:
            files: In order.
            chosen: Places of the rows in the files together; None = all.
        """
        self._files = list(files)
        self._ends = [sum(len(f) for f in self._files[: i + 1]) for i in range(len(self._files))]
        total = self._ends[-1] if self._ends else 0
        self._chosen: Sequence[int] = range(total) if chosen is None else chosen
        self._columns = next((f.columns for f in self._files if f.columns), [])

    @property
    def blank_lines(self) -> int:
        """Lines of the files that hold no row."""
        return sum(file.blank_lines for file in self._files)

    @property
    def nbytes(self) -> int:
        """About how many bytes of the files these rows are."""
        total = self._ends[-1] if self._ends else 0
        size = sum(file.path.stat().st_size for file in self._files)
        return size * len(self) // max(1, total)

    def __len__(self) -> int:
        return len(self._chosen)

    def _at(self, index: int) -> tuple[RecordFile, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        place = self._chosen[index]
        which = bisect_right(self._ends, place)
        return self._files[which], place - (self._ends[which - 1] if which else 0)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """The row, with null for a column of the first row that it lacks; UserError for a broken one."""
        file, place = self._at(index)
        row = file[place]
        return {**row, **{column: None for column in self._columns if column not in row}}

    def select(self, indices: Sequence[int]) -> RecordRows:
        """Some of these rows."""
        contiguous = isinstance(indices, range) and isinstance(self._chosen, range)
        chosen = (
            self._chosen[indices.start : indices.stop : indices.step]
            if contiguous and isinstance(indices, range)
            else array("q", [self._chosen[i] for i in indices])
        )
        return RecordRows(self._files, chosen)

    def place_of(self, index: int) -> str:
        """How messages name a row: by its file and its number there."""
        file, place = self._at(index)
        return f"row {place} of {file.path}"

    def fingerprint(self) -> str:
        """A hash of the files' contents and of which rows these are."""
        parts = [file.fingerprint() for file in self._files]
        chosen = self._chosen if isinstance(self._chosen, range) else list(self._chosen)
        return hashlib.sha256(f"{parts} {chosen}".encode()).hexdigest()


def joined(parts: Sequence[RecordRows]) -> RecordRows:
    """The rows of several splits, one behind the other."""
    chosen = array("q")
    files: list[RecordFile] = []
    for part in parts:
        begin = sum(len(file) for file in files)
        chosen.extend(begin + place for place in part._chosen)
        files.extend(part._files)
    return RecordRows(files, chosen)


def _text_lines(file: IO[bytes], place: int) -> Iterator[tuple[int, int]]:
    """From where to where lines go, without what ends them: LF, CR LF, or CR."""
    for line in file:
        start = place
        place += len(line)
        for part in line.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
            yield start, start + len(part)
            start += len(part) + 1


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _mapping(row: Any, escapes: bool = True) -> Mapping[str, Any]:
    """The row; UserError when it is no mapping, or `escapes` in it may be and are no characters."""
    if escapes and (bad := broken_character(_all_text(row))) is not None:
        raise UserError(f"not UTF-8 text: the row has {bad}")
    if not isinstance(row, Mapping):
        kind = "null" if row is None else type(row).__name__
        raise UserError(f"the row is {kind}, it must be a JSON object")
    return row


def _all_text(value: Any) -> str:
    """All strings in a value, one behind the other."""
    if isinstance(value, Mapping):
        return "".join(_all_text(entry) for pair in value.items() for entry in pair)
    if isinstance(value, list):
        return "".join(map(_all_text, value))
    return value if isinstance(value, str) else ""


def broken_character(text: str) -> str | None:
    """What in a text is no character: a byte that was not UTF-8, or half of a pair; None where all are."""
    if text.isascii():
        return "NUL bytes" if "\0" in text else None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        broken = 0xDC80 <= code <= 0xDCFF  # how `surrogateescape` keeps a byte
        return f"byte 0x{code - 0xDC00:02X}" if broken else f"half a character, U+{code:04X}"
    return "NUL bytes" if "\0" in text else None
