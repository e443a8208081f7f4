"""Which values of a config come from the environment (`${oc.env:NAME}`), found by resolving it.

The value of a variable is kept out of everything that is written, whatever its name: it is replaced
by its reference. The run itself uses the real values.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from torchtune_cp.errors import ConfigError

#: Position of a value in a config: keys and list positions from the top.
Path = tuple[Any, ...]

MASK = "***"

# Private-use characters around a variable's name, in the place of its value.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_TOKEN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
# Far above any config, and a bound on references that multiply.
_MOST_VALUES = 100_000
_MOST_CHARACTERS = 10_000_000
_REFERS_TO_ITSELF = "a reference leads back to itself, or the config is nested too deeply"


@dataclass(frozen=True)
class Origin:
    """A value that the environment put into a config, whole or in part.

    Attributes:
        variables: Every variable that was read for it, and what it held.
        value: The resolved value.
        shown: What is written in its place: `${oc.env:NAME}` for the part that a variable holds, or
            `***` where that part cannot be determined.
    """

    variables: Mapping[str, str]
    value: Any
    shown: str


_read: dict[str, str] | None = None  # variables read since a watch began
_give_names = False


def _env(*arguments: Any) -> Any:
    """`oc.env`, watched. The default value of a variable that is not set is no secret."""
    value = oc.env(*arguments)
    name = arguments[0]
    if _read is None or name not in os.environ:
        return value
    _read[name] = os.environ[name]
    return f"{_OPEN}{name}{_CLOSE}" if _give_names else value


# Its name before OmegaConf 2.4 is deprecated there.
getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)(
    "oc.env", _env, replace=True
)
# It imports whatever module a config names.
OmegaConf.clear_resolver("oc.coerce")


@contextlib.contextmanager
def _watch(give_names: bool = False) -> Iterator[dict[str, str]]:
    global _read, _give_names
    before = _read, _give_names
    _read, _give_names = {}, give_names
    try:
        yield _read
    finally:
        _read, _give_names = before


def from_environment(config: DictConfig | ListConfig) -> dict[Path, Origin]:
    """Find the values of a config that come from environment variables, through any references.

    Values that cannot be resolved are left out: whoever reads them gets the error.

    Args:
        config: Interpolations unresolved.

    Raises:
        ConfigError: References lead back to themselves or multiply without end.
    """
    found: dict[Path, Origin] = {}
    left = [_MOST_VALUES, _MOST_CHARACTERS]
    try:
        _walk(config, (), found, left)
    except RecursionError:
        raise ConfigError(_REFERS_TO_ITSELF) from None
    return found


def _walk(
    node: DictConfig | ListConfig, path: Path, found: dict[Path, Origin], left: list[int]
) -> None:
    keys: Any = range(len(node)) if isinstance(node, ListConfig) else list(node.keys())
    for key in keys:
        with _watch() as variables:
            try:
                value = node[key]
            except OmegaConfBaseException:
                continue
        left[0] -= 1
        left[1] -= len(value) if isinstance(value, str) else 0
        if min(left) < 0:
            raise ConfigError(
                f"the config has more than {_MOST_VALUES} values or {_MOST_CHARACTERS} characters when"
                " its references are resolved"
            )
        here = (*path, key)
        if variables:
            found[here] = _origin(node, key, value, variables)
        elif isinstance(value, (DictConfig, ListConfig)):
            _walk(value, here, found, left)


def _origin(
    node: DictConfig | ListConfig, key: Any, value: Any, variables: Mapping[str, str]
) -> Origin:
    shown = MASK
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    with _watch(give_names=True), contextlib.suppress(OmegaConfBaseException):
        named = node[key]
        if isinstance(named, str) and _TOKEN.sub(lambda t: os.environ[t[1]], named) == value:
            shown = _TOKEN.sub(r"${oc.env:\1}", named)
    if shown == MASK and len(variables) == 1:
        decoded = f"${{oc.decode:${{oc.env:{next(iter(variables))}}}}}"
        with contextlib.suppress(OmegaConfBaseException):
            again = OmegaConf.to_container(OmegaConf.create({"x": decoded}), resolve=True)
            if isinstance(again, dict) and repr(again["x"]) == repr(value):
                shown = decoded
    return Origin(dict(variables), value, shown)


def hide_in_problem(problem: str, origins: Mapping[Path, Origin]) -> str:
    """Take the values of the environment out of a line `key: what is wrong with it`.

    Args:
        problem: The line.
        origins: See `from_environment`; only those at or below the line's key count.
    """
    key, colon, rest = problem.partition(": ")
    for path, origin in origins.items():
        name = ".".join(map(str, path))
        if key != name and not key.startswith(f"{name}.") and not name.startswith(f"{key}."):
            continue
        for text in sorted({repr(origin.value), str(origin.value)}, key=len, reverse=True):
            if text:
                bounded = rf"(?<![\w.]){re.escape(text)}(?![\w])"
                rest = re.sub(bounded, origin.shown.replace("\\", r"\\"), rest)
    return f"{key}{colon}{rest}"
