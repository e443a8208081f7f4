"""One prompt and one answer per row, from two columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_cp.data.messages import MaskingStrategy, Message, resolve_masking_strategy
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.chat import MessagesReader
from torchtune_cp.datasets.packed import PackedDataset, dataset_from_source
from torchtune_cp.datasets.sft import (
    EmptyRow,
    SFTDataset,
    require_text,
)
from torchtune_cp.errors import UserError


class InputOutputColumns:
    """Reads a user turn and an assistant turn from two columns."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        """Keep the names of the columns "input" and "output"."""
        self._columns = columns

    def __call__(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's two messages; a row with a blank prompt or answer has nothing to learn from."""
        prompt = require_text(row, self._columns["input"], "dataset.column_map.input")
        answer = require_text(row, self._columns["output"], "dataset.column_map.output")
        if not prompt.strip() or not answer.strip():
            raise EmptyRow
        return [Message("user", prompt), Message("assistant", answer)]


def resolve_columns(
    column_map: Mapping[str, str] | None, defaults: Mapping[str, str], required: tuple[str, ...]
) -> dict[str, str]:
    """The column of each field.

    Args:
        column_map: The user's choice, field -> column; None takes the defaults.
        defaults: All fields with their usual columns.
        required: Fields that a given `column_map` must name.

    Raises:
        UserError: When `column_map` has an unknown field or lacks a required one.
    """
    if column_map is None:
        return dict(defaults)
    unknown = [field for field in column_map if field not in defaults]
    missing = [field for field in required if field not in column_map]
    if unknown or missing:
        raise UserError(
            f"dataset.column_map has {', '.join(column_map) or 'no fields'}; it must name "
            f"{', '.join(required)} and may name no others than {', '.join(defaults)}"
        )
    return dict(column_map)


def instruct_dataset(
    tokenizer: HFTokenizer,
    *,
    source: str,
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: str | None = None,
    new_system_prompt: str | None = None,
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
    """Prompts and answers, written out as conversations of one turn each by the chat template.

    Args:
        tokenizer: With a chat template.
        source: "json", "csv" or "parquet" with `data_files`, or a hub data set's name.
        column_map: `{"input": column, "output": column}`; by default the columns have these names.
            Rows where either is blank are skipped and counted.
        train_on_input: True trains on the prompt as well; False (or nothing given) on the answer.
        masking_strategy: The same choice by name; see `chat_dataset`.
        new_system_prompt: A system turn put first.
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
    columns = resolve_columns(
        column_map, {"input": "input", "output": "output"}, required=("input", "output")
    )
    strategy = resolve_masking_strategy(
        masking_strategy, train_on_input, MaskingStrategy.TRAIN_ON_ASSISTANT
    )
    reader = MessagesReader(tokenizer, InputOutputColumns(columns), strategy, new_system_prompt)
    return dataset_from_source(
        reader,
        tokenizer,
        source=source,
        split=split,
        max_rows=max_rows,
        num_proc=num_proc,
        max_seq_len=max_seq_len,
        overlong=overlong,
        packed=packed,
        split_across_pack=split_across_pack,
        packing_strategy=packing_strategy,
        on_bad_row=on_bad_row,
        load_dataset_kwargs=load_dataset_kwargs,
    )
