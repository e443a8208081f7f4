"""Keeps passwords, tokens and keys out of everything that is written, logged or printed.

A secret is known by where it comes from (`${oc.env:NAME}` in a config), by its position (the value of a
key such as `hf_token`, in a config or among the environment variables), or by its form (the keys of
well-known services, passwords in URLs).
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_cp.config import environment
from torchtune_cp.config.environment import MASK, Origin, from_environment
from torchtune_cp.durable import write_text

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
# A shorter value is part of too many other words to be searched for in a text.
_SHORTEST = 6
# A shell keeps the current folder in it: no password.
_FOLDER_VARIABLE = "PWD"
# Standard variables, and those by which schedulers and Weights & Biases name a run.
_PUBLIC = re.compile(
    r"HOME|HOST|HOSTNAME|LOGNAME|OLDPWD|PWD|SHELL|TMPDIR|USER|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|CUDA_VISIBLE_DEVICES|((SLURM|PBS|LSB|SGE|FLUX|COBALT)_\w*)?JOB_?(ID|NAME|INDEX)|SLURM_(ARRAY|PROC|NODE)\w*ID|SKYPILOT_TASK_ID"
    r"|WANDB_(PROJECT|ENTITY|NAME|NOTES|TAGS|RUN_ID|RUN_GROUP|JOB_TYPE|MODE)"
)
# From this length on a value is looked for inside longer words too.
_LONG = 12
# Variables that are meant to be secret, judged by their names; broader than for keys of configs,
# of which many end so and are none.
_VARIABLE = re.compile(
    r"((^|_)(key|pat|pass|auth|pwd)|token|secret|password|passwd|passphrase|credentials?)$",
    re.IGNORECASE,
)

_remembered: set[str] = set()


def is_secret_key(key: str) -> bool:
    """Say whether a config key (or a variable's name) looks as if its value were a secret."""
    name = _CAMEL_CASE.sub("_", key).lower()
    return _KEY.search(name) is not None and _NO_SECRET.match(name.rpartition(".")[2]) is None


def remember_secrets(config: Any) -> None:
    """Have `mask_text` know the values of a config's secret keys, wherever they turn up.

    Args:
        config: An OmegaConf config, or plain dicts and lists.
    """
    if isinstance(config, (DictConfig, ListConfig)):
        for path, origin in from_environment(config).items():
            if path[-1] != "_component_":  # the names of components are public
                _remember(_texts(origin))
        try:
            config = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException:
            config = OmegaConf.to_container(config, resolve=False)
    _remember(_secret_values(config))


def _remember(values: Iterator[str]) -> None:
    for value in values:
        for text in {value, *value.splitlines()}:  # a key of several lines is printed line by line
            spelt = {text, repr(text)[1:-1], json.dumps(text)[1:-1], quote(text, safe="")}
            _remembered.update(form for form in spelt if len(text) >= _SHORTEST)


def _texts(origin: Origin) -> Iterator[str]:
    """What to look for in texts of what the environment put into one place of a config."""
    hidden = [
        value
        for name, value in origin.variables.items()
        # Lines about files would be of no use without the paths.
        if not _PUBLIC.fullmatch(name) and not _is_path(value)
    ]
    yield from hidden
    if hidden and (origin.shown == MASK or not isinstance(origin.value, str)):
        yield from _strings(origin.value)


def _is_path(value: str) -> bool:
    """Whether a value is an absolute path on this machine, judging by its top-level folder."""
    top = os.path.join(*Path(value).parts[:2]) if os.path.isabs(value) else ""
    return value.isprintable() and os.path.exists(top)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in _strings(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for item in value for text in _strings(item))
    else:
        yield str(value)


def forget(value: str) -> None:
    """Have `mask_text` leave a value alone that turned out to be public: one of a key's choices."""
    _remembered.discard(value)


def secret_variables(origin: Origin) -> list[str]:
    """Return the variables behind a value that may hold a secret, for all that is known.

    Not a standard variable or one that names a run; nor an absolute path on this machine, unless
    the variable is called as secrets are.
    """
    return [
        name
        for name, value in origin.variables.items()
        if _FORM.search(value)
        or not (_PUBLIC.fullmatch(name) or (_is_path(value) and not _VARIABLE.search(name)))
    ]


def is_private(text: str) -> bool:
    """Say whether a text holds a config that has a secret: its file is for the user's own eyes (0600)."""
    return MASK in text or "${oc." in text


def write_private(path: Path, text: str) -> None:
    """Write a text file that holds a config; with mode 0600 if `is_private`.

    Args:
        path: An earlier file is replaced.
        text: Written as UTF-8.

    Raises:
        OSError: It cannot be written.
    """
    write_text(path, text, mode=0o600 if is_private(text) else 0o666)


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
        The text; values of environment variables such as `HF_TOKEN`, remembered values (see
        `remember_secrets`), parts with the form of a known service's key, and what stands
        behind `api_key=` read `***`.
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
            found = re.escape(value)
            whole = value.isalpha() or len(value) < _LONG
            text = re.sub(rf"(?<!\w){found}(?!\w)" if whole else found, MASK, text)
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


def mask_secrets(config: Any, origins: Mapping[environment.Path, Origin] | None = None) -> Any:
    """Return a plain, resolved copy of a config without its secrets.

    Args:
        config: An OmegaConf config, or plain dicts and lists.
        origins: Where a config that is resolved already got its values from, see
            `torchtune_cp.config.environment.from_environment`.

    Returns:
        Plain containers; the values of keys such as `api_key`, `hf_token` or `password`, and the
        parts of strings that have the form of a known service's key or are the value of such an
        environment variable, read `***`. What `${oc.env:NAME}` put in reads `${oc.env:NAME}`, so
        that a config can be loaded again.
    """
    if isinstance(config, (DictConfig, ListConfig)):
        origins = {**from_environment(config), **(origins or {})}
        config = OmegaConf.to_container(config, resolve=True)
    remember_secrets(config)  # another key may refer to them, or a URL hold them
    return _masked((), config, origins or {})


def _masked(path: environment.Path, value: Any, origins: Mapping[environment.Path, Origin]) -> Any:
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if isinstance(value, (DictConfig, ListConfig)):  # inside a plain mapping
        value = OmegaConf.to_container(value, resolve=True)
    if path in origins and not is_secret_key(key):
        value = origins[path].shown
    if isinstance(value, Mapping):
        if is_secret_key(key) and "_component_" not in value:
            return MASK
        return {name: _masked((*path, name), item, origins) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked((*path, place), item, origins) for place, item in enumerate(value)]
    if path in origins and not isinstance(value, str):
        return MASK
    if isinstance(value, str):
        if is_secret_key(key) and value:
            return MASK
        value = _QUERY.sub(_masked_query, _FORM.sub(MASK, _mask_known(value)))
        return MASK if _FORTY_HEX.fullmatch(value) and not _COMMIT_KEY.search(key) else value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if str(value) in _remembered:
            return MASK
        return MASK if _NEVER_A_NUMBER.search(_CAMEL_CASE.sub("_", key).lower()) else value
    return value


class MaskingFormatter(logging.Formatter):
    """Formats log records (tracebacks included) without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return mask_text(super().format(record))
