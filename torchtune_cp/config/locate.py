"""Finds the shipped recipes and configs by path, without a registry.

In a checkout they are at the top (`recipes/`, `configs/`); in a wheel they are inside the
package (`_recipes`, `_configs`), because a top-level `recipes` module would clash with others.
"""

import os
from pathlib import Path

from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError

#: The recipes that torchtune has.
TORCHTUNE_RECIPES = (
    "dev/async_grpo_full_finetune_distributed",
    "dev/early_exit_finetune_distributed",
    "dev/generate_v2",
    "dev/generate_v2_distributed",
    "dev/grpo_full_finetune_distributed",
    "dev/lora_finetune_distributed_multi_dataset",
    "eleuther_eval",
    "full_dpo_distributed",
    "full_finetune_distributed",
    "full_finetune_single_device",
    "generate",
    "knowledge_distillation_distributed",
    "knowledge_distillation_single_device",
    "lora_dpo_distributed",
    "lora_dpo_single_device",
    "lora_finetune_distributed",
    "lora_finetune_single_device",
    "ppo_full_finetune_single_device",
    "qat_distributed",
    "qat_lora_finetune_distributed",
    "qat_single_device",
    "quantize",
)

_PACKAGE = Path(__file__).resolve().parent.parent
_YAML_SUFFIXES = (".yaml", ".yml")


def _shipped_dir(name: str) -> Path:
    packaged = _PACKAGE / f"_{name}"
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def recipes_dir() -> Path:
    """Return the folder of the shipped recipes (`NAME.py`)."""
    return _shipped_dir("recipes")


def configs_dir() -> Path:
    """Return the folder of the shipped configs (`FAMILY/NAME.yaml`)."""
    return _shipped_dir("configs")


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(p.stem for p in recipes_dir().glob("*.py") if not p.stem.startswith("_"))


def config_names() -> list[str]:
    """Return the names of the shipped configs (`llama3/8B_full`), sorted."""
    root = configs_dir()
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))


def shipped_config(name: str) -> Path | None:
    """Return the path of the shipped config called `name`, or None."""
    return configs_dir() / f"{name}.yaml" if name in config_names() else None


def shipped_recipe(name: str) -> Path | None:
    """Return the path of the shipped recipe called `name`, or None."""
    return recipes_dir() / f"{name}.py" if name in recipe_names() else None


def _first_file(path: Path, suffix: str) -> Path | None:
    """Return `path`, or `path` with the suffix added, whichever is a file."""
    candidates = [path, path.with_name(path.name + suffix)] if path.name else [path]
    return next((c.resolve() for c in candidates if c.is_file()), None)


def find_config(name: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a config given as a file path or as a shipped name.

    A file wins over a shipped config of the same name (`.yaml` may be left out for both), and
    relative paths are taken from the current directory.

    Raises:
        ConfigError: Neither a file nor a shipped config has this name.
    """
    path, text = expand_home(name), os.fspath(name)
    found = _first_file(path, ".yaml")
    if found is not None:
        return found
    shipped = shipped_config(text)
    if shipped is not None:
        return shipped
    if path.suffix in _YAML_SUFFIXES:
        raise ConfigError(f"config file {text!r} does not exist (looked in {Path.cwd()})")
    raise ConfigError(
        f"no config file or shipped config is called {text!r}{did_you_mean(text, config_names())}"
        " (tune ls lists the shipped ones)"
    )


def find_recipe(name: str) -> Path:
    """Return the absolute path of a recipe given as a shipped name or as a path to a Python file.

    Raises:
        ConfigError: Neither a shipped recipe nor a file has this name.
    """
    shipped = shipped_recipe(name)
    if shipped is not None:
        return shipped
    path = expand_home(name)
    found = _first_file(path, ".py")
    if found is not None:
        return found
    if name in TORCHTUNE_RECIPES:
        raise ConfigError(
            f"torchtune's recipe {name} is not supported; available: {', '.join(recipe_names())}"
        )
    if path.suffix == ".py":
        raise ConfigError(f"recipe file {name!r} does not exist (looked in {Path.cwd()})")
    raise ConfigError(
        f"no recipe or Python file is called {name!r}{did_you_mean(name, recipe_names())}"
        f" (shipped recipes: {', '.join(recipe_names()) or 'none'})"
    )
