"""Alpaca-style instruction data: instruction, optional input, output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.data.messages import MaskingStrategy, Message, resolve_masking_strategy
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.chat import MessagesReader
from torchtune_cp.datasets.instruct import resolve_columns
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.packed import PackedDataset, dataset_from_source
from torchtune_cp.datasets.sft import (
    EmptyRow,
    SFTDataset,
    require_text,
)
from torchtune_cp.datasets.source_arguments import check_source
from torchtune_cp.errors import UserError

# The prompts of the Stanford Alpaca project (github.com/tatsu-lab/stanford_alpaca), which models
# trained on such data expect word for word.
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
PROMPT_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


class AlpacaColumns:
    """Reads a user turn (the Alpaca prompt) and an assistant turn from a row."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Keep the names of the columns "instruction", "input" (may be missing) and "output"."""
        self.columns = (*columns.values(), "history")
        self._columns = columns

    def __call__(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's messages: those of its history, if it has one, and two.

        The input column may be missing, null or blank.
        """
        instruction = require_text(
            row, self._columns["instruction"], "dataset.column_map.instruction"
        )
        answer = require_text(row, self._columns["output"], "dataset.column_map.output")
        if not instruction.strip() or not answer.strip():
            raise EmptyRow
        column = self._columns.get("input")
        given = ""
        if column is not None and row.get(column) is not None:
            given = require_text(row, column, "dataset.column_map.input")
        template = PROMPT_WITH_INPUT if given.strip() else PROMPT_WITHOUT_INPUT
        prompt = template.format(instruction=instruction, input=given)
        return [*_history(row), Message("user", prompt), Message("assistant", answer)]


def _history(row: Mapping[str, Any]) -> list[Message]:
    """Earlier prompts and answers, in the column "history" that some Alpaca-style data have."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    ):
        raise UserError("column 'history' must be a list of pairs [prompt, answer]")
    return [
        Message(role, text)
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


@checked_by(check_source)
def alpaca_dataset(
    tokenizer: HFTokenizer,
    *,
    source: str = "tatsu-lab/alpaca",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: str | None = None,
    packed: bool = False,
    split_across_pack: bool = False,
    packing_strategy: str = "greedy",
    split: str = "train",
    max_seq_len: int | None = None,
    overlong: str | None = None,
    on_bad_row: str = "error",
    max_rows: int | None = None,
    num_proc: int | None = None,
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Alpaca-style data; by default the original data set from the hub.

    Args:
        tokenizer: With a chat template.
        source: A hub data set's name, or "json", "csv" or "parquet" with `data_files`.
        column_map: Columns of "instruction", "output" and optionally "input", when named otherwise.
            Rows with a blank instruction or output are skipped and counted.
        train_on_input: True (or nothing given, as in torchtune) trains on the prompt as well; False
            on the answer.
        masking_strategy: The same choice by name; see `chat_dataset`.
        packed: Put several rows into each sample, up to `max_seq_len` tokens; see `PackedDataset`.
        split_across_pack: Packed: whether a row may be cut where a pack ends.
        packing_strategy: Packed: "greedy" keeps the order, "best_fit" fills better; see
            `torchtune_cp.data.packing.pack_documents`.
        split: Part of the data, such as "train" or "train[:95%]".
        max_seq_len: The longest sample in tokens; None = the tokenizer's.
        overlong: What to do with longer ones: "truncate" (the default), "split", "drop", "error"; packed:
            "split" with `split_across_pack`, else "error" is the default. See `SFTDataset`.
        on_bad_row: "error" or "skip", for rows with a missing, null or wrongly typed field.
        max_rows: Read only the first so many rows.
        num_proc: The most processes that read and tokenise; None = one a core. Few rows need one.
        **load_dataset_kwargs: `data_files`, `data_dir`, `name`, ... for `datasets.load_dataset`.

    Raises:
        UserError: When the data cannot be read, a row is malformed, or there is no chat template.
    """
    options = SampleOptions.among(locals())
    columns = resolve_columns(
        column_map,
        {"instruction": "instruction", "input": "input", "output": "output"},
        required=("instruction", "output"),
    )
    strategy = resolve_masking_strategy(
        masking_strategy, train_on_input, MaskingStrategy.TRAIN_ON_ALL
    )
    reader = MessagesReader(tokenizer, AlpacaColumns(columns), strategy, None)
    return dataset_from_source(
        reader,
        tokenizer,
        options,
        source=source,
        split=split,
        max_rows=max_rows,
        load_dataset_kwargs=load_dataset_kwargs,
    )


@checked_by(check_source)
def alpaca_cleaned_dataset(
    tokenizer: HFTokenizer, *, source: str = "yahma/alpaca-cleaned", **kwargs: Any
) -> SFTDataset | PackedDataset:
    """`alpaca_dataset` on the cleaned version of the data; takes the same arguments."""
    return alpaca_dataset(tokenizer, source=source, **kwargs)


# Its arguments are those of `alpaca_dataset`, by name too.
alpaca_cleaned_dataset.__signature__ = inspect.signature(alpaca_dataset)  # type: ignore[attr-defined]
