"""Where each turn of a conversation stands in the text that a chat template makes of it.

Templates are programs: they add headers, trim contents, move the system prompt, drop the reasoning of
earlier turns. The spans are found by asking the template itself:

1. The conversation is rendered once more with a mark in place of one content. Where the text before the
   mark and the text behind it are the beginning and the end of the real text, what lies between them is
   the content, whatever the template does to it.
2. A turn with reasoning or tool calls begins where its header ends, which is what the template adds for
   `add_generation_prompt`; it ends behind the last of what it says, found as in 1.
3. Otherwise the text before an assistant turn is rendered with the generation prompt, which ends
   where the turn begins.

What follows a content (its end-of-turn token) is bounded by rendering the conversation up to and
including the message, when that is a beginning of the whole text.

Whether a span holds what the turn says is for the caller to check (`missing_of`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torchtune_cp.data.chat_templates import GENERATION_MARKS, TemplateRefusal
from torchtune_cp.data.template_forms import (
    CLOSE,
    OPEN,
    THINK_END,
    Render,
    Turn,
    after_reasoning,
    appears,
    functions,
    with_mark,
)
from torchtune_cp.errors import UserError

_MARK = OPEN + CLOSE


@dataclass(frozen=True)
class MessageSpan:
    """Characters `[start, content_end)` are a message's content, `[content_end, end)` what follows it.

    Attributes:
        start: First character of the content, after the header.
        content_end: First character after the content.
        end: Where the message's own text ends, when `bounded`; else the next message's header may
            lie before it.
        bounded: Whether `end` is known to be this message's own end.
    """

    start: int
    content_end: int
    end: int
    bounded: bool


def find_span(render: Render, turns: Sequence[Turn], text: str, index: int) -> MessageSpan | None:
    """Find one turn in the text.

    Args:
        render: The chat template.
        turns: The conversation, in the form that the template takes (`fit`).
        text: What it makes of them.
        index: Which turn.

    Returns:
        Its span; None when its place cannot be told.
    """
    turn = turns[index]
    content = turn.get("content")
    parts = content if isinstance(content, list) else []
    rich = (
        bool(turn.get("tool_calls"))
        or bool(str(turn.get("reasoning_content") or "").strip())
        or any(part["type"] == "thinking" for part in parts)
    )
    found = _rich(render, turns, text, index) if rich else _plain(render, turns, text, index)
    if found is None:
        return None
    start, content_end = found
    if index + 1 == len(turns):
        return MessageSpan(start, content_end, len(text), True)
    whole = _try_render(render, turns[: index + 1], False)
    bounded = whole is not None and text.startswith(whole) and len(whole) >= content_end
    end = len(whole) if bounded and whole is not None else len(text)
    return MessageSpan(start, content_end, end, bounded)


def missing_of(turn: Turn, trained: str) -> str | None:
    """What of a turn a trained text lacks; None when it has all of it.

    Reasoning may be left out (templates drop that of earlier turns); contents may be trimmed.
    """
    content = turn.get("content")
    if isinstance(content, str):
        answer = after_reasoning(content).strip()  # the whole content, where it has no reasoning
        if content.strip() not in trained and (THINK_END not in content or answer not in trained):
            return "its text"
    for part in content if isinstance(content, list) else ():
        if part["type"] == "text" and part["text"].strip() not in trained:
            return "its text"
    for call in functions(turn):
        if call["name"] not in trained:
            return f"the call of {call['name']!r}"
        arguments = call["arguments"]
        leaves = [arguments] if isinstance(arguments, str) else _leaves(arguments)
        if not all(appears(leaf, trained) for leaf in leaves):
            return f"arguments of {call['name']!r}"
    return None


def assistant_blocks(
    marked: Render, render: Render, turns: Sequence[Turn], text: str
) -> dict[int, list[MessageSpan]]:
    """What the template itself says that the assistant says (`{% generation %}`).

    Args:
        marked: The chat template, with `GENERATION_MARKS` in what it renders.
        render: The chat template.
        turns: The conversation, in the form that the template takes.
        text: What it makes of them.

    Returns:
        The blocks of each assistant turn, none for one that the template does not mark.

    Raises:
        UserError: A block that belongs to none of these turns.
    """
    unmarked, blocks = _generation_blocks(marked(turns, False))
    if unmarked != text:
        raise UserError(
            "the chat template renders otherwise where it marks what the assistant says"
        )
    found: dict[int, list[MessageSpan]] = {
        index: [] for index, turn in enumerate(turns) if turn["role"] == "assistant"
    }
    owners = list(found)
    if len(blocks) != len(owners):
        places = {index: find_span(render, turns, text, index) for index in owners}
        owners = [
            next((i for i, p in places.items() if p and p.start < end and p.end > start), -1)
            for start, end in blocks
        ]
    for owner, (start, end) in zip(owners, blocks, strict=True):
        if start == end:
            continue
        if owner < 0:
            raise UserError(
                f"the chat template marks {text[start:end][:40]!r} as the assistant's, which is in none "
                "of the assistant's turns"
            )
        found[owner].append(MessageSpan(start, end, end, bounded=True))
    return found


def _generation_blocks(marked_text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without `GENERATION_MARKS`, and from where to where the assistant speaks in it."""
    opened, closed = GENERATION_MARKS
    blocks: list[tuple[int, int]] = []
    pieces: list[str] = []
    length = begin = 0
    for piece in marked_text.replace(closed, opened + closed).split(opened):
        if piece.startswith(closed):
            blocks.append((begin, length))
        begin = length
        pieces.append(piece.removeprefix(closed))
        length += len(pieces[-1])
    return "".join(pieces), blocks


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _leaves(value: Any) -> list[str]:
    """All texts and numbers in a tool call's arguments, as they may be written."""
    if isinstance(value, Mapping):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return [value] if isinstance(value, str) else [json.dumps(value)] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _try_render(render: Render, turns: Sequence[Turn], add_generation_prompt: bool) -> str | None:
    """The text of a part of a conversation; None when the template refuses it on its own."""
    try:
        return render(turns, add_generation_prompt)
    except TemplateRefusal:
        return None


def _changed(render: Render, turns: Sequence[Turn], index: int, change: Turn) -> str | None:
    """The text with one turn changed; None when the change is refused, or does not show."""
    turn = {**turns[index], **change}
    rendered = _try_render(render, [*turns[:index], turn, *turns[index + 1 :]], False)
    return rendered if rendered is not None and _MARK in rendered else None


def _isolated(
    render: Render, turns: Sequence[Turn], text: str, index: int, change: Turn
) -> tuple[int, int] | None:
    """From where to where in the text stands that in whose place `change` has a mark."""
    marked = _changed(render, turns, index, change)
    if marked is None or marked.count(_MARK) != 1:
        return None
    before, behind = marked.split(_MARK)
    if not (text.startswith(before) and text.endswith(behind)):
        return None
    start, end = len(before), len(text) - len(behind)
    return (start, end) if start <= end else None


def _plain(render: Render, turns: Sequence[Turn], text: str, index: int) -> tuple[int, int] | None:
    """A turn that has nothing but a content."""
    content = turns[index].get("content") or ""
    if not isinstance(content, str):
        first, last = (
            _isolated(render, turns, text, index, {"content": with_mark(content, _MARK, part)})
            for part in (0, -1)
        )
        return (first[0], last[1]) if first and last else None
    found = _isolated(render, turns, text, index, {"content": _MARK})
    if found and missing_of(turns[index], text[slice(*found)]) is None:
        return found
    if turns[index]["role"] != "assistant":
        return None
    if THINK_END in content:
        answer = _isolated(render, turns, text, index, {"content": with_mark(content, _MARK)})
        start = _header_end(render, turns, text, index, answer[0]) if answer else None
        return (start, answer[1]) if answer and start is not None else None
    if (start := _prompt_end(render, turns, text, index)) is None:
        return None
    said = content.strip()
    return start, start + (len(said) if text.startswith(said, start) else 0)


def _rich(render: Render, turns: Sequence[Turn], text: str, index: int) -> tuple[int, int] | None:
    """A turn with reasoning or tool calls: from its header's end to the last of what it says."""
    turn = turns[index]
    content = turn.get("content")
    starts: list[int] = []
    ends: list[int] = []
    found: list[tuple[int, int] | None] = []
    if turn.get("reasoning_content"):
        marks = {"reasoning_content": _MARK, "thinking": _MARK}
        reasoning = _isolated(render, turns, text, index, marks)
        # Templates drop the reasoning of earlier turns.
        dropped = reasoning is None and _changed(render, turns, index, marks) is None
        if dropped and isinstance(content, str) and not turn.get("tool_calls"):
            return _plain(render, turns, text, index)
        found = [reasoning] if reasoning else []
    if isinstance(content, str) and content.strip():
        found.append(_isolated(render, turns, text, index, {"content": with_mark(content, _MARK)}))
    elif isinstance(content, list):
        for key in ("thinking", "text"):
            which = [i for i, part in enumerate(content) if part["type"] == key]
            for i in {which[0], which[-1]} if which else ():
                marked = [{**p, key: _MARK} if j == i else p for j, p in enumerate(content)]
                found.append(_isolated(render, turns, text, index, {"content": marked}))
    for place in found:
        if place is None:
            return None
        starts.append(place[0])
        ends.append(place[1])
    if turn.get("tool_calls"):
        calls = list(turn["tool_calls"])
        first = _changed(
            render, turns, index, {"tool_calls": [_with_marked_name(calls[0]), *calls[1:]]}
        )
        last = _changed(
            render, turns, index, {"tool_calls": [*calls[:-1], _with_marked_end(calls[-1])]}
        )
        if first is None or last is None:
            return None
        starts.append(_shared(text, first))
        ends.append(len(text) - _shared(text[::-1], last[::-1]))
    if not starts:
        return None
    start = _header_end(render, turns, text, index, min(starts))
    return None if start is None else (start, max(ends))


def _with_marked_name(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in call:
        return {**call, "function": _with_marked_name(call["function"])}
    return {**call, "name": _MARK + call["name"]}


def _with_marked_end(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call whose last argument is a mark: from there on the text is that of the real call."""
    if "function" in call:
        return {**call, "function": _with_marked_end(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return {**call, "arguments": arguments + _MARK}
    if not arguments:
        return {**call, "arguments": {_MARK: _MARK}}
    return {**call, "arguments": {**arguments, list(arguments)[-1]: _MARK}}


def _prompts(render: Render, turns: Sequence[Turn], index: int) -> tuple[str, str] | None:
    """The text before a turn with the generation prompt, and that prompt; None where there is none."""
    with_prompt = _try_render(render, turns[:index], True)
    without = _try_render(render, turns[:index], False)
    if with_prompt is None or without is None or with_prompt == without:
        return None
    return with_prompt, with_prompt[_shared(with_prompt, without) :]


def _prompt_end(render: Render, turns: Sequence[Turn], text: str, index: int) -> int | None:
    prompts = _prompts(render, turns, index)
    return len(prompts[0]) if prompts and text.startswith(prompts[0]) else None


def _header_end(
    render: Render, turns: Sequence[Turn], text: str, index: int, before: int
) -> int | None:
    """Where a turn's header ends that stands before a place in the text."""
    prompts = _prompts(render, turns, index)
    if prompts is None:
        return None
    if text.startswith(prompts[0]) and len(prompts[0]) <= before:
        return len(prompts[0])
    # Earlier turns may read otherwise on their own; the header itself does not. It stands behind all
    # that the turns before it say.
    others = (
        _isolated(render, turns, text, i, {"content": with_mark(turns[i].get("content"), _MARK)})
        for i in range(index - 1, -1, -1)
    )
    earlier = next((place[1] for place in others if place), 0)
    place = text.rfind(prompts[1], earlier, before)
    return place + len(prompts[1]) if place >= 0 else None
