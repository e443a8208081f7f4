"""The form in which a chat template takes a conversation: found out by asking the template.

Templates differ in what they take: contents as strings or as parts, a tool call's arguments as a mapping
or as JSON text, a developer's turn or only a system's. A conversation is given to the template as the data
have it, which is what transformers does, and in another form only where the template refuses that one, or
leaves something of it out. What no form brings into the text is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from torchtune_cp.data.chat_templates import GENERATION_MARKS, TemplateNames, TemplateRefusal
from torchtune_cp.data.messages import REASONING_KEYS, Content, Message, text_of
from torchtune_cp.errors import ConfigError, UserError

Turn = Mapping[str, Any]
"""A message as templates read it."""
Render = Callable[[Sequence[Turn], bool], str]
"""(messages, add_generation_prompt) -> text."""

# Unicode noncharacters: no text has them, and trimming or changing the case leaves them alone.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
THINK_END = "</think>"
#: Keys of a turn that say something; a template that reads none of a group would leave it out.
_MEANINGFUL = (REASONING_KEYS, ("tool_calls",), ("tools",), ("functions",), ("documents",))


def as_turn(message: Message) -> dict[str, Any]:
    """A message as templates read it, reasoning under all names that they know (as transformers does)."""
    turn = {"role": message.role, **message.extra}
    if message.content is not None:
        turn["content"] = message.content
    reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key) is not None), None)
    if reasoning is not None:
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    return turn


def fit(render: Render, turns: Sequence[Turn], names: TemplateNames) -> tuple[list[Turn], str]:
    """Render a conversation whole.

    Args:
        render: The chat template.
        turns: See `as_turn`.
        names: What the template looks at.

    Returns:
        The turns in the form that the template takes, and the text that it makes of them.

    Raises:
        TemplateRefusal: The template accepts the conversation in no form.
        UserError: It leaves out a turn, a tool call or reasoning, named.
    """
    errors: list[UserError] = []
    for form in _forms(turns):
        try:
            text = render(form, False)
            _check_kept(render, form, text, names)
            return form, text
        except ConfigError:
            raise  # the template is broken, whatever the conversation
        except UserError as error:
            errors.append(error)
    # What is left out says more than that a form is refused.
    raise next((error for error in errors if not isinstance(error, TemplateRefusal)), errors[0])


def _forms(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The conversation as it is, then its other forms."""
    changes: list[list[Callable[[Turn], Turn] | None]] = []
    if any(isinstance(turn.get("content"), list) for turn in turns):
        changes.append([None, _joined])
    if any("content" not in turn for turn in turns):
        changes.append([None, lambda turn: {"content": "", **turn}])
    arguments = [call["arguments"] for turn in turns for call in functions(turn)]
    if any(isinstance(a, Mapping) for a in arguments):
        changes.append([None, lambda turn: _with_arguments(turn, _as_text)])
    if any(isinstance(a, str) for a in arguments):
        changes.append([None, lambda turn: _with_arguments(turn, _as_mapping)])
    if any(turn["role"] == "developer" for turn in turns):
        changes.append([None, _developer_as_system])
    for chosen in product(*changes):
        form = list(turns)
        for change in filter(None, chosen):
            form = [change(turn) for turn in form]
        yield form


def functions(turn: Turn) -> list[Mapping[str, Any]]:
    """Name and arguments of a turn's tool calls."""
    calls = [call.get("function", call) for call in turn.get("tool_calls") or ()]
    return [{"arguments": {}, **call} for call in calls]


def _with_arguments(turn: Turn, change: Callable[[Any], Any]) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        function = call.get("function", call)
        if function.get("arguments") is not None:
            function = {**function, "arguments": change(function["arguments"])}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**turn, "tool_calls": calls}


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_mapping(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    return json.loads(arguments) if arguments.strip() else {}


def _developer_as_system(turn: Turn) -> Turn:
    return {**turn, "role": "system"} if turn["role"] == "developer" else turn


def _joined(turn: Turn) -> Turn:
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    turn = {**turn, "content": text_of(content)}
    thoughts = "".join(part["thinking"] for part in content if part["type"] == "thinking")
    if thoughts and not turn.get("reasoning_content"):
        turn = {**turn, "thinking": thoughts, "reasoning_content": thoughts}
    return turn


def after_reasoning(text: str) -> str:
    """What a text says after the reasoning that stands in it as `<think>...</think>`."""
    return text.rpartition(THINK_END)[2]


def with_mark(content: Content, mark: str, part: int = -1) -> Content:
    """A content whose text is a mark: reasoning in it stays, for templates look for it.

    Args:
        content: A text, or parts.
        mark: What to put there.
        part: Of parts: which of those that are text.
    """
    if isinstance(content, str):
        return (
            content[: content.rfind(THINK_END) + len(THINK_END)] + mark
            if THINK_END in content
            else mark
        )
    if content is None:
        return None
    texts = [i for i, p in enumerate(content) if p["type"] == "text" and p["text"].strip()]
    return [{**p, "text": mark} if texts and i == texts[part] else p for i, p in enumerate(content)]


def _check_kept(render: Render, turns: Sequence[Turn], text: str, names: TemplateNames) -> None:
    """Raise UserError naming what of a conversation is not in the text."""
    if any(mark in text for mark in (OPEN, CLOSE, *GENERATION_MARKS)):
        raise UserError("a turn has one of U+FDD0, U+FDD1, U+FDEE, U+FDEF, which are no characters")
    for number, turn in enumerate(turns):
        content = turn.get("content")
        thinks = isinstance(content, list) and any(p["type"] == "thinking" for p in content)
        if thinks and "thinking" not in names.keys:
            raise UserError(
                f"turn {number} ({turn['role']}) has a part 'thinking', which the chat template does not "
                "render; leave it out, or give a template that renders it as tokenizer.chat_template"
            )
        for keys in _MEANINGFUL:
            given = [key for key in keys if turn.get(key)]
            if not given or names.keys & set(keys):
                continue
            without = {k: v for k, v in turn.items() if k not in keys}
            changed = _try(render, [*turns[:number], without, *turns[number + 1 :]])
            if changed == text:
                raise UserError(
                    f"turn {number} ({turn['role']}) has {given[0]!r}, which the chat template does not "
                    "render; leave it out, or give a template that renders it as tokenizer.chat_template"
                )
    marked_text = _try(render, [_marked(turn, n) for n, turn in enumerate(turns)])
    for number, turn in enumerate(turns):
        where = f"turn {number} ({turn['role']})"
        for place, said in enumerate(_texts(turn)):
            mark = _mark(number, place)
            if marked_text is not None and mark in marked_text:
                # Parts may be written out as Python or JSON writes a list.
                kept = isinstance(turn["content"], str) or not any(
                    f"{q}text{q}: {q}{mark}" in marked_text for q in "'\""
                )
            else:
                kept = isinstance(turn["content"], str) and appears(said, text)
            if not kept:
                raise UserError(f"the chat template leaves out or rewrites the text of {where}")
        for place, call in enumerate(functions(turn)):
            arguments = _marked_arguments(call["arguments"], number, place)
            shown = arguments if isinstance(arguments, str) else next(iter(arguments), "")
            if call["name"] not in text or (marked_text is not None and shown not in marked_text):
                raise UserError(
                    f"the chat template leaves out or rewrites the call of {call['name']!r} in {where}"
                )


def check_tools(tools: Sequence[Mapping[str, Any]] | None, text: str) -> None:
    """Raise UserError naming a tool that is not in the text."""
    for tool in tools or ():
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and not appears(name, text):
            raise UserError(f"the chat template leaves out the tool {name!r}")


def _try(render: Render, turns: Sequence[Turn]) -> str | None:
    try:
        return render(turns, False)
    except TemplateRefusal:
        return None


def _texts(turn: Turn) -> list[str]:
    """The texts of a turn that must be in any rendering: those of its content, without reasoning."""
    content = turn.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if part["type"] == "text"]
    else:
        texts = [after_reasoning(content or "")]
    return [text for text in texts if text.strip()]


def _mark(number: int, place: int) -> str:
    return f"{OPEN}{number}.{place}{CLOSE}"


def _marked(turn: Turn, number: int) -> Turn:
    """A turn with marks for texts and for the arguments of tool calls."""
    turn = dict(turn)
    for place in range(len(_texts(turn))):
        turn["content"] = with_mark(turn["content"], _mark(number, place), place)
    if turn.get("tool_calls"):
        places = iter(range(len(turn["tool_calls"])))
        turn = dict(
            _with_arguments(turn, lambda given: _marked_arguments(given, number, next(places)))
        )
    return turn


def _marked_arguments(arguments: Any, number: int, place: int) -> Any:
    if not arguments:
        return arguments
    marked = {_mark(number, place): 1}
    return json.dumps(marked, ensure_ascii=False) if isinstance(arguments, str) else marked


def appears(said: str, text: str) -> bool:
    """Whether a text has another in it, maybe trimmed, or as JSON writes it."""
    said = said.strip()
    return said in text or any(
        json.dumps(said, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)
    )
