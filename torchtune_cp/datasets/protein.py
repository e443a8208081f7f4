"""Protein sequences, one sample each: from a FASTA file, or a column of any data set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.data.esm_tokenizer import EsmTokenizer
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.fasta import FastaRows, clean_sequence
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.packed import PackedDataset, sft_or_packed
from torchtune_cp.datasets.row_stream import FastaStream, FirstRows, HubStream, RowStream
from torchtune_cp.datasets.sample_stream import BUFFER_SIZE, SampleStream
from torchtune_cp.datasets.sft import (
    EmptyRow,
    SFTDataset,
    UnknownText,
    require_text,
    sequence_limit,
)
from torchtune_cp.datasets.source import Rows, describe_source, load_rows
from torchtune_cp.datasets.source_arguments import check_proteins
from torchtune_cp.errors import UserError

UNKNOWN_POLICIES = ("unk", "error", "drop")


class ProteinReader:
    """Reads a row's sequence; labels are the tokens themselves."""

    def __init__(self, tokenizer: HFTokenizer, column: str, unknown: str, add_eos: bool) -> None:
        """Keep the settings; see `protein_dataset`."""
        self._tokenizer = tokenizer
        self._alphabet = tokenizer.residues if isinstance(tokenizer, EsmTokenizer) else None
        self._column = column
        self._unknown = unknown
        self._add_eos = add_eos

    def fingerprint(self) -> list[Any]:
        """What the tokens depend on."""
        return [self._tokenizer, self._column, self._unknown, self._add_eos]

    def _sequence(self, row: Mapping[str, Any]) -> tuple[str, set[str]]:
        """The clean sequence, and the characters in it that the alphabet lacks."""
        sequence = clean_sequence(require_text(row, self._column, "dataset.column"))
        return sequence, set() if self._alphabet is None else set(sequence) - self._alphabet

    def check(self, row: Mapping[str, Any]) -> str | None:
        """See `RowReader`."""
        sequence, unknown = self._sequence(row)
        if not sequence:
            raise EmptyRow
        if not unknown:
            return None
        if self._unknown == "error":
            found = ", ".join(f"{c!r} at {sequence.index(c) + 1}" for c in sorted(unknown))
            raise UserError(
                f"residues outside the alphabet: {found}; set dataset.unknown to unk or drop"
            )
        found = "".join(c * sequence.count(c) for c in sorted(unknown))
        if self._unknown == "drop":
            raise UnknownText(found)
        return found

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """See `RowReader`."""
        sequence, unknown = self._sequence(row)
        # Each by itself, so that all residues keep their positions: the tokenizer, like
        # transformers', makes one token of several unknown characters in a row.
        for character in unknown:
            sequence = sequence.replace(character, "\n")
        if unknown:
            sequence = sequence.replace("\n", "<unk>")
        tokens = self._tokenizer.encode(sequence, add_bos=True, add_eos=self._add_eos)
        return tokens, list(tokens)


@checked_by(check_proteins)
def protein_dataset(
    tokenizer: HFTokenizer,
    path: str | None = None,
    max_seq_len: int | None = None,
    *,
    source: str | None = None,
    column: str = "sequence",
    split: str = "train",
    unknown: str = "unk",
    overlong: str | None = None,
    add_eos: bool = True,
    min_tokens: int = 0,
    max_rows: int | None = None,
    on_bad_row: str = "error",
    packed: bool = False,
    split_across_pack: bool = False,
    packing_strategy: str = "greedy",
    streaming: bool = False,
    shuffle_buffer_size: int = BUFFER_SIZE,
    num_proc: int | None = None,
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset | SampleStream:
    """Every protein as one sample; every residue is trained on (or may be masked).

    Sequences are read in upper case, without white space and without a ``*`` at the end.

    Args:
        tokenizer: Turns a sequence into tokens: `esm_tokenizer`, or any other.
        path: A FASTA file, or FASTA.gz. A plain one is read record by record as training goes.
        max_seq_len: The longest sample in tokens; None = the tokenizer's.
        source: In place of `path`: "json", "csv", "parquet", ... with `data_files`, a folder, or a hub
            data set's name; see `text_completion_dataset`.
        column: Where the sequence is, with `source`.
        split: Part of the data, with `source`.
        unknown: What to do with residues outside an ESM alphabet (which has B, O, U, X, Z, "." and
            "-"): "unk" reads each as `<unk>`, "drop" leaves the protein out, "error" refuses it.
            `describe_stats` counts them.
        overlong: What to do with longer proteins: "truncate" (the default), "split", "drop", "error";
            packed: "split" with `split_across_pack`, else "error" is the default. A cut protein has no
            `<eos>` at the cut, and further pieces no `<cls>`: it does not end there.
        add_eos: End each protein with the end-of-text token.
        min_tokens: Leave out shorter proteins.
        max_rows: Use only the first so many proteins; streaming: rows, those left out included.
        on_bad_row: "error" or "skip".
        packed: Put several proteins into each sample, up to `max_seq_len` tokens; see `PackedDataset`.
        split_across_pack: Packed: whether one may be cut where a pack ends.
        packing_strategy: Packed: "greedy" keeps the order, "best_fit" fills better; see
            `torchtune_cp.data.packing.pack_documents`.
        streaming: Read from front to back as training goes, without looking through the data first; not
            packed. See `SampleStream`.
        shuffle_buffer_size: Streaming: rows that are held, checked and shuffled at a time.
        num_proc: The most processes that tokenise; None = one a core. Few proteins need one. Not with
            streaming.
        **load_dataset_kwargs: With `source`: `data_files`, `data_dir`, `name`, ... for
            `datasets.load_dataset`.

    Raises:
        UserError: The data cannot be read, holds no protein, or an argument is not known.
    """
    options = SampleOptions.among(locals())
    if unknown not in UNKNOWN_POLICIES:
        raise UserError(
            f"dataset.unknown={unknown!r} is not known; allowed: {', '.join(UNKNOWN_POLICIES)}"
        )
    if unknown != "unk" and not isinstance(tokenizer, EsmTokenizer):
        raise UserError(
            f"dataset.unknown={unknown!r} needs torchtune_cp.data.esm_tokenizer: any other tokenizer "
            "reads every character; leave it out"
        )
    if (path is None) == (source is None):
        raise UserError("protein_dataset needs either dataset.path (FASTA) or dataset.source")
    if path is not None and load_dataset_kwargs:
        raise UserError(
            f"dataset.path reads FASTA and takes no {', '.join(sorted(load_dataset_kwargs))}"
        )
    reader = partial(
        ProteinReader, tokenizer, column if path is None else "sequence", unknown, add_eos
    )
    if streaming:
        if packed:
            raise UserError(
                "dataset.packed must be false with streaming=true: token_micro_batch_size packs"
            )
        if num_proc is not None:
            raise UserError(
                "dataset.num_proc is not for streaming=true, whose rows are tokenised as they are read"
            )
        return SampleStream(
            _stream(path, source, split, max_rows, load_dataset_kwargs),
            lambda rows, **settings: SFTDataset(
                rows,
                reader(),
                **settings,
                max_seq_len=sequence_limit(max_seq_len, tokenizer),
                overlong=overlong or "truncate",
                on_bad_row=on_bad_row,
                min_tokens=min_tokens,
            ),
            buffer_size=shuffle_buffer_size,
        )
    blank_lines = 0
    rows: Rows
    if path is not None:
        rows, name = FastaRows(path), str(path)
    else:
        assert source is not None
        rows = load_rows(source, split=split, num_proc=num_proc, **load_dataset_kwargs)
        name = describe_source(source, load_dataset_kwargs)
        blank_lines = getattr(rows, "blank_lines", 0)
    return sft_or_packed(
        rows,
        reader(),
        tokenizer,
        options,
        max_rows_used=max_rows,
        name=name,
        blank_lines=blank_lines,
    )


def _stream(
    path: str | None,
    source: str | None,
    split: str,
    max_rows: int | None,
    load_dataset_kwargs: Mapping[str, Any],
) -> RowStream:
    rows: RowStream
    if path is not None:
        rows = FastaStream(path)
    else:
        assert source is not None
        name = describe_source(source, load_dataset_kwargs)
        rows = HubStream(source, split=split, name=name, load_dataset_kwargs=load_dataset_kwargs)
    return rows if max_rows is None else FirstRows(rows, max_rows)
