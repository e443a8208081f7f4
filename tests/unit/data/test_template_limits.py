"""A chat template is a stranger's program: it gets so much time and memory, and a mistake is one line."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from torchtune_cp.data.chat_templates import CHATML, TemplateRefusal, render_chat, template_names
from torchtune_cp.errors import ConfigError

TURNS = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "abc"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        '{{ "a" * 10**10 }}',
        '{{ "a"|center(10**10) }}',
        "{{ [0] * 10**10 }}",
        '{{ "%99999999999d" % 1 }}',
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ (" * 400 + "1" + ")}}" * 400,
        "{% if %}",
    ],
)
def test_what_a_template_cannot_do_is_one_line_that_names_it(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^the chat template [^\n]+$"):
        render_chat(template, TURNS)


def test_a_template_without_end_is_ended_whatever_thread_renders_it() -> None:
    caught: list[Exception] = []

    def render() -> None:
        try:
            render_chat(LOOPS, TURNS)
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(60)
    assert len(caught) == 1
    assert "is not done after" in str(caught[0])


@pytest.mark.parametrize("template", [None, 3, ["x"], "x" * 1_000_001])
def test_what_is_no_template_is_refused(template: Any) -> None:
    with pytest.raises(ConfigError, match="allowed is a text of up to"):
        render_chat(template, TURNS)


@pytest.mark.parametrize(
    "template",
    ['{{ "a" * 10**10 }}', '{{ "a"|center(10**10) }}', '{% set a = "b" * 10**10 %}', LOOPS],
)
def test_looking_through_a_template_computes_nothing_of_it(template: str) -> None:
    assert not template_names(template).inputs


def test_a_refusal_is_the_conversations_and_the_next_one_is_rendered_as_ever() -> None:
    picky = CHATML + "{% if messages|length > 1 %}{{ raise_exception('too many') }}{% endif %}"
    with pytest.raises(TemplateRefusal, match="too many"):
        render_chat(picky, TURNS)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        render_chat("{{ 1 / 0 }}", TURNS)
    assert render_chat(picky, TURNS[:1]) == render_chat(CHATML, TURNS[:1])
