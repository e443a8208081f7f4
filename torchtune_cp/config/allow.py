"""Which dotted paths a config may name as components.

A config file comes from strangers as easily as a model does, so naming a callable must not be a way
to run anything: paths are limited to the packages that hold components, the object found must have
been defined in one of them, and it must be a class, a function or a class method. A user widens
the list with ``TUNE_ALLOW_COMPONENTS=pkg1,pkg2``, or by running a recipe of their own, whose
folder's modules are then allowed.
"""

import importlib.util
import os
from pathlib import Path

ALLOW_VARIABLE = "TUNE_ALLOW_COMPONENTS"

# Of the big packages only the parts that hold components: torch.hub.load or
# transformers.dynamic_module_utils run downloaded code, torch.load unpickles.
_BUILT_IN = (
    "torchtune_cp.checkpointing",
    "torchtune_cp.data",
    "torchtune_cp.datasets",
    "torchtune_cp.distributed.tensor_parallel",
    "torchtune_cp.metrics",
    "torchtune_cp.models",
    "torchtune_cp.training",
    "torch.nn",
    "torch.optim",
    "torchao.float8",
    "torchao.optim",
    "torchao.prototype.low_bit_optim",
    "transformers.models",
    "transformers.optimization",
)

# The classes of transformers are reached through its top level but defined in transformers.models.
_REACHED_FROM = ("transformers",)

_trusted_folders: list[Path] = []


def trust_folder(folder: Path) -> None:
    """Allow the modules that lie directly in ``folder``: the one of the user's own recipe."""
    folder = folder.resolve()
    if folder not in _trusted_folders:
        _trusted_folders.append(folder)


def user_prefixes() -> tuple[str, ...]:
    """Return the prefixes that the user allows through the environment."""
    listed = os.environ.get(ALLOW_VARIABLE, "").split(",")
    return tuple(prefix.strip().rstrip(".") for prefix in listed if prefix.strip().rstrip("."))


def _under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def allowed_by_user(path: str) -> bool:
    """Say whether the user's own prefixes or recipe folder cover a dotted path."""
    return _under(path, user_prefixes()) or _in_trusted_folder(path)


def may_name(path: str) -> bool:
    """Say whether a config may name this dotted path at all (before anything is imported)."""
    return _under(path, _BUILT_IN + _REACHED_FROM) or allowed_by_user(path)


def may_define(module: str) -> bool:
    """Say whether an object that was defined in ``module`` may be called by a config."""
    return _under(module, _BUILT_IN) or allowed_by_user(module)


def describe() -> str:
    """Return the allowed prefixes for a message."""
    return ", ".join(f"{prefix}." for prefix in ("torchtune", *_BUILT_IN, *user_prefixes()))


def _in_trusted_folder(path: str) -> bool:
    top = path.partition(".")[0]
    if not _trusted_folders or not top.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    # Direct children only: a virtual environment inside the folder does not become trusted.
    origin = Path(spec.origin).resolve()
    return any(
        origin in (folder / f"{top}.py", folder / top / "__init__.py")
        for folder in _trusted_folders
    )
