"""Checks of argument values that a component provides, run before anything is built.

A signature gives names and types. Everything else a component refuses only when it is called, in a
rank that has been started; a check finds the same problems from the plain arguments alone.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torchtune_cp.config.argument_types import parameters_of
from torchtune_cp.errors import UserError

ComponentT = TypeVar("ComponentT", bound=Callable[..., Any])

#: Takes the arguments that a config gives, and the names that the component's signature has; yields
#: the mistakes, each message beginning with the argument's name.
Check = Callable[[Mapping[str, Any], frozenset[str]], Iterable[UserError]]

_ATTRIBUTE = "check_arguments"


def checked_by(check: Check) -> Callable[[ComponentT], ComponentT]:
    """Decorate a component (class or function) with a check of its arguments.

    Args:
        check: See `Check`. A `NotFoundHereError` means that nothing
            is wrong but that this machine lacks something.
    """

    def decorate(component: ComponentT) -> ComponentT:
        setattr(component, _ATTRIBUTE, staticmethod(check) if inspect.isclass(component) else check)
        return component

    return decorate


def no_pack_length(key: str) -> str:
    """The message for a packed dataset without a length.

    Args:
        key: The dataset's key in the config.
    """
    return (
        f"{key}.packed=true needs the length of a pack in tokens: set tokenizer.max_seq_len or"
        f" {key}.max_seq_len"
    )


def argument_errors(component: Callable[..., Any], arguments: Mapping[str, Any]) -> list[UserError]:
    """Return the problems that a component's check finds in its arguments, none without a check."""
    check = getattr(component, _ATTRIBUTE, None)
    if check is None:
        return []
    kinds = inspect.Parameter
    named = frozenset(
        p.name
        for p in parameters_of(component) or ()
        if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    )
    return list(check(arguments, named))
