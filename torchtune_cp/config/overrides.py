"""Command-line changes to a config: `key=value`, `~key`, and the `--key value` spelling.

They are applied to plain dicts and lists, where a list index is an index and an interpolation is
still a string; OmegaConf gets the result.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_cp.config.plain_yaml import LOADER_FAILURES, look_through
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
COMPONENT = "_component_"
_LONGEST_SHOWN = 200


@dataclass(frozen=True)
class Override:
    """One change: set `key` to `value`, or remove it."""

    key: str
    value: Any = None
    remove: bool = False


def is_dotted_path(value: object) -> bool:
    """Say whether `value` is a string such as `package.module.name`."""
    return isinstance(value, str) and _DOTTED_PATH.fullmatch(value) is not None


def none_to_null(value: Any) -> Any:
    """Replace the string `None`, which YAML does not know, by null, at any depth."""
    if isinstance(value, dict):
        return {k: none_to_null(v) for k, v in value.items()}
    if isinstance(value, list):
        return [none_to_null(v) for v in value]
    return None if value == "None" else value


def _parse_value(key: str, text: str) -> Any:
    shown = repr(text) if len(text) <= _LONGEST_SHOWN else "given"
    where = f"{key}: the value {shown} cannot be read:"
    look_through(text, where)
    try:
        # from_dotlist reads the value with OmegaConf's YAML rules: 2e-5 is a number there.
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException, *LOADER_FAILURES) as error:
        first_line = " ".join(str(error).splitlines()[:1])
        raise ConfigError(f"{where} {first_line}") from None
    assert isinstance(parsed, dict)
    return none_to_null(parsed["value"])


def _key(text: str, token: str) -> str:
    key = re.sub(r"\[(\d+)\]", r".\1", text)
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"cannot read {token!r}: expected key=value or ~key, with dots in the key"
        )
    return key


def parse_overrides(tokens: Sequence[str]) -> list[Override]:
    """Read command-line tokens.

    Args:
        tokens: `key=value`, `~key`, `--key=value`, or `--key` followed by its value. In the
            two last spellings hyphens are read as underscores. `key[0]` is `key.0`.

    Raises:
        ConfigError: A token is none of these.
    """
    overrides = []
    queue = list(tokens)
    while queue:
        token = queue.pop(0)
        if token.startswith("--"):
            name, equals, text = token[2:].partition("=")
            key = _key(name.replace("-", "_"), token)
            if not equals:
                if not queue or queue[0].startswith(("--", "~")) or _looks_like_override(queue[0]):
                    raise ConfigError(f"{token} has no value: write {key}=VALUE")
                text = queue.pop(0)
            overrides.append(Override(key, _parse_value(key, text)))
        elif token.startswith("~"):
            overrides.append(Override(_key(token[1:], token), remove=True))
        elif "=" in token:
            name, _, text = token.partition("=")
            key = _key(name, token)
            overrides.append(Override(key, _parse_value(key, text)))
        else:
            raise ConfigError(f"cannot read {token!r}: expected key=value or ~key")
    return overrides


def _looks_like_override(token: str) -> bool:
    name, equals, _ = token.partition("=")
    return bool(equals) and _KEY.fullmatch(name) is not None


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Change `tree` in place, one override after the other.

    Raises:
        ConfigError: A key to remove is not there, or a path leads through a value that has no keys.
    """
    for override in overrides:
        parts = override.key.split(".")
        if override.remove:
            _remove(tree, parts, override.key)
        else:
            _set(tree, parts, override.value, override.key)


def _index(node: list[Any], part: str, key: str, *, may_append: bool) -> int:
    last = len(node) - (0 if may_append else 1)
    if not part.isdigit() or int(part) > last:
        raise ConfigError(f"{key}: {part!r} is no position in a list of {len(node)}")
    return int(part)


def _new_container(next_part: str) -> dict[str, Any] | list[Any]:
    return [] if next_part.isdigit() else {}


def _is_interpolation(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def _set(tree: dict[str, Any], parts: list[str], value: Any, key: str) -> None:
    node: Any = tree
    for part, next_part in itertools.pairwise(parts):
        if isinstance(node, list):
            index = _index(node, part, key, may_append=True)
            if index == len(node):
                node.append(_new_container(next_part))
            slot: Any = index
        elif isinstance(node, dict):
            slot = part
            if node.get(part) is None:
                node[part] = _new_container(next_part)
        else:
            raise _no_keys(node, part, key)
        child = node[slot]
        if is_dotted_path(child):
            # logger=some.Path logger.name=x, where the file had no logger to keep the keys of
            child = node[slot] = {COMPONENT: child}
        node = child
    last = parts[-1]
    if isinstance(node, list):
        index = _index(node, last, key, may_append=True)
        node[index : index + 1] = [value]
    elif isinstance(node, dict):
        node[last] = _merged(node.get(last), value)
    else:
        raise _no_keys(node, last, key)


def _no_keys(node: object, part: str, key: str) -> ConfigError:
    return ConfigError(f"{key}: cannot set {part!r} inside {node!r}, which is no mapping")


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict):
        return new
    if isinstance(new, dict):
        if COMPONENT in new and new[COMPONENT] != old.get(COMPONENT):
            return new  # the arguments of another component do not apply to this one
        return {**old, **{k: _merged(old.get(k), v) for k, v in new.items()}}
    if COMPONENT in old and isinstance(new, str) and not _is_interpolation(new):
        return {**old, COMPONENT: new}
    return new


def _remove(tree: dict[str, Any], parts: list[str], key: str) -> None:
    node: Any = tree
    for part in parts[:-1]:
        if isinstance(node, list):
            node = node[_index(node, part, key, may_append=False)]
        else:
            node = node.get(part) if isinstance(node, dict) else None
    last = parts[-1]
    if isinstance(node, list):
        del node[_index(node, last, key, may_append=False)]
    elif isinstance(node, dict) and last in node:
        del node[last]
    else:
        names = list(node) if isinstance(node, dict) else []
        hint = did_you_mean(last, [str(name) for name in names])
        raise ConfigError(f"~{key}: the config has no such key to remove{hint}")
