"""Chat messages: one neutral form, the two conversation styles read from data sets, and which to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torchtune_cp.errors import UserError

CONVERSATION_STYLES = ("openai", "sharegpt")

# ShareGPT data found in the wild names the same speakers differently.
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: Who speaks, as the chat template knows it: "system", "user", "assistant", "tool", ...
        content: The text, without any header or end-of-turn token.
        masked: True when the turn is context only and is not trained on.
    """

    role: str
    content: str
    masked: bool = False


class MaskingStrategy(str, Enum):
    """Which turns of a conversation are trained on. System turns never are."""

    TRAIN_ON_ALL = "train_on_all"
    TRAIN_ON_ASSISTANT = "train_on_assistant"
    TRAIN_ON_LAST = "train_on_last"


def resolve_masking_strategy(
    masking_strategy: str | None, train_on_input: bool | None, default: MaskingStrategy
) -> MaskingStrategy:
    """Turn the two ways of asking (`masking_strategy`, `train_on_input`) into one strategy.

    Args:
        masking_strategy: "train_on_all", "train_on_assistant", "train_on_last", or None.
        train_on_input: True = all turns, False = assistant turns, None = not given.
        default: What holds when neither is given.

    Raises:
        UserError: For an unknown strategy, or when the two contradict each other.
    """
    from_flag = None
    if train_on_input is not None:
        from_flag = (
            MaskingStrategy.TRAIN_ON_ALL if train_on_input else MaskingStrategy.TRAIN_ON_ASSISTANT
        )
    if masking_strategy is None:
        return from_flag or default
    try:
        strategy = MaskingStrategy(masking_strategy)
    except ValueError:
        allowed = ", ".join(s.value for s in MaskingStrategy)
        raise UserError(
            f"masking_strategy={masking_strategy!r} is not known; allowed: {allowed}"
        ) from None
    if from_flag is MaskingStrategy.TRAIN_ON_ALL and strategy is not from_flag:
        raise UserError(
            f"train_on_input=True contradicts masking_strategy={strategy.value!r}; give only one of them"
        )
    return strategy


def mask_messages(messages: Sequence[Message], strategy: MaskingStrategy | str) -> list[Message]:
    """Mark the turns that are trained on.

    Args:
        messages: The conversation in order.
        strategy: "train_on_all" leaves every turn but system turns unmasked; "train_on_assistant"
            only the assistant's; "train_on_last" only the assistant's last turn.

    Returns:
        New messages with `masked` set; the given ones are not changed.
    """
    strategy = MaskingStrategy(strategy)
    assistant_turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if strategy is MaskingStrategy.TRAIN_ON_ALL:
        trained = {i for i, message in enumerate(messages) if message.role != "system"}
    elif strategy is MaskingStrategy.TRAIN_ON_ASSISTANT:
        trained = set(assistant_turns)
    else:
        trained = set(assistant_turns[-1:])
    return [replace(message, masked=i not in trained) for i, message in enumerate(messages)]


def with_system_prompt(messages: Sequence[Message], new_system_prompt: str | None) -> list[Message]:
    """Put a system turn first, in place of any the data has; None leaves the messages as they are."""
    if new_system_prompt is None:
        return list(messages)
    others = [message for message in messages if message.role != "system"]
    return [Message("system", new_system_prompt, masked=True), *others]


def parse_conversation(turns: Any, style: str) -> list[Message]:
    """Read one conversation of a data set.

    Args:
        turns: The list found in the conversation column. "openai": `{"role", "content"}` each;
            "sharegpt": `{"from", "value"}` each, with the speakers human / gpt / system / tool.
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
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise UserError(f"must be a list of turns, not {_describe(turns)}")
    role_key, content_key = ("role", "content") if style == "openai" else ("from", "value")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise UserError(f"turn {number} must be a mapping, not {_describe(turn)}")
        for key in (role_key, content_key):
            if key not in turn:
                raise UserError(
                    f"turn {number} has no {key!r} (it has: {', '.join(map(str, turn))}); "
                    f"conversation_style {style!r} needs {role_key!r} and {content_key!r}"
                )
        role = turn[role_key]
        if not isinstance(role, str):
            raise UserError(f"turn {number}: {role_key!r} must be a string, not {_describe(role)}")
        if style == "sharegpt":
            if role not in _SHAREGPT_ROLES:
                raise UserError(
                    f"turn {number}: {role_key!r} is {role!r}; allowed: {', '.join(_SHAREGPT_ROLES)}"
                )
            role = _SHAREGPT_ROLES[role]
        if turn.get("tool_calls"):
            raise UserError(f"turn {number} has tool_calls, which cannot be trained on (text only)")
        messages.append(Message(role, _text_of(turn[content_key], number, content_key)))
    return messages


def _text_of(content: Any, number: int, key: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or part.get("type", "text") != "text":
                raise UserError(f"turn {number}: {key!r} has a part that is not text")
            parts.append(text)
        return "".join(parts)
    raise UserError(f"turn {number}: {key!r} must be a string, not {_describe(content)}")


def _describe(value: Any) -> str:
    return "null" if value is None else type(value).__name__
