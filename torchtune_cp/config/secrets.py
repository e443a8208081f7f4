"""Keeps passwords, tokens and keys out of configs that are written or logged."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

MASK = "***"

# By the end of the key. A tokenizer's special tokens and counts of tokens are no secrets.
_KEY = re.compile(
    r"(^|[_-])(token|api[_-]?key|secret|(secret|access|private|auth)[_-]?key|password|passwd|"
    r"credentials?)$"
)
_NO_SECRET = re.compile(
    r"^(bos|eos|pad|unk|mask|sep|cls|image|start|end|stop|special|new)[_-]token$"
)
# By the form of well-known services' keys, and passwords inside a URL.
_VALUE = re.compile(
    r"\bhf_\w{20,}|\bgh[pousr]_\w{20,}|\bsk-[\w-]{20,}|\bAKIA[A-Z0-9]{16}\b"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def is_secret_key(key: str) -> bool:
    """Say whether a config key looks as if its value were a secret."""
    name = key.lower()
    return _KEY.search(name) is not None and _NO_SECRET.match(name) is None


def mask_secrets(config: Any) -> Any:
    """Return a plain, resolved copy of a config without its secrets.

    Args:
        config: An OmegaConf config, or plain dicts and lists.

    Returns:
        Plain containers; the values of keys such as ``api_key``, ``hf_token`` or ``password``, and the
        parts of strings that have the form of a known service's key, read ``***``.
    """
    if isinstance(config, (DictConfig, ListConfig)):
        config = OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        return {
            key: MASK
            if isinstance(value, str) and value and is_secret_key(str(key))
            else mask_secrets(value)
            for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return [mask_secrets(value) for value in config]
    if isinstance(config, str):
        return _VALUE.sub(MASK, config)
    return config
