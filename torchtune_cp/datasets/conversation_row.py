"""What a row says besides its turns: a system prompt, tools, and further variables of the chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchtune_cp.data.chat_templates import TemplateNames
from torchtune_cp.data.messages import Message
from torchtune_cp.data.turns import MEDIA_KEYS, describe, parse_json, parse_tools
from torchtune_cp.errors import UserError

#: Columns that hold a system prompt of their own.
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
_TOOL_COLUMNS = ("tools", "functions")
_VARIABLE_COLUMNS = ("documents", "chat_template_kwargs")
#: Variables that are not the row's to set.
_RESERVED = ("messages", "add_generation_prompt")


def with_row_system_prompt(
    messages: list[Message], row: Mapping[str, Any], used: Collection[str]
) -> list[Message]:
    """Put the system prompt of a row's own column first.

    Args:
        messages: The row's turns.
        row: The row.
        used: Columns that hold something else.

    Raises:
        UserError: The column holds no text, or another one than the system turn.
    """
    for column in SYSTEM_COLUMNS:
        prompt = row.get(column)
        if prompt is None or column in used:
            continue
        if not isinstance(prompt, str):
            raise UserError(f"column {column!r} is {describe(prompt)}, it must be a string")
        if not prompt.strip():
            continue
        if messages and messages[0].role in ("system", "developer"):
            if messages[0].text().strip() != prompt.strip():
                raise UserError(
                    f"the system prompt in column {column!r} is not that of the first turn; keep one"
                )
            continue
        messages = [Message("system", prompt), *messages]
    return messages


def row_variables(
    row: Mapping[str, Any],
    used: Collection[str],
    names: TemplateNames,
    tools: list[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """What the chat template reads of a row besides its turns: `tools`, `documents`, and other columns.

    Args:
        row: The row.
        used: Columns that hold something else.
        names: What the template looks at.
        tools: See :func:`row_tools`.

    Raises:
        UserError: Something that the template should read and does not, or that no text model can.
    """
    columns = {k: v for k, v in row.items() if k not in used and v is not None}
    for column in MEDIA_KEYS:
        if columns.get(column):
            raise UserError(f"column {column!r} holds what a text model cannot read")
    variables = {
        k: v
        for k, v in columns.items()
        if k in names.inputs and k not in (*_RESERVED, *_TOOL_COLUMNS, *_VARIABLE_COLUMNS)
    }
    for column in _VARIABLE_COLUMNS:
        value = parse_json(columns.get(column))
        if not value:
            continue
        given = value if column == "chat_template_kwargs" else {column: value}
        if not isinstance(given, Mapping):
            raise UserError(f"column {column!r} is {describe(value)}, it must be a mapping")
        given = {k: v for k, v in given.items() if v is not None}
        if unread := [key for key in given if key not in names.variables]:
            raise UserError(
                f"column {column!r}: the chat template does not read {', '.join(map(repr, unread))}"
            )
        variables.update(given)
    if tools is not None:
        if "tools" not in names.variables:
            raise UserError(
                "the row has tools, which the chat template does not render; leave the column out, or "
                "give a template that renders them as tokenizer.chat_template"
            )
        variables["tools"] = tools
    return variables


def row_tools(row: Mapping[str, Any], used: Collection[str]) -> list[Mapping[str, Any]] | None:
    """The tools of a row, None without any.

    Args:
        row: The row.
        used: Columns that hold something else.

    Raises:
        UserError: A column holds no tools, or two hold some.
    """
    columns = {k: v for k, v in row.items() if k not in used and v is not None}
    found = {}
    for column in _TOOL_COLUMNS:
        try:
            tools = parse_tools(columns.get(column))
        except UserError as error:
            raise UserError(f"column {column!r}: {error}") from error
        if tools is not None:
            # "functions" is OpenAI's older name, for the functions by themselves.
            found[column] = (
                [t if "function" in t else {"type": "function", "function": t} for t in tools]
                if column == "functions"
                else tools
            )
    if len(found) > 1:
        raise UserError("the row has tools in columns 'tools' and 'functions'; keep one of them")
    return next(iter(found.values()), None)


def unread(
    row: Mapping[str, Any],
    messages: list[Message],
    used: Collection[str],
    variables: Mapping[str, Any],
    names: TemplateNames,
) -> frozenset[str]:
    """Columns, and keys of turns, that change nothing: data about the data, such as an id."""
    known = {*used, *SYSTEM_COLUMNS, *_TOOL_COLUMNS, *_VARIABLE_COLUMNS, *MEDIA_KEYS, *variables}
    columns = {
        f"column {column}" for column, v in row.items() if v is not None and column not in known
    }
    keys = {
        f"key {key} of turns"
        for message in messages
        for key in message.extra
        if key not in names.keys and message.train is None
    }
    return frozenset(columns | keys)
