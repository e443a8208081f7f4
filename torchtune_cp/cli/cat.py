"""`tune cat`: print a config."""

import argparse

from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.config.locate import find_config, shipped_config, shipped_recipe
from torchtune_cp.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune cat CONFIG`."""
    parser = subparsers.add_parser("cat", help="print a config")
    parser.add_argument("config", help="a shipped config (see tune ls) or a YAML file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if shipped_config(args.config) is None and shipped_recipe(args.config) is not None:
        raise ConfigError(f"{args.config!r} is a recipe, not a config: tune ls lists its configs")
    print(find_config(args.config).read_text(encoding="utf-8"), end="")
