"""Mutated chat rows, and templates written as today's checkpoints write theirs."""

from __future__ import annotations

import random
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The "weather" of a city <now>.',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

# Tools in the system turn, calls as JSON between tags, results inside a user turn (Hermes, Qwen).
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
        (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Reasoning of the turns behind the last question only; arguments as text or mapping (Qwen3).
_REASONING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        GENERATION
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        ENDGENERATION
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
REASONING = _REASONING.replace("ENDGENERATION\n", "").replace("GENERATION\n", "")
GENERATION = _REASONING.replace("ENDGENERATION", "{%- endgeneration %}").replace(
    "GENERATION", "{%- generation %}"
)

# One call a turn, tools in the first user turn, results quoted as JSON (Llama 3.1).
LLAMA_TOOLS = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools is not none and loop.first %}{{- tools | tojson(indent=4) + '\\n\\n' }}{%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Contents as texts or parts (vision models), no tools.
PARTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
UPPER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | upper) + '<|im_end|>' }}"
    "{% endfor %}"
)

_TEXTS = (
    *("What time is it?", "10:00 AM.", "assistant", "user\n", "  x = 1\n    y = 2  \n", "é 東京 ☃"),
    *(
        'He said "no" {{ x }}',
        "<think>\nEasy.\n</think>\n\nYes.",
        "<b>&amp;</b>",
        "a",
        "\\n \\ud83d",
    ),
    *("<|im_end|>", "</think>", "</tool_call>", "line\u2028break\r\nend", "0" * 60, " ", ""),
)


def conversation(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """A chat row, changed at random: turns left out, doubled and moved, contents and keys of all kinds."""
    draw = random.Random(seed)
    plain = draw.random() < 0.5  # nothing that only some templates render
    turns: list[dict[str, Any]] = []
    if draw.random() < 0.3:
        turns.append(
            {"role": draw.choice(["system", "system", "developer"]), "content": _text(draw)}
        )
    for _ in range(draw.randint(1, 3)):
        turns.append({"role": "user", "content": _text(draw)})
        if not plain and draw.random() < 0.3:
            calls = [_call(draw) for _ in range(draw.choice([1, 1, 1, 2]))]
            turns.append({"role": "assistant", "content": draw.choice(["", "Let me look.", None])})
            turns[-1]["tool_calls"] = calls
            turns += [
                {"role": "tool", "name": "get_weather", "content": _text(draw)} for _ in calls
            ]
        turns.append({"role": "assistant", "content": _text(draw)})
        if not plain and draw.random() < 0.25:
            turns[-1][draw.choice(["reasoning_content", "thinking"])] = _text(draw)
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        _mutate(draw, turns)
    return turns, TOOLS if not plain and draw.random() < 0.5 else None


def _text(draw: random.Random) -> str:
    return (
        draw.choice(_TEXTS)
        if draw.random() < 0.7
        else f"{draw.choice(_TEXTS)}{draw.choice(_TEXTS)}"
    )


def _call(draw: random.Random) -> dict[str, Any]:
    arguments: Any = draw.choice(
        [
            {"city": _text(draw)},
            {"n": 3, "deep": {"list": [1, _text(draw)]}},
            {},
            {"x": None, "y": True},
        ]
    )
    return {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def _mutate(draw: random.Random, turns: list[dict[str, Any]]) -> None:
    place = draw.randrange(len(turns))
    kind = draw.randrange(8)
    if kind == 0 and len(turns) > 1:
        del turns[place]
    elif kind == 1:
        turns.insert(place, dict(turns[place]))
    elif kind == 2:
        turns.append(turns.pop(place))
    elif kind == 3:
        turns[place]["content"] = draw.choice([None, 3, {"a": 1}, [], ["x"]])
    elif kind == 4:
        text = turns[place].get("content")
        parts = [{"type": "text", "text": str(text)}, {"type": "text", "text": _text(draw)}]
        turns[place]["content"] = parts
    elif kind == 5:
        turns[place]["role"] = draw.choice(["model", "Assistant", "user", "tool", None])
    elif kind == 6:
        turns[place]["weight"] = draw.choice([0, 1, 0.5, "0"])
    else:
        turns[place].pop(draw.choice(list(turns[place])))
