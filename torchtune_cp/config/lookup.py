"""From a dotted path in a config to the class or function that it names, if that is allowed."""

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from torchtune_cp.config import allow, torchtune_names
from torchtune_cp.config.overrides import COMPONENT
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError


def get_component(path: str, key: str = COMPONENT) -> Callable[..., Any]:
    """Return the class or function that a dotted path names.

    Args:
        path: A dotted path; `torchtune.` names resolve to this project's equivalents.
        key: The config key, which determines the allowed components (see
            `torchtune_cp.config.allow`).

    Raises:
        ConfigError: A name that does not exist, or that a config may not name there.
    """
    try:
        target = torchtune_names.resolve(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key}: {path!r} is no dotted path of a class or function")
    if allow.allowed_by_user(target):
        found = _walk(target, path, key)
        _check_kind(found, path, key)
        return found
    role = allow.role_of(key)
    try:
        component = allow.find(target, role)
    except ModuleNotFoundError as error:
        raise _not_importable(parts[0], error, path, key) from None
    if component is None:
        raise ConfigError(
            f"{key}: {path!r} is refused{allow.described(target, role)}{allow.trust_advice(path)}"
        )
    return component


def _refused(path: str, key: str, why: str) -> ConfigError:
    return ConfigError(f"{key}: {path!r} is refused: {why}")


def _walk(target: str, path: str, key: str) -> Any:
    parts = target.split(".")
    module = _import(parts[0], path, key)
    found: Any = module
    for position, part in enumerate(parts[1:], start=1):
        is_last = position == len(parts) - 1
        attribute = getattr(found, part, None)
        if isinstance(found, types.ModuleType) and (attribute is None or not is_last):
            submodule = _import_submodule(found.__name__, part, path, key)
            attribute = submodule if submodule is not None else attribute
        if attribute is None:
            raise ConfigError(
                f"{key}: {path!r} does not exist: {'.'.join(parts[:position])} has no"
                f" {part!r}{did_you_mean(part, _public_names(found, modules=not is_last))}"
            )
        if isinstance(attribute, types.ModuleType) and attribute.__name__ != ".".join(
            parts[: position + 1]
        ):
            raise _refused(path, key, f"it refers to the module {attribute.__name__} sideways")
        found = attribute
    return found


def _public_names(found: object, *, modules: bool) -> list[str]:
    return [
        name
        for name in dir(found)
        if not name.startswith("_")
        and isinstance(getattr(found, name, None), types.ModuleType) is modules
    ]


def _import(name: str, path: str, key: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _not_importable(name, error, path, key) from None


def _not_importable(name: str, error: ModuleNotFoundError, path: str, key: str) -> ConfigError:
    if error.name == name:
        return ConfigError(f"{key}: {path!r}: the package {name!r} is not installed")
    return ConfigError(f"{key}: {path!r}: importing {name} needs {error.name!r}")


def _import_submodule(parent: str, name: str, path: str, key: str) -> types.ModuleType | None:
    full = f"{parent}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        # "parent is not a package" carries the same name as "no such submodule".
        if error.name == full:
            return None
        raise ConfigError(f"{key}: {path!r}: importing {full} needs {error.name!r}") from None


def _check_kind(found: Any, path: str, key: str) -> None:
    """Check what was found in a module that the user allows."""
    if isinstance(found, types.ModuleType):
        raise ConfigError(
            f"{key}: {path!r} is a module, not a class or function"
            f"; it has {', '.join(_public_names(found, modules=False)[:12])}"
        )
    is_class_method = inspect.ismethod(found) and inspect.isclass(found.__self__)
    is_plain_function = inspect.isfunction(found) and "." not in found.__qualname__.replace(
        "<locals>.", ""
    )
    if not (inspect.isclass(found) or is_class_method or is_plain_function):
        raise _refused(path, key, "it is neither a class, a function nor a class method")
    for defined in (found, found.__self__) if is_class_method else (found,):
        if not allow.may_call(defined):
            home = getattr(defined, "__module__", None) or "an unknown module"
            raise _refused(
                path, key, f"it was defined in {home}, which {allow.ALLOW_VARIABLE} does not name"
            )
