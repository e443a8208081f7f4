"""``tune validate``: check a config without running anything."""

import argparse

from torchtune_cp.cli.ls import LAUNCH_COMMAND
from torchtune_cp.cli.model_check import build_on_meta
from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.config.load import load
from torchtune_cp.config.locate import find_config
from torchtune_cp.config.schema import (
    FullFinetuneConfig,
    MaskedLMConfig,
    component_problems,
    to_typed,
)
from torchtune_cp.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Add ``tune validate CONFIG [key=value ...]``."""
    parser = subparsers.add_parser(
        "validate",
        help="check a config: keys, types, combinations, components and their arguments",
    )
    parser.add_argument("config", help="a YAML file, or a shipped config")
    parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, help="key=value or ~key, as for tune run"
    )
    parser.set_defaults(run=_run)


#: The shipped recipes' config classes.
_SCHEMAS = {
    "full_finetune_distributed": FullFinetuneConfig,
    "esm2_mlm_distributed": MaskedLMConfig,
}


def schema_of(config: str) -> type[FullFinetuneConfig]:
    """The config class of the recipe that a config names in the launch command on its top.

    Args:
        config: A YAML file, or the name of a shipped config.
    """
    text = find_config(config).read_text(encoding="utf-8")
    for recipe, _ in LAUNCH_COMMAND.findall(text):
        if recipe in _SCHEMAS:
            return _SCHEMAS[recipe]
    return FullFinetuneConfig


def _run(args: argparse.Namespace) -> None:
    cfg = to_typed(load(args.config, args.overrides), schema_of(args.config))
    problems = component_problems(cfg)
    if problems:
        raise ConfigError(problems)
    build_on_meta(cfg)
    print(f"Config is well-formed: {find_config(args.config)}")
