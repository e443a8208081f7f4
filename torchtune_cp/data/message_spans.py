"""Where each message of a conversation stands in the text that a chat template makes of it.

Templates are programs: they add headers, trim contents, move the system prompt, drop the reasoning of
earlier turns. The spans are found by asking the template itself:

1. The conversation is rendered once more with a mark in place of each content. If putting the
   contents back in place of the marks gives the real text, the marks tell exactly where each content
   stands. This holds for any template that treats contents as opaque text.
2. Otherwise the text before an assistant turn is rendered with the generation prompt, which ends
   where the turn begins.

What follows a content (its end-of-turn token) is bounded by rendering the conversation up to and
including the message, when that is a beginning of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchtune_cp.data.chat_templates import TemplateRefusal

# Private-use characters: no template or text uses them, and trimming leaves them alone.
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

Render = Callable[[Sequence[Mapping[str, str]], bool], str]
"""(messages, add_generation_prompt) -> text."""


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


def find_message_spans(
    render: Render, messages: Sequence[Mapping[str, str]]
) -> tuple[str, list[MessageSpan | None]]:
    """Render a conversation and find its messages in the text.

    Args:
        render: The chat template.
        messages: `{"role", "content"}` each.

    Returns:
        The text, and a span for each message; None for a message that is not in the text, or whose
        place cannot be told.

    Raises:
        TemplateRefusal: When the template does not accept the conversation.
    """
    text = render(messages, False)
    spans = _spans_by_marks(render, messages, text)
    if spans is None:
        spans = _spans_by_prefixes(render, messages, text)
    return text, spans


def _try_render(
    render: Render, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str | None:
    """The text of a part of a conversation; None when the template refuses it on its own."""
    try:
        return render(messages, add_generation_prompt)
    except TemplateRefusal:
        return None


def _spans_by_marks(
    render: Render, messages: Sequence[Mapping[str, str]], text: str
) -> list[MessageSpan | None] | None:
    if any(_OPEN in message["content"] for message in messages):
        return None
    # An empty content stays empty: templates may test for it.
    marked = [
        {**message, "content": f"{_OPEN}{i}{_CLOSE}" if message["content"] else ""}
        for i, message in enumerate(messages)
    ]
    marked_text = _try_render(render, marked, False)
    if marked_text is None:
        return None
    marks = list(_MARK.finditer(marked_text))
    order = [int(mark.group(1)) for mark in marks]
    if len(set(order)) != len(order):
        return None

    # Walk both texts side by side: what lies between marks must be the same in both.
    contents: dict[int, tuple[int, int]] = {}
    cursor = 0
    between = marked_text[: marks[0].start()] if marks else marked_text
    if not text.startswith(between):
        return None
    cursor = len(between)
    for place, mark in enumerate(marks):
        after = marks[place + 1].start() if place + 1 < len(marks) else len(marked_text)
        between = marked_text[mark.end() : after]
        last = place + 1 == len(marks)
        content = messages[order[place]]["content"]
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            end = cursor + len(variant)
            if not text.startswith(variant + between, cursor):
                continue
            if last and end + len(between) != len(text):
                continue
            contents[order[place]] = (cursor, end)
            cursor = end + len(between)
            break
        else:
            return None

    spans: list[MessageSpan | None] = [None] * len(messages)
    for place, mark in enumerate(marks):
        index = order[place]
        start, content_end = contents[index]
        last = place + 1 == len(marks)
        gap = (len(marked_text) if last else marks[place + 1].start()) - mark.end()
        bounded = last
        if not last:
            prefix = _try_render(render, marked[: index + 1], False)
            if prefix is not None and marked_text.startswith(prefix) and len(prefix) >= mark.end():
                gap = min(gap, len(prefix) - mark.end())
                bounded = True
        spans[index] = MessageSpan(start, content_end, content_end + gap, bounded)
    return spans


def _spans_by_prefixes(
    render: Render, messages: Sequence[Mapping[str, str]], text: str
) -> list[MessageSpan | None]:
    spans: list[MessageSpan | None] = []
    cursor = 0  # everything before it belongs to earlier messages
    for i, message in enumerate(messages):
        content = message["content"].strip()
        whole = _try_render(render, messages[: i + 1], False)
        bounded = whole is not None and text.startswith(whole) and len(whole) >= cursor
        end = len(whole) if bounded and whole is not None else len(text)
        start = content_end = -1
        if message["role"] == "assistant":
            before = _try_render(render, messages[:i], True)
            if before is not None and text.startswith(before) and len(before) >= cursor:
                start = content_end = len(before)
                if text.startswith(content, start):
                    content_end = start + len(content)
        elif bounded and content:
            # The last occurrence: a header before it may hold the same word.
            start = text.rfind(content, cursor, end)
            content_end = start + len(content)
        spans.append(MessageSpan(start, content_end, end, bounded) if start >= 0 else None)
        cursor = end if bounded else max(cursor, content_end)
    return spans
