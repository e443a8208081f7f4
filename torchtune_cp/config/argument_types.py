"""Checks a component's arguments against the types that its signature declares.

A config holds null, booleans, numbers, strings, lists and mappings. An argument without a type is
judged by its default, and one whose type cannot be compared with these fits.
"""

import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtune_cp.config.overrides import COMPONENT
from torchtune_cp.did_you_mean import did_you_mean

#: How messages call the types of a config's values.
TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
}


@dataclass(frozen=True)
class AtLeast:
    """In `Annotated[int, AtLeast(1)]`: the smallest number allowed."""

    low: float


_UNKNOWN = Any
#: Counts by their name, in libraries that declare no type, or no bound.
_COUNT = re.compile(r"num_\w*steps|warmup_steps")


def parameters_of(component: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return a component's parameters, None for a callable without an introspectable signature."""
    try:
        return list(inspect.signature(component).parameters.values())
    except (TypeError, ValueError):
        return None


def type_problems(
    component: Callable[..., Any], key: str, arguments: Mapping[str, Any]
) -> list[str]:
    """Compare argument values with the types of a component's signature; nothing is called.

    Args:
        component: A class or function.
        key: The config key of its node, for messages.
        arguments: Plain values as a config gives them; nested components are not looked at.

    Returns:
        One line for each value that does not fit: its key, what is allowed, what was given.
    """
    parameters = {p.name: p for p in parameters_of(component) or ()}
    others = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    problems = []
    for name, value in arguments.items():
        parameter = parameters.get(name, others)
        if parameter is None:
            continue
        hint = _resolved(parameter.annotation, component)
        if hint is inspect.Parameter.empty:
            hint = _hint_of_default(parameter.default)
        elif value is None and parameter.default is None:
            continue
        if _COUNT.fullmatch(name) and hint in (int, _UNKNOWN):
            hint = Annotated[int, AtLeast(0)]
        if not fits(value, hint):
            problems.append(
                f"{key}.{name}: expected {' or '.join(_allowed(hint))}, got {_describe(value, hint)}"
            )
    return problems


def _resolved(annotation: Any, component: Callable[..., Any]) -> Any:
    """Return an annotation that may have been written as a string as what it means."""
    if not isinstance(annotation, str):
        return annotation
    target: Any = component
    if inspect.isclass(component):
        target = component.__init__ if inspect.isfunction(component.__init__) else None
    target = inspect.unwrap(getattr(target, "__func__", target)) if target else None
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(
            holder, globalns=getattr(target, "__globals__", {}), include_extras=True
        )["it"]
    except Exception:  # noqa: BLE001  (names that exist for type checkers only, foreign syntax)
        return _UNKNOWN


def _hint_of_default(default: Any) -> Any:
    """What a default implies about an argument without a type: no user writes 1e-3 for a string."""
    if isinstance(default, bool):
        return bool
    if isinstance(default, (int, float)):
        return float | list | dict | None
    if isinstance(default, (list, tuple)) and default:
        kinds = {_hint_of_default(item) for item in default}
        return types.GenericAlias(list, (kinds.pop() if len(kinds) == 1 else Any,)) | None
    return _UNKNOWN


def fits(value: Any, hint: Any) -> bool:
    """Say whether a plain value may be given where a type is declared.

    Args:
        value: Null, a boolean, number, string, list or mapping.
        hint: The type: of the standard library's typing, or any class.
    """
    if isinstance(value, Mapping) and COMPONENT in value:
        return True  # what it builds is not known
    if isinstance(value, float) and math.isnan(value):
        return False
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [extra.low for extra in args[1:] if isinstance(extra, AtLeast)]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return fits(value, args[0]) and not (is_number and any(value < low for low in bounds))
    if origin in (Union, types.UnionType):
        known = [arg for arg in args if _is_comparable(arg)]
        only_others = all(arg is type(None) for arg in known)
        return only_others or any(fits(value, arg) for arg in known)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    return _fits_class(value, origin or hint, args)


def _fits_class(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in (bool, int, str):
        return type(value) is kind  # bool is an int for Python, not for a user
    if _is_path(kind):
        return isinstance(value, str)
    if _is_list(kind):
        return isinstance(value, list) and _items_fit(value, kind, args)
    if _is_mapping(kind):
        return isinstance(value, Mapping) and all(
            fits(item, args[1]) for item in value.values() if len(args) == 2
        )
    return True


def _items_fit(value: list[Any], kind: Any, args: tuple[Any, ...]) -> bool:
    if not args:
        return True
    if kind is tuple and Ellipsis not in args:
        return len(value) == len(args) and all(map(fits, value, args))
    return all(fits(item, args[0]) for item in value)


def _is_path(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, os.PathLike)


def _is_list(kind: Any) -> bool:
    if not isinstance(kind, type) or kind is str or _is_mapping(kind):
        return False
    return kind in (list, tuple, Iterable, Iterator) or (
        issubclass(list, kind) and kind is not object
    )


def _is_mapping(kind: Any) -> bool:
    return (isinstance(kind, type) and issubclass(kind, Mapping)) or kind is dict


def _is_comparable(hint: Any) -> bool:
    """Whether a config's values can be of this type at all (they are no tensors)."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_comparable(get_args(hint)[0])
    kind = origin or hint
    if kind is Any or kind is object or isinstance(kind, typing.TypeVar):
        return True
    return (
        kind in (Literal, Union, types.UnionType, None, bool, int, float, str, type(None))
        or _is_path(kind)
        or _is_list(kind)
        or _is_mapping(kind)
    )


def _allowed(hint: Any) -> list[str]:
    """What a type allows, in words; one entry an alternative."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [f" of at least {extra.low:g}" for extra in args[1:] if isinstance(extra, AtLeast)]
        return [
            expected if expected == TYPE_NAMES[type(None)] else f"{expected}{''.join(bounds)}"
            for expected in _allowed(args[0])
        ]
    if origin in (Union, types.UnionType):
        expected = [line for arg in args if _is_comparable(arg) for line in _allowed(arg)]
        return list(dict.fromkeys(expected))
    if origin is Literal:
        return [", ".join("null" if arg is None else str(arg) for arg in args)]
    kind = origin or hint
    if kind in TYPE_NAMES or kind is None:
        return [TYPE_NAMES[type(None) if kind is None else kind]]
    if _is_path(kind):
        return ["a path"]
    if _is_mapping(kind):
        return ["a mapping"]
    return [_describe_list(kind, args)]


def _describe_list(kind: Any, args: tuple[Any, ...]) -> str:
    items = [arg for arg in args if arg is not Ellipsis]
    expected = {
        " or ".join(_allowed(arg)) for arg in items if _is_comparable(arg) and arg is not Any
    }
    if len(expected) != 1:
        return "a list"
    word = expected.pop()
    if kind is tuple and Ellipsis not in args:
        return f"a list of {len(items)}, each {word}"
    return f"a list, each item {word}"


def _describe(value: Any, hint: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    described = f"the string {value!r}"
    choices = [arg for arg in _choices(hint) if isinstance(arg, str)]
    if choices:
        return f"{value!r}{did_you_mean(value, choices)}"
    try:
        float(value)
    except ValueError:
        return described
    return f"{described}; write the number without quotes"


def _choices(hint: Any) -> AbstractSet[Any]:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return {choice for arg in get_args(hint) if get_origin(arg) for choice in _choices(arg)}
