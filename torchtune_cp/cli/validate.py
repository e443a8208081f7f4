"""`tune validate`: check a config without running anything."""

import argparse
import sys

from torchtune_cp.cli.before_start import look_over
from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.cli.recipe import Recipe
from torchtune_cp.config.load import load
from torchtune_cp.config.locate import find_config, find_recipe, shipped_recipe
from torchtune_cp.config.schema import FullFinetuneConfig
from torchtune_cp.config.torchtune_recipes import LAUNCH_COMMAND
from torchtune_cp.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune validate CONFIG [--recipe RECIPE] [key=value ...]`."""
    parser = subparsers.add_parser(
        "validate",
        help="check a config: keys, types, combinations, components and their arguments",
    )
    parser.add_argument("config", help="a YAML file, or a shipped config")
    parser.add_argument(
        "--recipe",
        help="the recipe that it is for: a shipped one, or a path to your own (default: the shipped"
        " one that the launch command in its comments names, else full_finetune_distributed)",
    )
    parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, help="key=value or ~key, as for tune run"
    )
    parser.set_defaults(run=_run)


def schema_of(config: str) -> type[FullFinetuneConfig]:
    """The config class of the shipped recipe that a config names in the launch command on its top.

    Args:
        config: A YAML file, or the name of a shipped config.
    """
    text = find_config(config).read_text(encoding="utf-8")
    for name, _ in LAUNCH_COMMAND.findall(text):
        path = shipped_recipe(name)
        found = Recipe(path).config_class() if path is not None else None
        if found is not None:
            return found
    return FullFinetuneConfig


def _recipe_option(args: argparse.Namespace) -> str | None:
    """Take `--recipe` from behind the config, where argparse leaves it among the overrides."""
    for position, word in enumerate(args.overrides):
        if word == "--recipe" and position + 1 < len(args.overrides):
            recipe: str = args.overrides[position + 1]
            del args.overrides[position : position + 2]
            return recipe
        if word.startswith("--recipe="):
            del args.overrides[position]
            return str(word.partition("=")[2])
    return args.recipe


def _run(args: argparse.Namespace) -> None:
    name = _recipe_option(args)
    path = find_config(args.config)
    cfg = load(args.config, args.overrides)
    if name is None:
        config_class: type[FullFinetuneConfig] | None = schema_of(args.config)
    else:
        recipe = Recipe(find_recipe(name))
        recipe.trust()
        config_class = recipe.config_class()
    found = look_over(cfg, config_class, text=path.read_text(encoding="utf-8"))
    if found.problems:
        raise ConfigError(found.problems)
    for line in found.notes:
        print(f"warning: {line}", file=sys.stderr)
    for line in found.not_here:
        print(f"note: not on this machine, so not checked: {line}", file=sys.stderr)
    checked = "Config is well-formed" if config_class else "Components are well-formed"
    print(f"{checked}: {path}")
