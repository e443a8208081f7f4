"""From `{_component_: dotted.path, argument: value}` to the object it describes."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_cp.config import allow, torchtune_names
from torchtune_cp.config.argument_types import parameters_of, type_problems
from torchtune_cp.config.lookup import get_component
from torchtune_cp.config.overrides import COMPONENT
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError

# Arguments that make a library run code which came with a download.
_RUNS_DOWNLOADED_CODE = ("trust_remote_code",)


def instantiate(node: DictConfig | Mapping[str, Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Build the object that a component node describes.

    A component of the user can take components as arguments (in mappings and lists, at any depth), which
    are built first; other components cannot.

    Args:
        node: `{_component_: dotted.path, argument: value, ...}`; None returns None.
        *args: Positional arguments, passed before those of the config (an optimizer's parameters).
        **kwargs: Keyword arguments, which take precedence over those of the config.

    Returns:
        The return value of the component.

    Raises:
        ConfigError: The path is not allowed or does not exist, or the arguments do not fit the
            component's signature. Errors raised by the component itself pass unchanged.
    """
    if node is None:
        return None
    tree, key = _plain(node)
    return _build(tree, key, args, kwargs)


def component_callable(
    node: DictConfig | Mapping[str, Any] | str, key: str = COMPONENT
) -> Callable[..., Any]:
    """Return a component as a callable instead of calling it (a collate function).

    Args:
        node: A dotted path, or a component node whose arguments are bound to the callable.
        key: The config key of a dotted path; a node knows its own.

    Raises:
        ConfigError: As `instantiate`.
    """
    if isinstance(node, str):
        return get_component(node, key)
    tree, key = _plain(node)
    component = get_component(tree[COMPONENT], _join(key, COMPONENT))
    problems = _argument_problems(tree, key)
    if problems:
        raise ConfigError(problems)
    arguments = _arguments(tree, key)
    return functools.partial(component, **arguments) if arguments else component


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _plain(node: DictConfig | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if not isinstance(node, (DictConfig, Mapping)):
        raise ConfigError(f"expected a component {{{COMPONENT}: path, ...}}, got {node!r}")
    cfg = node if isinstance(node, DictConfig) else OmegaConf.create(dict(node))
    key = cfg._get_full_key(COMPONENT).removesuffix(COMPONENT).rstrip(".")
    try:
        tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key or 'component'}: {str(error).splitlines()[0]}") from None
    assert isinstance(tree, dict)
    if not isinstance(tree.get(COMPONENT), str):
        raise ConfigError(
            f"{key or 'component'}: has no {COMPONENT}, the dotted path of what to build"
        )
    return {str(k): v for k, v in tree.items()}, key


def _arguments(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    arguments = {k: v for k, v in tree.items() if k != COMPONENT}
    return {name: _build_nested(value, _join(key, name)) for name, value in arguments.items()}


def _build_nested(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        if COMPONENT in value:
            return _build(value, key, (), {})
        return {k: _build_nested(v, _join(key, str(k))) for k, v in value.items()}
    if isinstance(value, list):
        return [_build_nested(v, f"{key}.{i}") for i, v in enumerate(value)]
    return value


def _build(
    tree: Mapping[str, Any], key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    component = get_component(tree[COMPONENT], _join(key, COMPONENT))
    problems = node_problems(tree, key, positional=len(args), supplied=tuple(kwargs))
    if problems:
        raise ConfigError(problems)
    return component(*args, **{**_arguments(tree, key), **kwargs})


def node_problems(
    tree: Mapping[str, Any],
    key: str,
    *,
    positional: int | None = 0,
    supplied: Collection[str] = (),
) -> list[str]:
    """Compare a component node's arguments with the component's signature: names and types.

    Nothing is called. Nested components are compared too.

    Args:
        tree: The resolved node as plain containers.
        key: The config key of the node, for messages.
        positional: How many positional arguments the recipe gives; None when that is not known.
        supplied: The keyword arguments that the recipe gives.

    Returns:
        The problems found, one line each.
    """
    path = tree.get(COMPONENT)
    if not isinstance(path, str):
        return [f"{key}: has no {COMPONENT}, the dotted path of what to build"]
    try:
        component = get_component(path, _join(key, COMPONENT))
    except ConfigError as error:
        return error.problems
    names = [name for name in tree if name != COMPONENT]
    problems = _signature_problems(component, path, key, names, positional, supplied)
    plain = {n: v for n, v in tree.items() if not (isinstance(v, dict) and COMPONENT in v)}
    problems += type_problems(component, key, {n: v for n, v in plain.items() if n != COMPONENT})
    return problems + _argument_problems(tree, key)


def _argument_problems(tree: Mapping[str, Any], key: str) -> list[str]:
    """What the arguments of a component would run: downloaded code, or components where it takes none."""
    path = tree[COMPONENT]
    is_users_own = allow.allowed_by_user(torchtune_names.resolve(path))
    problems = []
    for name, value in tree.items():
        where = _join(key, name)
        if name in _RUNS_DOWNLOADED_CODE and value and not is_users_own:
            problems.append(f"{where}: executing code from a download is refused")
        if name == "source" and not is_users_own and (problem := allow.source_problem(value)):
            problems.append(f"{where}: {problem}")
        problems += _nested_problems(value, where, path, takes_components=is_users_own)
    return problems


def _nested_problems(value: Any, key: str, outer: str, *, takes_components: bool) -> list[str]:
    if isinstance(value, dict):
        if COMPONENT in value and takes_components:
            return node_problems(value, key)
        if COMPONENT in value:
            return [f"{key}: {outer} takes no component here, got {value[COMPONENT]!r}"]
        inner = [(_join(key, str(name)), item) for name, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{key}.{i}", item) for i, item in enumerate(value)]
    else:
        return []
    return [
        problem
        for where, item in inner
        for problem in _nested_problems(item, where, outer, takes_components=takes_components)
    ]


def _signature_problems(
    component: Callable[..., Any],
    path: str,
    key: str,
    names: Sequence[str],
    positional: int | None,
    supplied: Collection[str],
) -> list[str]:
    parameters = parameters_of(component)
    if parameters is None:
        return []  # a callable written in C without an introspectable signature
    kinds = inspect.Parameter
    by_position = [
        p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    taken = {p.name for p in by_position[: positional or 0]}
    by_name = {
        p.name
        for p in parameters
        if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY) and p.name not in taken
    }
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    problems = []
    for name in names:
        if name in taken:
            problems.append(f"{_join(key, name)}: is set by the recipe; remove it from the config")
        elif name not in by_name and not takes_any:
            takes = ", ".join(sorted(by_name - set(supplied))) or "none"
            problems.append(
                f"{_join(key, name)}: {path} has no argument {name!r}"
                f"{did_you_mean(name, by_name)} (it takes {takes})"
            )
    for name in supplied:
        if name not in by_name and not takes_any:
            problems.append(f"{key}: {path} does not take {name!r}, which the recipe passes to it")
    given = taken | set(names) | set(supplied)
    missing = [
        p.name
        for p in parameters
        if p.default is kinds.empty
        and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        and p.name not in given
    ]
    if missing and positional is not None:
        problems.append(f"{key}: {path} needs {', '.join(missing)}")
    return problems


def value_problems(
    node: DictConfig | ListConfig | Mapping[str, Any] | list[Any] | str,
    key: str,
    *,
    positional: int = 0,
    supplied: Collection[str] = (),
) -> list[str]:
    """As `node_problems`, for a config value: a node, a list of nodes, or a dotted path."""
    if isinstance(node, str):
        try:
            get_component(node, key)
        except ConfigError as error:
            return error.problems
        return []
    tree = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if isinstance(tree, list):
        return [
            problem
            for i, item in enumerate(tree)
            for problem in node_problems(
                item, f"{key}.{i}", positional=positional, supplied=supplied
            )
        ]
    assert isinstance(tree, Mapping)
    return node_problems(tree, key, positional=positional, supplied=supplied)  # type: ignore[arg-type]


def components_problems(tree: Any, key: str = "") -> list[str]:
    """Check every component of a config whose recipe, and so what it gives them, is not known.

    Args:
        tree: The resolved config as plain containers.
        key: The config key of `tree`, for messages.

    Returns:
        As `node_problems`, without what is missing.
    """
    if isinstance(tree, list):
        return [p for i, v in enumerate(tree) for p in components_problems(v, f"{key}.{i}")]
    if not isinstance(tree, dict):
        return []
    if COMPONENT in tree:
        return node_problems(tree, key, positional=None)
    return [p for k, v in tree.items() for p in components_problems(v, _join(key, str(k)))]
