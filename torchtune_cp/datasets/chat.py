"""Multi-turn conversations, with the turns to train on chosen by role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.data.chat_templates import TemplateNames, template_names
from torchtune_cp.data.collate import CROSS_ENTROPY_IGNORE_IDX
from torchtune_cp.data.messages import (
    MaskingStrategy,
    Message,
    mask_messages,
    resolve_masking_strategy,
    with_system_prompt,
)
from torchtune_cp.data.tokenizer import HFTokenizer
from torchtune_cp.data.turns import CONVERSATION_STYLES, parse_conversation
from torchtune_cp.datasets.conversation_row import (
    row_tools,
    row_variables,
    unread,
    with_row_system_prompt,
)
from torchtune_cp.datasets.options import SampleOptions
from torchtune_cp.datasets.packed import PackedDataset, dataset_from_source
from torchtune_cp.datasets.sft import (
    EmptyRow,
    NothingToTrain,
    SFTDataset,
    require_column,
)
from torchtune_cp.datasets.source_arguments import check_source
from torchtune_cp.errors import UserError


class ToMessages(Protocol):
    """Makes a conversation of a row.

    Attributes:
        columns: The columns that it reads.
    """

    columns: tuple[str, ...]

    def __call__(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's turns; raises EmptyRow, or UserError for a malformed row."""


class MessagesReader:
    """Reads a row as a conversation; labels are -100 on every token that is not trained on.

    Attributes:
        trains_on_part: See `RowReader`.
        stop_ids: See `RowReader`.
    """

    trains_on_part = True

    def __init__(
        self,
        tokenizer: HFTokenizer,
        to_messages: ToMessages,
        strategy: MaskingStrategy,
        new_system_prompt: str | None,
    ) -> None:
        """Keep the settings.

        Args:
            tokenizer: With a chat template.
            to_messages: Makes a conversation of a row.
            strategy: Which turns are trained on.
            new_system_prompt: Replaces the data's system turns.
        """
        # Renders nothing, but raises the error about a missing template before any row is read.
        tokenizer.require_chat_template()
        self.stop_ids = tokenizer.stop_ids
        self._tokenizer = tokenizer
        self._to_messages = to_messages
        self._strategy = strategy
        self._new_system_prompt = new_system_prompt

    def _read(self, row: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """The row's conversation, and what else the template reads of it."""
        messages = self._to_messages(row)
        if self._new_system_prompt is None:
            messages = with_row_system_prompt(messages, row, self._to_messages.columns)
        messages = with_system_prompt(messages, self._new_system_prompt)
        used = self._to_messages.columns
        tools = row_tools(row, used)
        return messages, row_variables(row, used, self._names(tools is not None), tools)

    def _names(self, with_tools: bool) -> TemplateNames:
        return template_names(self._tokenizer.require_chat_template(with_tools=with_tools))

    def check(self, row: Mapping[str, Any]) -> None:
        """See `RowReader`; `tokenize` looks at everything."""

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """See `RowReader`."""
        read, variables = self._read(row)
        messages = mask_messages(read, self._strategy)
        tokens, mask = self._tokenizer.tokenize_messages(messages, variables=variables)
        if all(mask):
            raise NothingToTrain(_why_nothing(messages))
        labels = [
            CROSS_ENTROPY_IGNORE_IDX if masked else token
            for token, masked in zip(tokens, mask, strict=True)
        ]
        return tokens, labels

    def unread(self, row: Mapping[str, Any]) -> frozenset[str]:
        """See `RowReader`."""
        messages, variables = self._read(row)
        names = self._names("tools" in variables)
        return unread(row, messages, self._to_messages.columns, variables, names)


def _why_nothing(messages: list[Message]) -> str:
    """Why no token of a conversation is trained on."""
    if any(not message.masked for message in messages):
        blank = all(message.is_blank() for message in messages if not message.masked)
        return "blank answer" if blank else "not marked by the template"
    if any(message.train is False for message in messages if message.role == "assistant"):
        return "weight 0"
    return "no assistant turn"


class ConversationColumn:
    """Reads the conversation of a row from one column."""

    def __init__(self, column: str, style: str) -> None:
        """Keep the settings; see `chat_dataset`."""
        self.columns: tuple[str, ...] = (column,)
        self._column = column
        self._style = style

    def __call__(self, row: Mapping[str, Any]) -> list[Message]:
        """The row's messages."""
        turns = require_column(row, self._column, "dataset.conversation_column")
        messages = conversation_of(turns, self._column, self._style)
        if all(message.is_blank() for message in messages):
            raise EmptyRow
        return messages


def conversation_of(turns: Any, column: str, style: str = "openai") -> list[Message]:
    """The turns in a column; UserError naming it for malformed ones."""
    try:
        return parse_conversation(turns, style)
    except UserError as error:
        raise UserError(f"column {column!r}: {error}") from error


@checked_by(check_source)
def chat_dataset(
    tokenizer: HFTokenizer,
    *,
    source: str,
    conversation_column: str,
    conversation_style: str,
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
    """Conversations of one or more turns, written out by the tokenizer's chat template.

    Of a turn that is trained on, its content and its end-of-turn token are; never its header. See
    `HFTokenizer.tokenize_messages`. The template is also given the row's `tools`, `documents` and other
    columns that it reads; a column `system` (or `system_prompt`, `system_message`) becomes a system turn.

    Args:
        tokenizer: With a chat template.
        source: "json" or "parquet" with `data_files`, or a hub data set's name.
        conversation_column: The column with the list of turns.
        conversation_style: "openai" (`role`, `content`) or "sharegpt" (`from`, `value`).
        train_on_input: True trains on all turns but system turns; False (or nothing given) on the
            assistant's.
        masking_strategy: The same choice by name: "train_on_all", "train_on_assistant", or
            "train_on_last" (only the assistant's last turn).
        new_system_prompt: A system turn put first, in place of any the data has.
        packed: Put several into each sample, up to `max_seq_len` tokens; see `PackedDataset`.
        split_across_pack: Packed: whether one may be cut where a pack ends.
        packing_strategy: Packed: "greedy" keeps the order, "best_fit" fills better; see
            `torchtune_cp.data.packing.pack_documents`.
        split: Part of the data, such as "train" or "train[:95%]".
        max_seq_len: The longest sample in tokens; None = the tokenizer's.
        overlong: What to do with longer ones: "truncate" (the default), "split", "drop", "error"; packed:
            "split" with `split_across_pack`, else "error" is the default. See `SFTDataset`.
        on_bad_row: "error" or "skip", for malformed conversations and those the template refuses.
        max_rows: Read only the first so many rows.
        num_proc: The most processes that read and tokenise; None = one a core. Few rows need one.
        **load_dataset_kwargs: `data_files`, `data_dir`, `name`, ... for `datasets.load_dataset`.

    Raises:
        UserError: When the data cannot be read, a row is malformed, or there is no chat template.
    """
    options = SampleOptions.among(locals())
    if conversation_style not in CONVERSATION_STYLES:
        raise UserError(
            f"dataset.conversation_style={conversation_style!r} is not known; allowed: "
            f"{', '.join(CONVERSATION_STYLES)}"
        )
    strategy = resolve_masking_strategy(
        masking_strategy, train_on_input, MaskingStrategy.TRAIN_ON_ASSISTANT
    )
    reader = MessagesReader(
        tokenizer,
        ConversationColumn(conversation_column, conversation_style),
        strategy,
        new_system_prompt,
    )
    return dataset_from_source(
        reader,
        tokenizer,
        options,
        source=source,
        split=split,
        max_rows=max_rows,
        load_dataset_kwargs=load_dataset_kwargs,
    )
