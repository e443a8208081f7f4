"""Plain values against the types of a signature: every mistake named, nothing right refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import pytest
import torch

from torchtune_cp.config.argument_types import AtLeast, type_problems

if TYPE_CHECKING:
    from somewhere import Unknown


class Colour(Enum):
    RED = "red"


def declared(
    a: int,
    b: float = 1.0,
    c: bool = False,
    d: str | None = None,
    e: Optional[int] = 3,  # noqa: UP045
    f: Union[float, torch.Tensor] = 0.0,  # noqa: UP007
    g: Literal["mean", "sum"] = "mean",
    h: list[int] | None = None,
    i: tuple[float, float] = (0.9, 0.999),
    j: Mapping[str, str] | None = None,
    k: str | Sequence[str] = "*",
    l: Annotated[int, AtLeast(1)] = 1,  # noqa: E741
    m: Unknown = None,
    n: Colour = Colour.RED,
    o: Callable[[int], int] | None = None,
    p: Any = None,
    q: Path | None = None,
    r: Iterable[int] = (),
) -> None: ...


def undeclared(lr=1e-3, betas=(0.9, 0.95), amsgrad=False, name="x", num_warmup_steps=None): ...


FITS = [
    *({"a": 1}, {"b": 2}, {"b": 2.5}, {"c": True}, {"d": None}, {"d": "x"}, {"e": None}, {"e": 5}),
    *({"f": 1}, {"g": "sum"}, {"h": [1, 2]}, {"h": []}, {"i": [0.1, 1]}, {"j": {"x": "y"}}),
    *({"k": "a"}, {"k": ["a", "b"]}, {"l": 1}, {"m": "anything"}, {"n": "red"}, {"o": "a.b"}),
    *({"p": {"x": [1]}}, {"q": "/tmp"}, {"r": [1]}, {"a": {"_component_": "x.y"}}),
    *({"h": [{"_component_": "x.y"}]},),
]
REFUSED = [
    ({"a": "3"}, "declared.a: expected an integer, got the string '3'; write the number without"),
    ({"a": 0.1}, "expected an integer, got 0.1"),
    ({"a": True}, "expected an integer, got true"),
    ({"a": None}, "expected an integer, got null"),
    ({"b": "2e-5"}, "expected a number, got the string '2e-5'; write the number without quotes"),
    ({"b": "1e-3x"}, "expected a number, got the string '1e-3x'"),
    ({"b": True}, "expected a number, got true"),
    ({"b": float("nan")}, "expected a number, got nan"),
    ({"b": [1.0]}, "expected a number, got [1.0]"),
    ({"c": "false"}, "expected true or false, got the string 'false'"),
    ({"c": 1}, "expected true or false, got 1"),
    ({"d": 3}, "expected a string or null, got 3"),
    ({"f": "x"}, "expected a number, got the string 'x'"),
    ({"g": "summ"}, "expected mean, sum, got 'summ'; did you mean sum?"),
    ({"h": "1, 2"}, "expected a list, each item an integer or null"),
    ({"h": [1, "2"]}, "got [1, '2']"),
    ({"i": [0.9]}, "expected a list of 2, each a number, got [0.9]"),
    ({"i": 0.9}, "expected a list of 2, each a number"),
    ({"j": ["x"]}, "expected a mapping or null"),
    ({"j": {"x": 1}}, "expected a mapping or null"),
    ({"k": 3}, "expected a string or a list, each item a string, got 3"),
    ({"l": 0}, "expected an integer of at least 1, got 0"),
    ({"q": 3}, "expected a path or null"),
    ({"r": "12"}, "expected a list, each item an integer"),
]


@pytest.mark.parametrize("arguments", FITS, ids=str)
def test_a_value_of_the_declared_type_fits(arguments: dict[str, Any]) -> None:
    assert type_problems(declared, "declared", arguments) == []


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=str)
def test_a_value_of_another_type_is_named_with_what_is_allowed(
    arguments: dict[str, Any], said: str
) -> None:
    (line,) = type_problems(declared, "declared", arguments)
    assert said in line
    assert line.startswith(f"declared.{next(iter(arguments))}: ")


def test_an_argument_without_a_type_is_judged_by_its_default_and_a_count_by_its_name() -> None:
    right = {"lr": 1, "betas": [0.9, 0.95], "amsgrad": True, "name": 3, "num_warmup_steps": 10}
    assert type_problems(undeclared, "x", right) == []
    wrong = {"lr": "1e-3", "betas": "0.9", "amsgrad": "no", "num_warmup_steps": 0.1}
    lines = type_problems(undeclared, "x", wrong)
    assert [line.partition(":")[0] for line in lines] == [f"x.{name}" for name in wrong]
    assert "at least 0" in type_problems(undeclared, "x", {"num_warmup_steps": -1})[0]


def test_the_defaults_of_every_optimizer_and_schedule_of_torch_fit_their_own_types() -> None:
    bases = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    components = [
        value
        for module in (torch.optim, torch.optim.lr_scheduler)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, bases)
    ]
    assert len(components) > 25
    for component in components:
        defaults = {
            name: list(p.default) if isinstance(p.default, tuple) else p.default
            for name, p in inspect.signature(component).parameters.items()
            if p.default is not p.empty
        }
        assert type_problems(component, component.__name__, defaults) == []


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adafactor", "Muon"])
def test_a_quoted_rate_is_refused_for_every_optimizer(optimizer: str) -> None:
    component = getattr(torch.optim, optimizer)
    (line,) = type_problems(component, "optimizer", {"lr": "2e-5"})
    assert line.startswith("optimizer.lr: expected a number")
