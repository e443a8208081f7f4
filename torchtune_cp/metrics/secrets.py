"""Keeps passwords and keys out of logged configs."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

MASK = "***"

# By the last word of the key: `hf_token` and `api_key` are secrets; `pad_token` and `max_tokens` are
# not.
_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:(?:api|access|secret|private|wandb|auth)[_-]?key|secret|password|passwd|"
    r"(?:hf|hub|api|auth|access|bearer|secret|github|gh)[_-]token)$|^(?:token|auth|credentials)$",
    re.IGNORECASE,
)
# Keys of Hugging Face, GitHub, OpenAI and AWS are recognised by their form; so is a password in a URL.
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[A-Z0-9]{16}\b|"
    r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def mask_secrets(config: Any) -> Any:
    """Resolve a config to plain containers and hide what looks like a secret.

    Args:
        config: An OmegaConf config, or plain dicts and lists.

    Returns:
        A copy in which values of keys such as ``api_key``, ``hf_token`` or ``password``, and texts of
        the form of a known service's key, read ``***``.
    """
    if isinstance(config, DictConfig | ListConfig):
        config = OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        return {
            key: MASK if value is not None and _SECRET_KEY.search(str(key)) else mask_secrets(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [mask_secrets(value) for value in config]
    if isinstance(config, str):
        return _SECRET_VALUE.sub(MASK, config)
    return config
