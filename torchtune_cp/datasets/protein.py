"""Protein sequences from a FASTA file, one sample each."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.packed import PackedDataset, sft_or_packed
from torchtune_cp.datasets.sft import SFTDataset
from torchtune_cp.datasets.text_completion import TextReader
from torchtune_cp.errors import UserError


def read_fasta(path: str | Path) -> Iterator[tuple[str, str]]:
    """Read a FASTA file, gzipped or not, record by record.

    Args:
        path: The file; ``.gz`` in its name means gzip.

    Yields:
        The record's name (the header's first word) and its sequence in upper case, without white
        space and without the ``*`` that some files put at the end.

    Raises:
        UserError: The file is missing, unreadable, or has text before its first ``>`` header.
    """
    file = Path(path).expanduser()
    name: str | None = None
    parts: list[str] = []
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="ascii") as lines:
            for number, line in enumerate(lines, 1):
                line = line.strip()
                if line.startswith(">"):
                    if name is not None:
                        yield name, "".join(parts).upper().removesuffix("*")
                    name, parts = (line[1:].split() or [""])[0], []
                elif line and name is None:
                    raise UserError(f"{file}, line {number}: text before the first '>' header")
                elif line:
                    parts.append("".join(line.split()))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"dataset.path: cannot read {file} as FASTA: {error}") from error
    if name is not None:
        yield name, "".join(parts).upper().removesuffix("*")


class FastaRows:
    """The records of a FASTA file as rows with one column, "sequence"."""

    def __init__(self, path: str | Path) -> None:
        """Read the whole file: residues take a byte each."""
        self._records = list(read_fasta(path))
        if not self._records:
            raise UserError(f"dataset.path={str(path)!r} holds no FASTA record ('>name' lines)")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"sequence": self._records[index][1]}

    def name_of(self, index: int) -> str:
        """The record's name, for messages."""
        return self._records[index][0]


def protein_dataset(
    tokenizer: HFTokenizer,
    path: str,
    max_seq_len: int | None = None,
    *,
    overlong: str | None = None,
    add_eos: bool = True,
    min_tokens: int = 0,
    max_rows: int | None = None,
    on_bad_row: str = "error",
    packed: bool = False,
    split_across_pack: bool = False,
    packing_strategy: str = "greedy",
) -> SFTDataset | PackedDataset:
    """Every protein of a FASTA file as one sample; every residue is trained on.

    Args:
        tokenizer: Turns a sequence into tokens.
        path: A FASTA file, or FASTA.gz.
        max_seq_len: The longest sample in tokens; None = the tokenizer's.
        overlong: What to do with longer ones: "truncate" (the default), "split", "drop", "error"; packed:
            "split" with `split_across_pack`, else "error" is the default. See `SFTDataset`.
        add_eos: End each protein with the end-of-text token.
        min_tokens: Leave out shorter proteins.
        max_rows: Use only the first so many proteins.
        on_bad_row: "error" or "skip".
        packed: Put several proteins into each sample, up to `max_seq_len` tokens; see `PackedDataset`.
        split_across_pack: Packed: whether one may be cut where a pack ends.
        packing_strategy: Packed: "greedy" keeps the order, "best_fit" fills better; see
            `torchtune_cp.data.packing.pack_documents`.

    Raises:
        UserError: The file cannot be read, or holds no record.
    """
    return sft_or_packed(
        FastaRows(path),
        TextReader(tokenizer, "sequence", add_eos),
        tokenizer,
        max_seq_len=max_seq_len,
        overlong=overlong,
        packed=packed,
        split_across_pack=split_across_pack,
        packing_strategy=packing_strategy,
        on_bad_row=on_bad_row,
        min_tokens=min_tokens,
        max_rows_used=max_rows,
        name=str(path),
    )
