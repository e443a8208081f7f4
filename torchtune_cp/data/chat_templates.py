"""Chat templates: rendering a conversation to text as Hugging Face's templates expect it.

A template is a jinja2 program that comes with a checkpoint, so it is a stranger's code: it runs in
jinja2's immutable sandbox, and, unless it is one of those below, in a process with a limit of time and
memory (`template_process`), which imports this file by its path: nothing here may import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtune_cp.errors import ConfigError, UserError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen and many others."""

LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + (message['content'] | trim) + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
"""Llama 3 and later. Base checkpoints have the special tokens but no template."""

LLAMA2 = (
    "{% set state = namespace(system='') %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{% set state.system = '<<SYS>>\n' + (message['content'] | trim) + '\n<</SYS>>\n\n' %}"
    "{% elif message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + state.system + (message['content'] | trim) + ' [/INST]' }}"
    "{% set state.system = '' %}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + (message['content'] | trim) + ' ' + eos_token }}"
    "{% else %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
)
"""Llama 2 Chat: the system prompt stands inside the next user turn."""

MISTRAL = (
    "{{ bos_token }}"
    "{% set state = namespace(system='') %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{% set state.system = (message['content'] | trim) + '\n\n' %}"
    "{% elif message['role'] == 'user' %}"
    "{{ '[INST] ' + state.system + (message['content'] | trim) + ' [/INST]' }}"
    "{% set state.system = '' %}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + (message['content'] | trim) + eos_token }}"
    "{% else %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
)
"""Mistral 7B Instruct."""

# Published ones have up to 20 thousand.
_MOST_TEMPLATE_CHARACTERS = 1_000_000
_MOST_SHOWN = 500
_SHOWN_OF_TEMPLATE = 80
_OWN = frozenset({CHATML, LLAMA3, LLAMA2, MISTRAL})


#: Unicode noncharacters, which no text has: where `{% generation %}` begins and ends.
GENERATION_MARKS = ("\ufdee", "\ufdef")


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant says.

    Templates made for transformers' assistant masks carry these tags. What is between them is rendered
    as it is; asked for marks, with `GENERATION_MARKS` around it.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if not self.environment.globals["marks_generation"]:
            return body
        opened, closed = (nodes.Output([nodes.TemplateData(mark)]) for mark in GENERATION_MARKS)
        return [opened, *body, closed]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would end up in the training text.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _NothingComputed(CodeGenerator):
    """Leaves constant expressions (`"a" * 10**10`) to rendering, which has limits."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _NamesOnly(_NothingComputed, meta.TrackingCodeGenerator):
    """Finds the names that a template does not set itself, and computes nothing meanwhile."""


def _environment(marks_generation: bool = False) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        optimized=False,
    )
    environment.code_generator_class = _NothingComputed
    environment.globals["marks_generation"] = marks_generation
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compile(template: str, marks_generation: bool) -> jinja2.Template:
    return _environment(marks_generation).from_string(template)


def render_here(template: str, inputs: Mapping[str, Any], marks_generation: bool = False) -> str:
    """Render in this process, without limits; raises whatever the template does."""
    return _compile(template, marks_generation).render(inputs)


def _not_jinja2(error: jinja2.TemplateSyntaxError) -> ConfigError:
    return ConfigError(
        f"the chat template is not valid jinja2 (line {error.lineno}): {error.message}"
    )


@dataclass(frozen=True)
class TemplateNames:
    """What a template looks at, as far as its source tells.

    Attributes:
        variables: Names of variables, such as "tools".
        inputs: Those of them that it does not set itself.
        keys: Attributes and strings, which keys of messages are read by: more than these may be meant.
        generation: Whether it marks what the assistant says with `{% generation %}`.
    """

    variables: frozenset[str]
    inputs: frozenset[str]
    keys: frozenset[str]
    generation: bool


@lru_cache(maxsize=32)
def template_names(template: str) -> TemplateNames:
    """Look through a template's source.

    Raises:
        ConfigError: It is not valid jinja2.
    """
    environment = _environment(marks_generation=True)
    tracker = _NamesOnly(environment)
    tracker.optimizer = None  # it would compute what is constant
    try:
        source = environment.parse(template)  # runs and computes nothing of it
        tracker.visit(source)  # knows which filters and tests there are
    except jinja2.TemplateSyntaxError as error:
        raise _not_jinja2(error) from error
    except RecursionError as error:
        raise ConfigError("the chat template is nested too deeply") from error
    data = "".join(node.data for node in source.find_all(nodes.TemplateData))
    return TemplateNames(
        variables=frozenset(n.name for n in source.find_all(nodes.Name) if n.ctx == "load"),
        inputs=frozenset(tracker.undeclared_identifiers - set(environment.globals)),
        keys=frozenset(n.attr for n in source.find_all(nodes.Getattr))
        | {n.value for n in source.find_all(nodes.Const) if isinstance(n.value, str)},
        generation=GENERATION_MARKS[0] in data,
    )


class TemplateRefusal(UserError):
    """A chat template raised an error for a conversation (for example about the order of roles)."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
    marks_generation: bool = False,
) -> str:
    """Render a conversation as text, special tokens written out.

    Args:
        template: The jinja2 source, as found in a Hugging Face tokenizer folder.
        messages: `{"role", "content"}` each, in order, and what else templates read: "tool_calls", ...
        add_generation_prompt: Ask the template to end with the assistant's header.
        variables: Further names that templates read, such as `bos_token` and `tools`.
        marks_generation: Put `GENERATION_MARKS` around what the template says the assistant says.

    Raises:
        ConfigError: When the template is no text, not valid jinja2, or needs more than its time and
            memory.
        TemplateRefusal: When the template does not accept this conversation; carries its message.
    """
    if not isinstance(template, str) or len(template) > _MOST_TEMPLATE_CHARACTERS:
        kind = f"of {len(template)} characters" if isinstance(template, str) else repr(template)
        raise ConfigError(
            f"the chat template {kind[:_MOST_SHOWN]}: allowed is a text of up to"
            f" {_MOST_TEMPLATE_CHARACTERS} characters"
        )
    inputs = {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(variables or {}),
    }
    try:
        if template in _OWN:
            return render_here(template, inputs, marks_generation)
        from torchtune_cp.data.template_process import render_apart  # not in that process itself

        kind, text = render_apart(template, inputs, marks_generation)
    except (jinja2.TemplateError, TypeError, LookupError, AttributeError) as error:
        kind, text = "refused", str(error)
    if kind != "text":
        text = " ".join(text.split())
    if kind == "broken":
        raise ConfigError(f"the chat template {_beginning(template)}: {text[:_MOST_SHOWN]}")
    if kind == "refused":
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateRefusal(
            f"the chat template does not accept this conversation (roles: {roles}): {text}"
        )
    return text


def _beginning(template: str) -> str:
    shown = repr(template)
    return shown if len(shown) <= _SHOWN_OF_TEMPLATE else f"{shown[:_SHOWN_OF_TEMPLATE]}..."
