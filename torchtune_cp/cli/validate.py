"""``tune validate``: check a config without running anything."""

import argparse

from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.config.load import load
from torchtune_cp.config.locate import find_config
from torchtune_cp.config.schema import component_problems, to_typed
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


def _run(args: argparse.Namespace) -> None:
    cfg = to_typed(load(args.config, args.overrides))
    problems = component_problems(cfg)
    if problems:
        raise ConfigError(problems)
    print(f"Config is well-formed: {find_config(args.config)}")
