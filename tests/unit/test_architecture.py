"""Imports go one way, models know torch only, and private torch names stand in one file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = "torchtune_cp"
SOURCE = CHECKOUT / PACKAGE
#: Of meshes and sharding, and of attention, whose file imports nothing of the first.
TORCH_PRIVATE = SOURCE / "distributed" / "context_parallel" / "torch_private.py"
MESH_TORCH_PRIVATE = SOURCE / "distributed" / "torch_private.py"
#: What the planner needs of torch's insides is of no use to training, which must not import it.
PLANNER_TORCH_PRIVATE = SOURCE / "planner" / "torch_private.py"

#: Files beside the packages that need nothing and serve all.
FOR_ALL = {"attention", "errors", "did_you_mean"}
#: What each part of the package may import of the others. `models` stands apart: torch only.
MAY_IMPORT = {
    "durable": set(),
    "models": set(),
    "launch": {"durable"},
    "config": {"durable", "launch"},
    "distributed": {"config", "launch"},
    "data": {"config", "distributed", "models"},
    "datasets": {"data", "config", "distributed", "durable", "launch"},
    "metrics": {"config", "distributed", "durable"},
    "checkpointing": {"config", "distributed", "models", "durable"},
    "training": {
        *("config", "distributed", "data", "datasets", "metrics", "checkpointing", "models"),
    },
    "planner": {"config", "distributed", "launch", "models", "training"},
    "cli": {"config", "checkpointing", "launch", "models", "planner"},
    "quickstart": {"config", "checkpointing", "launch", "metrics"},
    "recipes": {
        *("config", "distributed", "data", "datasets", "metrics", "checkpointing", "models"),
        *("training", "launch"),
    },
}
#: Names needed by the type checker alone, under `if TYPE_CHECKING:`.
MAY_IMPORT_FOR_TYPES = {"distributed": {"models"}}

FILES = sorted([*SOURCE.rglob("*.py"), *(CHECKOUT / "recipes").glob("*.py")])


def _part(path: Path) -> str:
    if path.is_relative_to(SOURCE):
        return path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "recipes"


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(tree: ast.AST, for_types: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Every imported module or name as a dotted path, its line, and whether for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, for_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, for_types
        yield from _imports(node, for_types or _is_type_checking(node))


def _parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def _where(path: Path, line: int) -> str:
    return f"{path.relative_to(CHECKOUT)}:{line}"


def test_the_table_of_directions_has_no_cycle_and_names_every_part() -> None:
    list(TopologicalSorter(MAY_IMPORT).static_order())
    parts = {_part(path) for path in FILES} - {"__init__", "__main__"} - FOR_ALL
    assert parts == set(MAY_IMPORT)


def test_imports_go_one_way() -> None:
    offenders = []
    for path, tree in _parsed():
        part = _part(path)
        if part in ("__init__", "__main__", *FOR_ALL):
            continue
        for name, line, for_types in _imports(tree):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top != PACKAGE or target in (part, "__version__"):
                continue
            allowed = FOR_ALL | MAY_IMPORT[part]
            if for_types:
                allowed |= MAY_IMPORT_FOR_TYPES.get(part, set())
            if target not in allowed:
                offenders.append(f"{_where(path, line)}: {part} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_models_import_torch_and_the_standard_library_only() -> None:
    offenders = [
        f"{_where(path, line)}: {name}"
        for path, tree in _parsed()
        if _part(path) == "models"
        for name, line, _ in _imports(tree)
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "torch", PACKAGE}
        or name.startswith("torch.distributed")
    ]
    assert not offenders, "\n".join(offenders)


def test_no_package_imports_a_recipe() -> None:
    offenders = [
        f"{_where(path, line)}: {name}"
        for path, tree in _parsed()
        for name, line, _ in _imports(tree)
        if name.partition(".")[0] == "recipes" or name.startswith(f"{PACKAGE}._recipes")
    ]
    assert not offenders, "\n".join(offenders)


def _is_private(part: str) -> bool:
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def _private_torch_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Private parts of imported torch paths, and of attribute chains that start at a torch name."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    bound.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            bound |= {alias.asname or alias.name for alias in node.names}
    for name, line, _ in _imports(tree):
        if name.partition(".")[0] == "torch" and any(map(_is_private, name.split("."))):
            yield name, line
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in bound and any(map(_is_private, parts[:1])):
            yield ".".join([inner.id, *reversed(parts)]), inner.lineno


def test_private_torch_names_stand_in_one_file_for_each_of_meshes_attention_and_plans() -> None:
    offenders = [
        f"{_where(path, line)}: {name}"
        for path, tree in _parsed()
        if path not in (TORCH_PRIVATE, MESH_TORCH_PRIVATE, PLANNER_TORCH_PRIVATE)
        for name, line in _private_torch_names(tree)
    ]
    assert not offenders, "\n".join(offenders)
    inside = {name for name, _ in _private_torch_names(ast.parse(TORCH_PRIVATE.read_text()))}
    assert any("_context_parallel" in name for name in inside), "the test sees nothing"


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("from torch._dynamo import config", ["torch._dynamo.config"]),
        ("from torch.distributed import _mesh", ["torch.distributed._mesh"]),
        ("import torch\ntorch._foreach_add(a, b)", ["torch._foreach_add"]),
        ("from torch import nn\nnn.Module._call_impl", ["nn.Module._call_impl"]),
        ("import torch\ntorch.__version__", []),
        ("def f():\n    import torch._C", ["torch._C"]),
    ],
)
def test_the_search_sees_private_names(code: str, seen: list[str]) -> None:
    assert [name for name, _ in _private_torch_names(ast.parse(code))] == seen
