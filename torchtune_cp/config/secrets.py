"""Keeps passwords, tokens and keys out of everything that is written, logged or printed.

A secret is known by its place (the value of a key such as ``hf_token``, in a config or among the
environment variables), or by its form (the keys of well-known services, passwords in URLs).
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

MASK = "***"

# By the end of the key. A tokenizer's special tokens and counts of tokens are no secrets.
_KEY = re.compile(
    r"(^|[_.-])(token|api[_-]?keys?|secrets?|(secret|access|private|auth)[_-]?key|passwords?|passwd|"
    r"passphrase|pwd|credentials?|authorization)$"
)
_NO_SECRET = re.compile(
    r"^(bos|eos|pad|unk|mask|sep|cls|image|start|end|stop|special|new)[_-]token$"
)
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# A number under these keys is one; under "token" it may be an id.
_NEVER_A_NUMBER = re.compile(r"(passwords?|passwd|passphrase|pwd|secrets?|api[_-]?keys?)$")
# By the form of well-known services' keys, and passwords inside a URL or behind one's question mark.
_FORM = re.compile(
    r"\bhf_\w{20,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b"
    r"|\bwandb_v\d+_\w{20,}"
    r"|(?<=://)[^/\s@]*:[^/\s]*(?=@)|(?<=://)[^/\s@:]{20,}(?=@)"
    r"|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
)
_QUERY = re.compile(r"([?&]([\w-]+)=)([^&\s#'\"]+)")
_SIGNATURE = re.compile(r"sig(nature)?$", re.IGNORECASE)
# key=value on a command line, 'key': 'value' as Python prints a mapping.
_ASSIGNED = re.compile(r"""(["']?([A-Za-z][\w.-]*)(?:["']?=|["']:\s*)["']?)([^\s"',;&}\]]+)""")
# Weights & Biases' older keys: 40 hexadecimal digits, which a git commit's name has too.
_FORTY_HEX = re.compile(r"(?<![\w/@.:-])[0-9a-f]{40}(?![\w/])")
_COMMIT_KEY = re.compile(r"(revision|commit|sha|hash|rev)", re.IGNORECASE)
# A shorter value stands in too many other words to be looked for in a text.
_SHORTEST = 6
# A shell keeps the current folder in it: no password.
_FOLDER_VARIABLE = "PWD"

_remembered: set[str] = set()


def is_secret_key(key: str) -> bool:
    """Say whether a config key (or a variable's name) looks as if its value were a secret."""
    name = _CAMEL_CASE.sub("_", key).lower()
    return _KEY.search(name) is not None and _NO_SECRET.match(name.rpartition(".")[2]) is None


def remember_secrets(config: Any) -> None:
    """Have :func:`mask_text` know the values of a config's secret keys, wherever they turn up.

    Args:
        config: An OmegaConf config, or plain dicts and lists.
    """
    if isinstance(config, (DictConfig, ListConfig)):
        try:
            config = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException:
            config = OmegaConf.to_container(config, resolve=False)
    _remembered.update(value for value in _secret_values(config) if len(value) >= _SHORTEST)


def _secret_values(config: Any, under_secret: bool = False) -> Iterator[str]:
    if isinstance(config, (DictConfig, ListConfig)):  # inside a plain mapping
        yield from _secret_values(OmegaConf.to_container(config, resolve=True), under_secret)
    elif isinstance(config, Mapping):
        for key, value in config.items():
            yield from _secret_values(value, under_secret or is_secret_key(str(key)))
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _secret_values(value, under_secret)
    elif under_secret and isinstance(config, str) and not config.startswith("${"):
        yield config


def mask_text(text: str) -> str:
    """Return a text without its secrets.

    Args:
        text: A log line, an error's message, a traceback.

    Returns:
        The text; values of environment variables such as ``HF_TOKEN``, remembered values (see
        :func:`remember_secrets`), parts with the form of a known service's key, and what stands
        behind ``api_key=`` read ``***``.
    """
    text = _mask_known(text)
    text = _FORM.sub(MASK, text)
    text = _QUERY.sub(_masked_query, text)
    text = _ASSIGNED.sub(_masked_assignment, text)
    return _FORTY_HEX.sub(lambda found: _masked_hex(text, found), text)


def _mask_known(text: str) -> str:
    known = _remembered | {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and is_secret_key(name) and name != _FOLDER_VARIABLE
    }
    for value in sorted(known, key=len, reverse=True):
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", MASK, text)
    return text


def _masked_query(found: re.Match[str]) -> str:
    name = found[2]
    secret = is_secret_key(name) or _SIGNATURE.search(name) is not None
    return found[1] + (MASK if secret else found[3])


def _masked_assignment(found: re.Match[str]) -> str:
    return found[1] + MASK if is_secret_key(found[2]) else found[0]


def _masked_hex(text: str, found: re.Match[str]) -> str:
    before = text[max(0, found.start() - 20) : found.start()]
    return found[0] if _COMMIT_KEY.search(before) else MASK


def mask_secrets(config: Any) -> Any:
    """Return a plain, resolved copy of a config without its secrets.

    Args:
        config: An OmegaConf config, or plain dicts and lists.

    Returns:
        Plain containers; the values of keys such as ``api_key``, ``hf_token`` or ``password``, and the
        parts of strings that have the form of a known service's key or are the value of such an
        environment variable, read ``***``.
    """
    if isinstance(config, (DictConfig, ListConfig)):
        config = OmegaConf.to_container(config, resolve=True)
    remember_secrets(config)  # another key may refer to them, or a URL hold them
    return _masked("", config)


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, (DictConfig, ListConfig)):  # inside a plain mapping
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        if is_secret_key(key) and "_component_" not in value:
            return MASK
        return {name: _masked(str(name), item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(key, item) for item in value]
    if isinstance(value, str):
        if is_secret_key(key) and value:
            return MASK
        value = _QUERY.sub(_masked_query, _FORM.sub(MASK, _mask_known(value)))
        return MASK if _FORTY_HEX.fullmatch(value) and not _COMMIT_KEY.search(key) else value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return MASK if _NEVER_A_NUMBER.search(_CAMEL_CASE.sub("_", key).lower()) else value
    return value


class MaskingFormatter(logging.Formatter):
    """Formats log records (tracebacks included) without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return mask_text(super().format(record))
