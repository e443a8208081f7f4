"""`tune ls`: the shipped recipes and their configs."""

import argparse

from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.config.locate import config_names, configs_dir, recipe_names
from torchtune_cp.config.torchtune_recipes import LAUNCH_COMMAND


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune ls`."""
    parser = subparsers.add_parser("ls", help="list the shipped recipes and configs")
    parser.set_defaults(run=_run)


def recipe_of(config_name: str) -> str | None:
    """Return the recipe that a shipped config is for: the one in the launch command on its top."""
    text = (configs_dir() / f"{config_name}.yaml").read_text(encoding="utf-8")
    for recipe, config in LAUNCH_COMMAND.findall(text):
        if config == config_name:
            return str(recipe)
    return None


def _run(args: argparse.Namespace) -> None:
    configs = {name: recipe_of(name) for name in config_names()}
    rows = []
    for recipe in recipe_names():
        names = [name for name, its_recipe in configs.items() if its_recipe == recipe]
        rows += [("" if i else recipe, name) for i, name in enumerate(names)] or [(recipe, "<>")]
    rows += [("<>", name) for name, recipe in configs.items() if recipe not in recipe_names()]
    width = max(len("RECIPE"), *(len(recipe) for recipe, _ in rows), 38) + 2 if rows else 40
    print(f"{'RECIPE':<{width}}CONFIG")
    for recipe, name in rows:
        print(f"{recipe:<{width}}{name}")
