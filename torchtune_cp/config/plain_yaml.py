"""Untrusted YAML: an error gives one line that names the position.

The loaders used here execute no code, but a text can make them raise any exception, recurse without end, or
expand to far more than its size. So its events are checked first.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_cp.errors import ConfigError

# The largest shipped config has 5 KB.
_MOST_BYTES = 1_000_000
_MOST_LEVELS = 50
_MOST_VALUES = 10_000
_LONGEST_KEY = 200
# They may be nested, and OmegaConf's parser is slow with those.
_MOST_REFERENCES = 50
_LONGEST_SHOWN = 120
_LONGEST_NUMBER = 100
_NUMBER = re.compile(r"[-+]?(0[xob][0-9a-fA-F_]*|[0-9][0-9_:]*)")
# A tag asks the loader to make something of a value; these leave it a string.
_HARMLESS_TAGS = (None, "!", "tag:yaml.org,2002:str")
#: What loaders raise over a value that looks like a number and is none, besides errors of their own.
LOADER_FAILURES = (ValueError, TypeError, ArithmeticError, RecursionError)
_EVENTS: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_mapping(path: Path) -> dict[Any, Any]:
    """Read a YAML file that holds a mapping, with OmegaConf's rules (`2e-5` is a number).

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, or is anything else; names the file and, where there is one, the
            line.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{path}: has {size} bytes, allowed are {_MOST_BYTES} in a config")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} line {line}: is not UTF-8 text") from None
    top = look_through(text, str(path))
    if top is None:
        raise ConfigError(f"{path}: is empty; a config is a YAML mapping of keys to values")
    if not isinstance(top, yaml.MappingStartEvent):
        kind = "a list" if isinstance(top, yaml.SequenceStartEvent) else "a single value"
        raise ConfigError(
            f"{path} line {_line(top)}: a config is a YAML mapping of keys to values, not {kind}"
        )
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except yaml.MarkedYAMLError as error:
        raise _invalid(error, str(path)) from None
    except (OmegaConfBaseException, *LOADER_FAILURES) as error:
        place = f"{path}{_line_of_bad_value(text)}"
        raise ConfigError(f"{place}: cannot be read: {_one_line(error)}") from None
    assert isinstance(loaded, dict)
    return loaded


@dataclass
class _Open:
    """A list or mapping whose end has not been read."""

    is_mapping: bool
    anchor: str | None
    key_next: bool
    size: int = 1


def look_through(text: str, where: str) -> yaml.NodeEvent | None:
    """Refuse YAML that no config needs and that a loader cannot be trusted with.

    Args:
        text: The YAML.
        where: What messages begin with, for example the file.

    Returns:
        The event of the top-most value; None when there is nothing.

    Raises:
        ConfigError: It is not valid, or has tags, nesting, keys, characters or aliases beyond what is
            allowed; names the line.
    """
    top: yaml.NodeEvent | None = None
    stack: list[_Open] = []
    sizes: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=_EVENTS):
            if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                closed = stack.pop()
                if closed.anchor is not None:
                    sizes[closed.anchor] = closed.size
                _count(stack, closed.size)
            if not isinstance(event, yaml.NodeEvent):
                continue
            top = top or event
            is_key = bool(stack) and stack[-1].is_mapping and stack[-1].key_next
            problem = _problem(event, is_key, sizes)
            if stack and stack[-1].is_mapping:
                stack[-1].key_next = not stack[-1].key_next
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                stack.append(_Open(is_mapping, event.anchor, key_next=is_mapping))
                if len(stack) > _MOST_LEVELS:
                    problem = f"is nested more than {_MOST_LEVELS} levels deep"
            elif isinstance(event, yaml.AliasEvent):
                _count(stack, sizes.get(str(event.anchor), 1))
            else:
                sizes.update({event.anchor: 1} if event.anchor is not None else {})
                _count(stack, 1)
            if sum(opened.size for opened in stack) > _MOST_VALUES:
                problem = f"has more than {_MOST_VALUES} values, those of aliases included"
            if problem:
                raise ConfigError(f"{where} line {_line(event)}: {problem}")
    except yaml.MarkedYAMLError as error:
        raise _invalid(error, where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{where} line {line}: holds a character that YAML does not allow"
        ) from None
    empty = isinstance(top, yaml.ScalarEvent) and not top.value and top.implicit[0]
    return None if empty else top


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _count(stack: list[_Open], size: int) -> None:
    if stack:
        stack[-1].size += size


def _problem(event: yaml.NodeEvent, is_key: bool, sizes: dict[str, int]) -> str | None:
    tag = getattr(event, "tag", None)
    if tag not in _HARMLESS_TAGS:
        spelt = tag.replace("tag:yaml.org,2002:", "!!")
        return f"the tag {spelt[:_LONGEST_SHOWN]!r} is not read; write the plain value without it"
    if isinstance(event, yaml.AliasEvent) and event.anchor not in sizes:
        return f"*{event.anchor} is used inside its own anchor, or before it"
    if not isinstance(event, yaml.ScalarEvent):
        return "a key is a word, not a list, a mapping or an alias" if is_key else None
    value = event.value
    is_word = value.isprintable() and value.lower() not in ("", "~", "null")
    if is_key and (not is_word or len(value) > _LONGEST_KEY):
        return f"a key is a word on one line, not {value[:_LONGEST_SHOWN]!r}"
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        return "a value holds a NUL character or half of a surrogate pair, which no text has"
    if len(value) > _LONGEST_NUMBER and event.implicit[0] and _NUMBER.fullmatch(value):
        return f"a number has more than {_LONGEST_NUMBER} digits"
    if value.count("${") > _MOST_REFERENCES:
        return f"a value has more than {_MOST_REFERENCES} references ${{...}}"
    return None


def _line_of_bad_value(text: str) -> str:
    """Return ` line N` of the value with which the loader fails, because its error has no position."""
    for event in yaml.parse(text, Loader=_EVENTS):
        if isinstance(event, yaml.ScalarEvent) and (event.implicit[0] or "${" in event.value):
            try:
                value = event.value if event.implicit[0] else json.dumps(event.value)
                OmegaConf.load(io.StringIO(f"- {value}"))
            except (OmegaConfBaseException, *LOADER_FAILURES):
                return f" line {_line(event)}"
    return ""


def _invalid(error: yaml.MarkedYAMLError, where: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = f" line {mark.line + 1}" if mark else ""
    return ConfigError(f"{where}{line}: not valid YAML: {_one_line(error.problem)}")


def _one_line(error: object) -> str:
    text = " ".join(str(error).split("\n", 1)[0].split())
    return (text if text.isprintable() else ascii(text))[:_LONGEST_SHOWN] or type(error).__name__
