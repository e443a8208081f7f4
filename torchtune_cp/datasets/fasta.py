"""FASTA files, gzipped or not, record by record."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from torchtune_cp.datasets.local_paths import local_path
from torchtune_cp.datasets.record_files import broken_character
from torchtune_cp.errors import UserError


def clean_sequence(text: str) -> str:
    """A sequence as the tokenizer wants it.

    Args:
        text: As it stands in a file.

    Returns:
        Upper case (lower case marks repeats), without white space and without the ``*`` that stands
        for the stop codon at the end of some translations.
    """
    return "".join(text.split()).upper().removesuffix("*")


def read_fasta(path: str | Path, skip: int = 0) -> Iterator[tuple[str, str]]:
    """Read a FASTA file, gzipped or not, record by record.

    Args:
        path: The file; ``.gz`` in its name means gzip.
        skip: Records at the front that are passed over.

    Yields:
        The record's name (the header's first word) and its sequence, see `clean_sequence`.

    Raises:
        UserError: The file is missing, unreadable, has text before its first ``>`` header, or fewer
            records than `skip`.
    """
    file = local_path(path)
    name: str | None = None
    parts: list[str] = []
    try:
        # Bytes that are no ASCII stay, as lone surrogates: who reads the record refuses it by its name.
        # A header is a name only.
        with (gzip.open if file.suffix == ".gz" else open)(
            file, "rt", encoding="utf-8-sig", errors="surrogateescape"
        ) as lines:
            for number, line in _from_record(skip, lines, file):
                line = line.strip()
                if line.startswith(">"):
                    if name is not None:
                        yield name, clean_sequence("".join(parts))
                    name, parts = _name(line), []
                elif line and name is None:
                    raise UserError(f"{file}, line {number}: text before the first '>' header")
                elif line:
                    parts.append(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"dataset.path: cannot read {file} as FASTA: {error}") from error
    if name is not None:
        yield name, clean_sequence("".join(parts))


def _from_record(skip: int, lines: Iterable[str], file: Path) -> Iterator[tuple[int, str]]:
    """Lines and their numbers, from the header of a record on."""
    numbered = enumerate(lines, 1)
    headers = (entry for entry in numbered if entry[1].lstrip().startswith(">"))
    passed = sum(1 for _ in islice(headers, skip))
    if passed < skip:
        raise UserError(f"{file} has {passed} records, fewer than the {skip} that were read of it")
    if skip:
        yield from islice(headers, 1)
    yield from numbered


def _name(header: str) -> str:
    return (header[1:].split() or [""])[0]


class FastaRows:
    """The records of a FASTA file as rows with one column, "sequence".

    Of a plain file only the places of the records are kept, 8 bytes each; a record is read when it is
    asked for. A gzipped file cannot be read from the middle, so its residues are kept, a byte each.
    """

    def __init__(self, path: str | Path) -> None:
        """Look through the whole file.

        Args:
            path: The file; ``.gz`` in its name means gzip.

        Raises:
            UserError: The file cannot be read as FASTA, or holds no record.
        """
        self._file = local_path(path)
        self._records: list[tuple[str, str]] | None = None
        self._starts = array("q")
        if self._file.suffix == ".gz":
            self._records = list(read_fasta(self._file))
        else:
            next(read_fasta(self._file), None)  # a file that is no FASTA is refused here
            self._find_records()
        if not len(self):
            raise UserError(f"dataset.path={str(path)!r} holds no FASTA record ('>name' lines)")

    def _find_records(self) -> None:
        place = 0
        with self._file.open("rb") as lines:
            for line in lines:
                if line.removeprefix(BOM_UTF8).lstrip().startswith(b">"):
                    self._starts.append(place)
                place += len(line)
        self._starts.append(place)

    def __len__(self) -> int:
        return len(self._starts) - 1 if self._records is None else len(self._records)

    def __iter__(self) -> Iterator[dict[str, str]]:
        """All rows in order, in one pass over the file."""
        records = read_fasta(self._file) if self._records is None else iter(self._records)
        # `map` goes on behind a record that is refused, a generator would end.
        return map(self._row, records)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self._row(self._record(index))

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return self._file.stat().st_size

    def __reduce__(self) -> tuple[type[FastaRows], tuple[Path]]:
        # A process that shares the work reads the file itself, instead of being sent its contents.
        return FastaRows, (self._file,)

    def fingerprint(self) -> str:
        """A hash of the file's content."""
        digest = hashlib.sha256()
        with self._file.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def name_of(self, index: int) -> str:
        """The record's name."""
        return self._record(index)[0]

    def place_of(self, index: int) -> str:
        """How messages name a record."""
        return f"protein {self.name_of(index)}"

    def _row(self, record: tuple[str, str]) -> dict[str, str]:
        if (bad := broken_character(record[1])) is not None:
            raise UserError(f"cannot read {self._file} as FASTA: the sequence has {bad}")
        return {"sequence": record[1]}

    def _record(self, index: int) -> tuple[str, str]:
        if self._records is not None:
            return self._records[index]
        # Opened anew each time: worker processes would share the position in an open file.
        try:
            with self._file.open("rb") as file:
                file.seek(self._starts[index])
                raw = file.read(self._starts[index + 1] - self._starts[index])
        except OSError as error:
            raise UserError(f"dataset.path: cannot read {self._file} as FASTA: {error}") from error
        text = raw.removeprefix(BOM_UTF8).decode("utf-8", "surrogateescape")
        header, _, sequence = text.replace("\r", "\n").strip().partition("\n")
        return _name(header), clean_sequence(sequence)
