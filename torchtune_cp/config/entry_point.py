"""`parse`: turns a recipe's main function into a program.

It reads `--config FILE_OR_NAME key=value ...` from the command line, passes the config to the recipe, and
makes sure that a failing rank exits immediately, prints one line and, under `tune run`, reports the cause
to the launcher.
"""

import faulthandler
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from omegaconf import DictConfig

from torchtune_cp.config import allow
from torchtune_cp.config.load import load_argv
from torchtune_cp.config.locate import recipes_dir
from torchtune_cp.config.output_dir import hold_output, release_output
from torchtune_cp.config.schema import FullFinetuneConfig, component_problems, to_typed
from torchtune_cp.config.secrets import mask_text
from torchtune_cp.errors import ConfigError, RunStopped, UserError
from torchtune_cp.launch.process import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    LAUNCHED_VARIABLE,
    die_with_the_launcher,
    exit_now,
    launched_by,
    leave,
    lost_its_peer,
    print_error,
    record_failure,
    timed_out,
    wants_traceback,
)

# A value that is given at length is not shown at length.
_LONGEST_LINE = 2400

ConfigT = TypeVar("ConfigT", bound=FullFinetuneConfig)


@overload
def parse(main: Callable[[DictConfig], Any], /) -> Callable[[], None]: ...


@overload
def parse(
    main: None = None, /, *, schema: type[ConfigT]
) -> Callable[[Callable[[ConfigT], Any]], Callable[[], None]]: ...


@overload
def parse(
    main: None = None, /, *, schema: None = None
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]: ...


def parse(main: Any = None, /, *, schema: Any = None) -> Any:
    """Decorate a recipe's main function.

    The decorated function takes no arguments: it reads `sys.argv`. The undecorated one is available as
    `main.__wrapped__`.

    Args:
        main: A function of one argument, the config.
        schema: The recipe's config class: the function then gets a checked, typed config. Without
            it the function gets the raw `DictConfig`, for recipes with keys of their own.

    Examples:
        ```python
        @config.parse(schema=FullFinetuneConfig)
        def main(cfg: FullFinetuneConfig) -> None: ...


        if __name__ == "__main__":
            main()
        ```
    """
    if main is None:
        return functools.partial(_decorate, schema=schema)
    return _decorate(main, schema=schema)


def _decorate(
    main: Callable[[Any], Any], *, schema: type[FullFinetuneConfig] | None
) -> Callable[[], None]:
    @functools.wraps(main)
    def program() -> None:
        _run(main, schema)

    # The program's own signature is empty, whatever `wraps` has copied.
    del program.__dict__["__wrapped__"]
    program.__dict__["__wrapped__"] = main
    program.__annotations__ = {"return": None}
    return program


def _run(main: Callable[[Any], Any], schema: type[FullFinetuneConfig] | None) -> None:
    faulthandler.enable(all_threads=True)
    if os.environ.get(LAUNCHED_VARIABLE):
        die_with_the_launcher()
    show_traceback = wants_traceback()
    cfg: Any = {}
    try:
        _trust_folder_of(main)
        cfg = loaded = load_argv(sys.argv[1:])
        show_traceback = show_traceback or str(cfg.get("log_level")).upper() == "DEBUG"
        if schema is not None:
            cfg = to_typed(cfg, schema, world_size=int(os.environ.get("WORLD_SIZE", "1")))
            if problems := component_problems(cfg):
                raise ConfigError(problems)
        if os.environ.get("RANK", "0") == "0":
            restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            hold_output(loaded, launched_by(), restarted=restarted)
        result = main(cfg)
    except KeyboardInterrupt:
        exit_now(EXIT_INTERRUPTED)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 0:
            release_output()
            return
        exit_now(code)
    except RunStopped as stopped:
        release_output()
        leave(stopped)
    except BaseException as error:  # noqa: BLE001  (any error is reported before the rank exits)
        summary = _summary(error, getattr(cfg, "collective_timeout_s", None))
        stack = mask_text("".join(traceback.format_exception(error)))
        record_failure(
            summary,
            kind=_kind(error),
            message=mask_text(f"{type(error).__name__}: {error}"),
            stack=stack,
            lost_peer=lost_its_peer(error),
        )
        if show_traceback:
            print(stack, end="", file=sys.stderr)
        if not os.environ.get(LAUNCHED_VARIABLE):
            print_error(summary)
        exit_now(EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)
    if isinstance(result, int) and result != 0:
        exit_now(result)
    release_output()


def _trust_folder_of(main: Callable[..., Any]) -> None:
    file = main.__globals__.get("__file__")
    if file is not None:
        trust_recipe_folder(Path(file))


def trust_recipe_folder(recipe: Path) -> None:
    """Let configs name the modules in the folder of a user's recipe; shipped recipes add nothing."""
    folder = recipe.resolve().parent
    if folder != recipes_dir().resolve():
        allow.trust_folder(folder)


def one_line(error: BaseException) -> str:
    """Say an error in one line, without secrets; a user's mistake keeps its own lines, one a problem."""
    text = mask_text(str(error).strip())
    if isinstance(error, UserError):
        return "\n".join(map(_clear, text.split("\n")))
    first = _clear(text.splitlines()[0]) if text else ""
    name = type(error).__name__
    return f"{name}: {first}" if first else name


def _clear(line: str) -> str:
    """Escape a line so that a terminal shows it literally, including text from untrusted files."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(shown) > _LONGEST_LINE:
        shown = f"{shown[: _LONGEST_LINE * 2 // 3]} ... {shown[-_LONGEST_LINE // 4 :]}"
    return shown


def _summary(error: BaseException, collective_timeout_s: float | None) -> str:
    if collective_timeout_s is not None and timed_out(error):
        return (
            f"waited {collective_timeout_s:g} s for the other ranks; one of them hangs or needs longer"
            " (collective_timeout_s sets the time)"
        )
    return one_line(error)


def _kind(error: BaseException) -> str:
    """Return what a launcher needs to know about an error, see `record_failure`."""
    for kind, found in (
        ("config", isinstance(error, ConfigError)),
        ("user", isinstance(error, UserError)),
        ("timeout", timed_out(error)),
    ):
        if found:
            return kind
    return "error"
