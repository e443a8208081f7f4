"""Turns of data sets, in the styles "openai" and "sharegpt", as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_cp.data.messages import Message
from torchtune_cp.errors import UserError

CONVERSATION_STYLES = ("openai", "sharegpt")

# "function" is OpenAI's older name of a tool's result, "ipython" Llama's.
_OPENAI_ROLES = {
    **{r: r for r in ("system", "developer", "user", "assistant", "tool", "ipython")},
    "function": "tool",
}
# ShareGPT data found in the wild names the same speakers differently.
_SHAREGPT_ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_SHAREGPT_CALLS = ("function_call", "tool_call")

# What says whether a turn is trained on: OpenAI's and axolotl's names, and their relatives. Of the
# second kind 1 means "not trained on".
_TRAIN_KEYS = ("weight", "train", "training", "loss", "trainable")
_MASK_KEYS = ("mask", "masked")
#: Keys of a turn, and columns of a row, that hold what a text model cannot read.
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios", "input_audio")


def parse_conversation(turns: Any, style: str) -> list[Message]:
    """Read one conversation of a data set.

    Args:
        turns: The list found in the conversation column. "openai": `{"role", "content"}` each;
            "sharegpt": `{"from", "value"}` each, with the speakers human / gpt / system / tool.
            Further keys of a turn become `Message.extra`; null ones are left out.
        style: "openai" or "sharegpt".

    Returns:
        The messages, all unmasked; [] for an empty list.

    Raises:
        UserError: Naming the turn and the field that is missing, null or of a wrong type, without
            the row (the caller knows it).
    """
    if style not in CONVERSATION_STYLES:
        raise UserError(
            f"conversation_style={style!r} is not known; allowed: {', '.join(CONVERSATION_STYLES)}"
        )
    if isinstance(turns, str):
        turns = parse_json(turns)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise UserError(f"must be a list of turns, not {describe(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise UserError(f"turn {number} must be a mapping, not {describe(turn)}")
        try:
            messages.append(_message(turn, style))
        except UserError as error:
            # "turn 3: ..." reads on from a field, "turn 3 has no ..." from a verb.
            verb = str(error).startswith(("has ", "is "))
            raise UserError(f"turn {number}{' ' if verb else ': '}{error}") from error
    return messages


def _message(turn: Mapping[str, Any], style: str) -> Message:
    role_key, content_key = ("role", "content") if style == "openai" else ("from", "value")
    # A null says nothing, and templates would write it out; transformers leaves it out too.
    extra = {k: v for k, v in turn.items() if v is not None and k not in (role_key, content_key)}
    for key in ("tool_calls", "function_call"):
        if key in extra and not extra[key]:
            del extra[key]
    if role_key not in turn:
        raise _missing(turn, role_key, style, role_key, content_key)
    spoken = turn[role_key]
    roles = _OPENAI_ROLES if style == "openai" else _SHAREGPT_ROLES
    if not isinstance(spoken, str):
        raise UserError(f"{role_key!r} must be a string, not {describe(spoken)}")
    if spoken not in roles:
        raise UserError(f"{role_key!r} is {spoken!r}; allowed: {', '.join(roles)}")
    role = roles[spoken]
    for key in MEDIA_KEYS:
        if extra.get(key):
            raise UserError(f"has {key!r}, which a text model cannot read")
    train = _train(extra)

    if "function_call" in extra:  # OpenAI's older form of one call
        if "tool_calls" in extra:
            raise UserError("has both 'tool_calls' and 'function_call'; keep one of them")
        extra["tool_calls"] = [{"type": "function", "function": extra.pop("function_call")}]
    content = turn.get(content_key)
    if style == "sharegpt" and spoken in _SHAREGPT_CALLS:
        calls = parse_json(content)
        if not isinstance(calls, Mapping | list):
            raise UserError(
                f"{content_key!r} of a {spoken!r} turn must be JSON of a call (name, arguments)"
            )
        calls = calls if isinstance(calls, list) else [calls]
        extra["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        content = None
    if "tool_calls" in extra:
        if role != "assistant":
            raise UserError(f"has tool_calls, which only the assistant may, not {spoken!r}")
        extra["tool_calls"] = _tool_calls(extra["tool_calls"])

    message = Message(role, _content(content, content_key), extra=extra, train=train)
    if message.content is None and message.is_blank():
        if content_key not in turn:
            raise _missing(turn, content_key, style, role_key, content_key)
        raise UserError(f"{content_key!r} must be a string, not null")
    return message


def _missing(turn: Mapping[str, Any], key: str, style: str, *needed: str) -> UserError:
    return UserError(
        f"has no {key!r} (it has: {', '.join(map(str, turn))}); "
        f"conversation_style {style!r} needs {needed[0]!r} and {needed[1]!r}"
    )


def _train(extra: Mapping[str, Any]) -> bool | None:
    """Whether the turn's own keys say that it is trained on; None when they say nothing."""
    said: dict[str, bool] = {}
    for key in (*_TRAIN_KEYS, *_MASK_KEYS):
        value = extra.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(f"{key!r} is {value!r}; allowed: 0 and 1 (or false and true)")
        said[key] = bool(value) != (key in _MASK_KEYS)
    if extra.get("train_detail"):
        raise UserError("has 'train_detail': turns are trained on whole, or not at all")
    if len(set(said.values())) > 1:
        raise UserError(f"has {' and '.join(said)}, which contradict each other")
    return next(iter(said.values()), None)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls as templates expect them; what cannot be one is refused.

    Arguments stay what they are, a mapping or JSON text: which of them a template takes is found out
    when it is asked (`template_forms`).
    """
    calls = parse_json(calls)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UserError(f"'tool_calls' must be a list of calls, not {describe(calls)}")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, str):
            function = parse_json(function)
            call = {**call, "function": function}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError("'tool_calls' has a call without a function's name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and arguments.strip():
            arguments = parse_json(arguments)
        if arguments and not isinstance(arguments, Mapping):
            raise UserError(
                f"'tool_calls': the arguments of {function['name']!r} must be a mapping, or JSON text "
                f"of one, not {describe(arguments)}"
            )
        found.append({k: v for k, v in call.items() if v is not None})
    return found


def _content(content: Any, key: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UserError(f"{key!r} must be a string, not {describe(content)}")
    parts = [_part(part, key) for part in content]
    # One text is written in two ways; the string is what every template takes.
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Any, key: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else describe(part)
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return {**{k: v for k, v in part.items() if v is not None}, "type": "text"}
    if kind in ("thinking", "reasoning"):
        thought = next((part[k] for k in ("thinking", "reasoning", "text") if part.get(k)), None)
        if isinstance(thought, str):
            return {"type": "thinking", "thinking": thought}
    raise UserError(
        f"{key!r} has a part that is not text (type {kind!r}); allowed: 'text' and 'thinking'"
    )


def parse_json(value: Any) -> Any:
    """What JSON text says; any other value, and text that is no JSON, is given back as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def parse_tools(value: Any) -> list[Mapping[str, Any]] | None:
    """A row's tools: a list of their descriptions, or JSON text of it; None where there are none.

    Raises:
        UserError: It is neither.
    """
    tools = parse_json(value)
    if isinstance(tools, Mapping):
        tools = [tools]
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise UserError(
            f"must be a list of tools, or JSON text of one, not {describe(value)}"
            + (f" {value[:40]!r}" if isinstance(value, str) else "")
        )
    tools = [parse_json(tool) for tool in tools]
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise UserError(
                f"must be a list of mappings, one for each tool, not of {describe(tool)}"
            )
    return list(tools)


def describe(value: Any) -> str:
    """How messages name a value's kind."""
    return "null" if value is None else type(value).__name__
