"""Plain text for continued pretraining: every token is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.packed import PackedDataset, dataset_from_source
from torchtune_cp.datasets.sft import (
    EmptyRow,
    NothingToTrain,
    SFTDataset,
    require_text,
)
from torchtune_cp.datasets.source_arguments import check_source

_MAY_BE_ONE_TOKEN = 64  # characters


class TextReader:
    """Reads a row's text column; labels are the tokens themselves."""

    def __init__(self, tokenizer: HFTokenizer, column: str, add_eos: bool) -> None:
        """Keep the settings; see `text_completion_dataset`."""
        self._tokenizer = tokenizer
        self._column = column
        self._add_eos = add_eos
        self._bare = not tokenizer.adds_bos and (not add_eos or tokenizer.eos_id is None)

    def check(self, row: Mapping[str, Any]) -> None:
        """See `RowReader`."""
        text = require_text(row, self._column, "dataset.column")
        if not text.strip():
            raise EmptyRow
        # Only a short text without marks at its ends can be a single token, which nothing predicts.
        if self._bare and len(text) < _MAY_BE_ONE_TOKEN and len(self.tokenize(row)[0]) < 2:
            raise NothingToTrain("a single token")

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """See `RowReader`."""
        tokens = self._tokenizer.encode(row[self._column], add_bos=True, add_eos=self._add_eos)
        return tokens, list(tokens)


@checked_by(check_source)
def text_completion_dataset(
    tokenizer: HFTokenizer,
    source: str,
    column: str = "text",
    add_eos: bool = True,
    packed: bool = False,
    split_across_pack: bool = True,
    split: str = "train",
    *,
    packing_strategy: str = "greedy",
    max_seq_len: int | None = None,
    overlong: str | None = None,
    on_bad_row: str = "error",
    max_rows: int | None = None,
    num_proc: int | None = None,
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Rows of plain text, each a document of its own.

    Args:
        tokenizer: Turns text into tokens.
        source: "json", "text", "csv" or "parquet" with `data_files`, or a hub data set's name.
        column: Where the text is. Rows whose text is empty or blank are skipped and counted.
        add_eos: End each document with the end-of-text token.
        packed: Put several rows into each sample, up to `max_seq_len` tokens; see `PackedDataset`.
        split_across_pack: Packed: whether one may be cut where a pack ends.
        packing_strategy: Packed: "greedy" keeps the order, "best_fit" fills better; see
            `torchtune_cp.data.packing.pack_documents`.
        split: Part of the data, such as "train" or "train[:95%]".
        max_seq_len: The longest sample in tokens; None = the tokenizer's.
        overlong: What to do with longer ones: "truncate" (the default), "split", "drop", "error"; packed:
            "split" with `split_across_pack`, else "error" is the default. See `SFTDataset`.
        on_bad_row: "error" or "skip", for rows whose text is missing, null or not a string.
        max_rows: Read only the first so many rows.
        num_proc: The most processes that read and tokenise; None = one a core. Few rows need one.
        **load_dataset_kwargs: `data_files`, `data_dir`, `name`, ... for `datasets.load_dataset`.

    Raises:
        UserError: When the data cannot be read or a row is malformed.
    """
    options = SampleOptions.among(locals())
    return dataset_from_source(
        TextReader(tokenizer, column, add_eos),
        tokenizer,
        options,
        source=source,
        split=split,
        max_rows=max_rows,
        load_dataset_kwargs=load_dataset_kwargs,
    )
