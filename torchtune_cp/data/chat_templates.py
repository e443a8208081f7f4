"""Chat templates: rendering a conversation to text as Hugging Face's templates expect it.

A template is a jinja2 program that comes with a checkpoint, so it is a stranger's code: it runs in
jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtune_cp.errors import UserError

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


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's text; rendered as it is.

    Templates made for transformers' assistant masks carry these tags. Masks are found in another way
    here (`message_spans`), which needs no tags.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template is not valid jinja2 (line {error.lineno}): {error.message}"
        ) from error


class TemplateRefusal(UserError):
    """A chat template raised an error for a conversation (for example about the order of roles)."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as text, special tokens written out.

    Args:
        template: The jinja2 source, as found in a Hugging Face tokenizer folder.
        messages: `{"role", "content"}` each, in order.
        add_generation_prompt: Ask the template to end with the assistant's header.
        variables: Further names that templates read, such as `bos_token`.

    Raises:
        UserError: When the template is not valid jinja2.
        TemplateRefusal: When the template does not accept this conversation; carries its message.
    """
    compiled = _compile(template)
    try:
        return compiled.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
    except (jinja2.TemplateError, TypeError, LookupError, AttributeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateRefusal(
            f"the chat template does not accept this conversation (roles: {roles}): {error}"
        ) from error
