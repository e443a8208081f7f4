"""Chat messages: one neutral form, and which of them to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torchtune_cp.errors import UserError

Content = str | Sequence[Mapping[str, Any]] | None
"""A turn's text, or its parts (`{"type": "text" | "thinking", ...}`), or None where it has none."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: Who speaks, as the chat template knows it: "system", "user", "assistant", "tool", ...
        content: The text, without any header or end-of-turn token; or parts; None for a turn that has
            only what `extra` says (tool calls).
        masked: True when the turn is context only and is not trained on.
        extra: All other keys that the template may read: "tool_calls", "reasoning_content", "name", ...
        train: What the data say about this turn, before any masking strategy; None = nothing.
    """

    role: str
    content: Content
    masked: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    train: bool | None = None

    def text(self) -> str:
        """The content's texts, one behind the other, without reasoning."""
        return text_of(self.content)

    def is_blank(self) -> bool:
        """Whether there is nothing to say: neither text nor reasoning nor a tool call."""
        reasoning = any(str(self.extra.get(key) or "").strip() for key in REASONING_KEYS)
        parts = self.content if isinstance(self.content, Sequence) else ()
        thinking = any(isinstance(p, Mapping) and p.get("thinking") for p in parts)
        return not (self.text().strip() or reasoning or thinking or self.extra.get("tool_calls"))


#: The names under which data give a turn's reasoning; the first is the one that templates read.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def text_of(content: Content) -> str:
    """The texts of a content, one behind the other, without its reasoning."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part["type"] == "text")


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
        messages: The conversation in order. What the data say about a turn (`Message.train`) comes
            first; turns that are masked already stay so unless all are trained on.
        strategy: "train_on_all" leaves every turn but system turns unmasked; "train_on_assistant"
            only the assistant's; "train_on_last" only the assistant's last turn.

    Returns:
        New messages with `masked` set; the given ones are not changed.
    """
    strategy = MaskingStrategy(strategy)
    assistant_turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if strategy is MaskingStrategy.TRAIN_ON_ALL:
        trained = {i for i, m in enumerate(messages) if m.role not in ("system", "developer")}
    elif strategy is MaskingStrategy.TRAIN_ON_ASSISTANT:
        trained = set(assistant_turns)
    else:
        trained = set(assistant_turns[-1:])
    return [
        replace(message, masked=i not in trained if message.train is None else not message.train)
        for i, message in enumerate(messages)
    ]


def with_system_prompt(messages: Sequence[Message], new_system_prompt: str | None) -> list[Message]:
    """Put a system turn first, in place of any the data has; None leaves the messages as they are."""
    if new_system_prompt is None:
        return list(messages)
    others = [message for message in messages if message.role not in ("system", "developer")]
    return [Message("system", new_system_prompt, masked=True), *others]
