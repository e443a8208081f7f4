"""Which components a config may name, and under which key.

A config file may be as untrusted as a model, so naming a callable must not be a way to run
anything. Each key takes a closed list: this project's builders, which a package lists under the key in its
`COMPONENTS`, and the optimizers and schedules of torch, torchao and transformers. A name is compared with
that list, never looked up in a module, so it gives access to nothing else. A user widens the list with
`TUNE_ALLOW_COMPONENTS=pkg1,pkg2`, or by running their own recipe, whose folder's modules are then
allowed, under every key.
"""

import fnmatch
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from torchtune_cp.did_you_mean import did_you_mean

ALLOW_VARIABLE = "TUNE_ALLOW_COMPONENTS"

_OWN_PACKAGE = "torchtune_cp"
_COMPONENT_KEY = re.compile(r"(\w+?)(?:\.\d+|\[\d+\])?(?:\._component_)?")
#: How many names a refusal lists.
_SHOWN = 12


def _is_optimizer(found: Any) -> bool:
    from torch.optim import Optimizer

    return inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer


def _is_schedule_class(found: Any) -> bool:
    from torch.optim.lr_scheduler import LRScheduler

    return inspect.isclass(found) and issubclass(found, LRScheduler) and found is not LRScheduler


def _is_schedule_function(found: Any) -> bool:
    if not inspect.isfunction(found) or not fnmatch.fnmatch(found.__name__, "get_*_schedule*"):
        return False
    # Those that take anything pass it on to schedules that are stepped with a loss.
    kinds = [parameter.kind for parameter in inspect.signature(found).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD not in kinds


@dataclass(frozen=True)
class _Source:
    """A module that has components of one role.

    Attributes:
        module: Its name. One of this project lists them in `COMPONENTS`, by role and relative to itself.
        fits: For another library: distinguishes its components from the module's other contents.
        without: Of those, names whose arguments are functions, classes or objects, which a config lacks.
        also: Another module under which users know the same names.
    """

    module: str
    fits: Callable[[Any], bool] | None = None
    without: tuple[str, ...] = ()
    also: str | None = None

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def components(self, role: str) -> Iterator[tuple[str, Any]]:
        """The dotted paths that users see, and what they name; imports the module."""
        module = importlib.import_module(self.module)
        if self.fits is not None:
            for name, found in sorted(vars(module).items()):
                if not name.startswith("_") and name not in self.without and self.fits(found):
                    yield f"{self.module}.{name}", found
            return
        for name in module.COMPONENTS[role]:
            inner, _, last = f"{self.module}.{name}".rpartition(".")
            yield f"{inner}.{last}", getattr(importlib.import_module(inner), last)

    def find(self, path: str, role: str) -> Any:
        """What a path names, as users see it or where that was defined; None if nothing."""
        for listed, found in self.components(role):
            name = found.__name__
            if path in (listed, f"{self.also}.{name}", f"{found.__module__}.{name}"):
                return found
        return None


#: What each key takes. `dataset_val` takes what `dataset` does.
ROLES: dict[str, tuple[_Source, ...]] = {
    "model": (_Source("torchtune_cp.models"),),
    "tokenizer": (_Source("torchtune_cp.data"),),
    "checkpointer": (_Source("torchtune_cp.checkpointing"),),
    "dataset": (_Source("torchtune_cp.datasets"),),
    "collate_fn": (_Source("torchtune_cp.data"),),
    "masking": (_Source("torchtune_cp.data"),),
    "optimizer": (
        _Source("torch.optim", _is_optimizer),
        _Source("torchao.optim", _is_optimizer, without=("CPUOffloadOptimizer",)),
        _Source(
            "transformers.optimization",
            _is_optimizer,
            without=("LayerWiseDummyOptimizer",),
            also="transformers",
        ),
    ),
    "lr_scheduler": (
        _Source("torchtune_cp.training"),
        _Source(
            "torch.optim.lr_scheduler",
            _is_schedule_class,
            without=("ChainedScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR"),
        ),
        _Source("transformers.optimization", _is_schedule_function, also="transformers"),
    ),
    "loss": (_Source("torchtune_cp.training"),),
    "tensor_parallel_plan": (_Source("torchtune_cp.distributed"),),
    "metric_logger": (_Source("torchtune_cp.metrics"),),
    "profiler": (_Source("torchtune_cp.training"),),
}


def role_of(key: str) -> str | None:
    """Return the role of a config key; an item of `dataset`, `dataset.0` or `dataset[0]`, has its role.

    None for a key of a user's own recipe, which accepts any component.
    """
    found = _COMPONENT_KEY.fullmatch(key)
    name = "dataset" if found and found[1] == "dataset_val" else found and found[1]
    return name if name in ROLES else None


def find(path: str, role: str | None) -> Callable[..., Any] | None:
    """Return the component that a dotted path names; None where it is none of that role.

    Only the package that the path begins with is imported, and only where it has such components.

    Args:
        path: A dotted path.
        role: A key of `ROLES`; None for any.

    Raises:
        ModuleNotFoundError: That package is not installed.
    """
    package = path.partition(".")[0]
    for name in [role] if role else ROLES:
        for source in ROLES[name]:
            if source.package == package and (found := source.find(path, name)) is not None:
                return found
    return None


def described(path: str, role: str | None) -> str:
    """List what is allowed instead of a path, the nearest name first."""
    names = []
    imported = (_OWN_PACKAGE, "torch", path.partition(".")[0])
    for name in [role] if role else ROLES:
        for source in ROLES[name]:
            if source.package in imported:
                names += [listed for listed, _ in source.components(name)]
            else:  # no package is imported for a message
                names.append(f"{source.module}.*")
    names.sort(key=lambda name: -SequenceMatcher(None, path, name).ratio())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    allowed = ", ".join(names[:_SHOWN])
    return f"{did_you_mean(path, names)} ({role or 'a config'} takes {allowed}{more})"


def trust_advice(path: str) -> str:
    """Say how a user allows more than is listed; nothing for this project, which lists all it has."""
    if path.startswith(f"{_OWN_PACKAGE}."):
        return ""
    module = path.rpartition(".")[0]
    return f"; {ALLOW_VARIABLE}={module} in the environment allows a module that you trust"


_trusted_folders: list[Path] = []


def trust_folder(folder: Path) -> None:
    """Allow the modules directly in `folder`: the one of the user recipe."""
    folder = folder.resolve()
    if folder not in _trusted_folders:
        _trusted_folders.append(folder)


def user_prefixes() -> tuple[str, ...]:
    """Return the prefixes that the user allows through the environment."""
    listed = os.environ.get(ALLOW_VARIABLE, "").split(",")
    return tuple(prefix.strip().rstrip(".") for prefix in listed if prefix.strip().rstrip("."))


def allowed_by_user(path: str) -> bool:
    """Say whether the user's own prefixes or recipe folder cover a dotted path."""
    prefixes = user_prefixes()
    return any(
        path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes
    ) or _in_trusted_folder(path)


def may_call(found: Any) -> bool:
    """Say whether a config may call what it found in a module that the user allows.

    It must have been defined in such a module, or be a component that the module only imports.
    """
    home = getattr(found, "__module__", None) or ""
    if allowed_by_user(home):
        return True
    return find(f"{home}.{getattr(found, '__qualname__', '')}", None) is found


def _in_trusted_folder(path: str) -> bool:
    top = path.partition(".")[0]
    # A recipe at the top of a checkout has this project next to it.
    if not _trusted_folders or not top.isidentifier() or top == _OWN_PACKAGE:
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


def source_problem(source: object) -> str | None:
    """Say why a data set's `source` is refused: it would bring code along. None if it would not."""
    if str(source).lower().endswith(".py"):
        return f"{source!r} is a script, and dataset scripts are not executed"
    if "://" in str(source):
        return f"{source!r} is a URL; give it as data_files, with the files' format as source"
    return None
