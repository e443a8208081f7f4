"""`tune cp`: copy a shipped recipe or config to change it."""

import argparse
import shutil
from pathlib import Path

from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.config.locate import config_names, recipe_names, shipped_config, shipped_recipe
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import ConfigError

_EXAMPLES = """\
examples:
  tune cp llama3/8B_full my_config.yaml
  tune cp full_finetune_distributed recipes/mine.py --make-parents
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune cp NAME DESTINATION`."""
    parser = subparsers.add_parser("cp", help="copy a shipped recipe or config", epilog=_EXAMPLES)
    parser.add_argument("file", help="a shipped recipe or config (see tune ls)")
    parser.add_argument("destination", type=Path, help="a file, or a folder that exists")
    parser.add_argument(
        "-n", "--no-clobber", action="store_true", help="do not overwrite an existing file"
    )
    parser.add_argument(
        "--make-parents", action="store_true", help="create the destination's missing folders"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    source = shipped_recipe(args.file) or shipped_config(args.file)
    if source is None:
        hint = did_you_mean(args.file, [*recipe_names(), *config_names()])
        raise ConfigError(
            f"no shipped recipe or config is called {args.file!r}{hint} (see tune ls)"
        )
    destination: Path = expand_home(args.destination)
    if destination.is_dir():
        destination = destination / source.name
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if destination.exists() and args.no_clobber:
        print(f"File already exists at {destination.absolute()}, not overwriting.")
        return
    if args.make_parents:
        destination.parent.mkdir(parents=True, exist_ok=True)
    if not destination.parent.is_dir():
        raise ConfigError(
            f"cannot write {destination}: the folder {destination.parent} does not exist"
            " (--make-parents creates it)"
        )
    try:
        shutil.copyfile(source, destination)
    except OSError as error:
        raise ConfigError(f"cannot write {destination}: {error.strerror}") from None
    print(f"Copied file to {destination}")
