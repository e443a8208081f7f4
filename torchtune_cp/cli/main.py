"""`tune`: find the subcommand, run it, and turn user errors into one line and an exit code.

Exit codes: 0 for success, 2 for a command or config that is refused before
anything runs, 1 for a run (or download) that failed.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from torchtune_cp import __version__
from torchtune_cp.cli import cat, cp, download, ls, plan, run, validate
from torchtune_cp.cli.parser import OneLineParser
from torchtune_cp.config import allow
from torchtune_cp.config.entry_point import one_line
from torchtune_cp.config.secrets import mask_text
from torchtune_cp.errors import ConfigError
from torchtune_cp.launch.process import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    wants_traceback,
)

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="tune", description="Fine-tune language models on sequences too long for one device."
    )
    parser.add_argument("--version", action="version", version=f"torchtune_cp {__version__}")
    parser.add_argument(
        "--log-level",
        "--log_level",
        type=str.upper,
        choices=_LEVELS,
        help="DEBUG shows the traceback of an error",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND")
    parser.set_defaults(run=lambda _: parser.print_help())
    for command in (download, ls, cp, cat, run, validate, plan):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tune`.

    Args:
        argv: The arguments, `sys.argv[1:]` when None.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = wants_traceback()
    if allow.user_prefixes():
        # Packages that the user allows by name may be in the current folder, as with python -m.
        sys.path.append(os.getcwd())
    try:
        args, rest = _parser().parse_known_args(arguments)
        debug = debug or args.log_level == "DEBUG"
        if hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
            args.overrides += rest  # argparse takes one group of positional arguments only
            rest = []
        if args.run is run.run_command:
            # torchrun's options may appear anywhere before the recipe: torchrun's parser reads them.
            position = arguments.index("run")
            run.run_command(arguments[position + 1 :], log_level=args.log_level)
        elif rest:
            raise ConfigError(f"tune: unrecognised arguments {' '.join(rest)} (see tune --help)")
        else:
            args.run(args)
    except BrokenPipeError:
        # tune cat NAME | head: the reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except run.RunFailed as failure:
        print(f"error: {mask_text(str(failure))}", file=sys.stderr)
        return failure.exit_code
    except Exception as error:  # noqa: BLE001  (the last place where an error can become one line)
        if debug:
            print(mask_text(traceback.format_exc()), end="", file=sys.stderr)
        for line in one_line(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return 0
