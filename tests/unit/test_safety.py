"""Nothing in the package unpickles a file or runs code that a file brings: the sources are walked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
FILES = sorted([*(CHECKOUT / "torchtune_cp").rglob("*.py"), *(CHECKOUT / "recipes").glob("*.py")])

#: Modules that run what they read, whole or by these names.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_NAMES = {
    # torch.distributed.checkpoint's default files hold pickles.
    *("FileSystemReader", "FileSystemWriter", "dcp_to_torch_save"),
    *("unsafe_load", "full_load", "UnsafeLoader", "FullLoader", "Unpickler"),
    *("load_state_dict_from_url",),
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def _problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in UNSAFE_MODULES:
                    yield node.lineno, f"import {name.name}"
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in UNSAFE_MODULES:
                yield node.lineno, f"from {node.module}"
            for name in node.names:
                if name.name in UNSAFE_NAMES:
                    yield node.lineno, name.name
        elif isinstance(node, ast.Attribute) and node.attr in UNSAFE_NAMES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            yield from _call_problems(node)


def _call_problems(node: ast.Call) -> Iterator[tuple[int, str]]:
    called = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and called in UNSAFE_CALLS:
        yield node.lineno, f"{called}()"
    if called in ("torch.load", "yaml.load"):
        only = given.get("weights_only")
        if not (isinstance(only, ast.Constant) and only.value is True):
            yield node.lineno, f"{called}() without weights_only=True"
    if called in ("os.system", "os.popen"):
        yield node.lineno, f"{called}()"
    for name in ("allow_pickle", "shell", "trust_remote_code"):
        value = given.get(name)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield node.lineno, f"{name}={ast.unparse(value)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CHECKOUT)))
def test_no_source_unpickles_or_runs_what_it_reads(path):
    assert list(_problems(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "dcp.FileSystemReader('x')",
        "from torch.distributed.checkpoint import FileSystemWriter",
        "numpy.load('x', allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval('1')",
        "subprocess.run('x', shell=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_walk_sees_what_it_looks_for(source):
    assert list(_problems(ast.parse(source)))


def test_what_is_safe_passes():
    source = "torch.load(p, weights_only=True)\nyaml.safe_load(t)\nmodel.eval()\nre.compile('x')"
    assert list(_problems(ast.parse(source))) == []
