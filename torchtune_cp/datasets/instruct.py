"""A prompt and an answer per row, from two columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.data.messages import MaskingStrategy, Message, resolve_masking_strategy
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.datasets.chat import MessagesReader, conversation_of
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.packed import PackedDataset, dataset_from_source
from torchtune_cp.datasets.sft import (
    EmptyRow,
    SFTDataset,
    require_column,
    require_text,
)
from torchtune_cp.datasets.source_arguments import check_source
from torchtune_cp.errors import UserError

_COLUMNS = {"input": "input", "output": "output"}
#: TRL's names, looked at in rows that have no "input".
_TRL_COLUMNS = {"input": "prompt", "output": "completion"}


class InputOutputColumns:
    """Reads a prompt and an answer from two columns: each a text, or turns of a conversation."""

    def __init__(self, columns: Mapping[str, str] | None, train_on_prompt: bool) -> None:
        """Keep the settings.

        Args:
            columns: The columns "input" and "output"; None = these, or "prompt" and "completion".
            train_on_prompt: Whether the assistant's turns in a prompt are trained on too.
        """
        self.columns = (
            tuple(columns.values()) if columns else (*_COLUMNS.values(), *_TRL_COLUMNS.values())
        )
        self._columns = dict(columns) if columns else None
        self._train_on_prompt = train_on_prompt

    def __call__(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's messages; a row with a blank prompt or answer has nothing to learn from."""
        columns = self._columns
        if columns is None:
            trl = "input" not in row and all(column in row for column in _TRL_COLUMNS.values())
            columns = _TRL_COLUMNS if trl else _COLUMNS
        prompt = _turns(row, columns["input"], "input", "user")
        answer = _turns(row, columns["output"], "output", "assistant")
        if all(m.is_blank() for m in prompt) or all(m.is_blank() for m in answer):
            raise EmptyRow
        if not self._train_on_prompt:
            prompt = [replace(m, train=False) if m.train is None else m for m in prompt]
        return [*prompt, *answer]


def _turns(row: Mapping[str, Any], column: str, field: str, role: str) -> list[Message]:
    key = f"dataset.column_map.{field}"
    value = require_column(row, column, key)
    if isinstance(value, list | tuple):
        return conversation_of(value, column)
    return [Message(role, require_text(row, column, key))]


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


@checked_by(check_source)
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
        column_map: `{"input": column, "output": column}`; by default the columns have these names, or
            "prompt" and "completion". Each holds a text, or a list of `{"role", "content"}` turns. Rows
            where either is blank are skipped and counted.
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
    options = SampleOptions.among(locals())
    columns = None
    if column_map is not None:
        columns = resolve_columns(column_map, _COLUMNS, required=("input", "output"))
    strategy = resolve_masking_strategy(
        masking_strategy, train_on_input, MaskingStrategy.TRAIN_ON_ASSISTANT
    )
    to_messages = InputOutputColumns(columns, strategy is MaskingStrategy.TRAIN_ON_ALL)
    reader = MessagesReader(tokenizer, to_messages, strategy, new_system_prompt)
    return dataset_from_source(
        reader,
        tokenizer,
        options,
        source=source,
        split=split,
        max_rows=max_rows,
        load_dataset_kwargs=load_dataset_kwargs,
    )
