"""``parse``: what makes a recipe's main function a program.

It reads ``--config FILE_OR_NAME key=value ...`` from the command line, hands the config over, and
sees to it that a failing rank ends at once, leaves one clear line and, under ``tune run``, tells the
launcher the cause.
"""

import ctypes
import faulthandler
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from omegaconf import DictConfig

from torchtune_cp.config import allow
from torchtune_cp.config.load import load_argv
from torchtune_cp.config.locate import recipes_dir
from torchtune_cp.config.output_dir import hold_output, release_output
from torchtune_cp.config.run_folder import RunFolder, is_running
from torchtune_cp.config.schema import FullFinetuneConfig, component_problems, to_typed
from torchtune_cp.config.secrets import mask_text
from torchtune_cp.errors import EXIT_STOPPED, ConfigError, RunStopped, UserError

#: Set by ``tune run`` for its workers, to its process id: they leave the report to the launcher.
LAUNCHED_VARIABLE = "TUNE_LAUNCHED"
#: Set by the user (or by ``--log-level DEBUG``) to see tracebacks.
TRACEBACK_VARIABLE = "TUNE_TRACEBACK"

#: Exit codes of ``tune`` and of every recipe (with ``errors.EXIT_STOPPED``, and 128 + the number of a
#: signal that ended it at once).
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

_PR_SET_PDEATHSIG = 1
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

    The decorated function takes no arguments: it reads ``sys.argv``. The undecorated one stays
    reachable as ``main.__wrapped__``.

    Args:
        main: A function of one argument, the config.
        schema: The recipe's config class: the function then gets a checked, typed config. Without
            it the function gets the raw ``DictConfig``, as a user's own recipe may prefer.

    Example::

        @config.parse(schema=FullFinetuneConfig)
        def main(cfg: FullFinetuneConfig) -> None: ...

        if __name__ == "__main__":
            main()
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

    # The program's own signature is empty, whatever wraps copied.
    del program.__dict__["__wrapped__"]
    program.__dict__["__wrapped__"] = main
    program.__annotations__ = {"return": None}
    return program


def _run(main: Callable[[Any], Any], schema: type[FullFinetuneConfig] | None) -> None:
    faulthandler.enable(all_threads=True)
    if os.environ.get(LAUNCHED_VARIABLE):
        _die_with_the_launcher()
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
            hold_output(loaded, _launcher(), restarted=restarted)
        result = main(cfg)
    except KeyboardInterrupt:
        _exit_now(EXIT_INTERRUPTED)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 0:
            release_output()
            return
        _exit_now(code)
    except RunStopped as stopped:
        _leave(stopped)
    except BaseException as error:  # noqa: BLE001  (whatever ends a rank is reported, then ends it)
        summary = _summary(error, getattr(cfg, "collective_timeout_s", None))
        _record_for_launcher(
            error, kind=_kind(error), summary=summary, lost_peer=_lost_its_peer(error)
        )
        _report(error, summary, show_traceback)
        _exit_now(EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)
    if isinstance(result, int) and result != 0:
        _exit_now(result)
    release_output()


def wants_traceback() -> bool:
    """Say whether the environment asks for tracebacks."""
    return os.environ.get(TRACEBACK_VARIABLE, "0").lower() not in ("", "0", "false")


def _trust_folder_of(main: Callable[..., Any]) -> None:
    file = main.__globals__.get("__file__")
    if file is not None:
        trust_recipe_folder(Path(file))


def trust_recipe_folder(recipe: Path) -> None:
    """Let configs name the modules beside a user's own recipe; shipped recipes add nothing."""
    folder = recipe.resolve().parent
    if folder != recipes_dir().resolve():
        allow.trust_folder(folder)


def _launcher() -> int | None:
    """The process that started this one and may start it again: ``tune run``, or torch's agent."""
    launched_by = os.environ.get(LAUNCHED_VARIABLE)
    if launched_by:
        return int(launched_by)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _die_with_the_launcher() -> None:
    """Have the kernel kill this rank when the launcher is killed: a rank must not outlive it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not is_running(int(os.environ[LAUNCHED_VARIABLE])):  # it died before that
        _exit_now(EXIT_FAILED)


def _exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads, which may sit in a collective forever."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the reader is gone: nobody is left to see the rest
    os._exit(code)


def one_line(error: BaseException) -> str:
    """Say an error in one line, without secrets; a user's mistake keeps its own lines, one a problem."""
    text = mask_text(str(error).strip())
    if isinstance(error, UserError):
        return "\n".join(map(_clear, text.split("\n")))
    first = _clear(text.splitlines()[0]) if text else ""
    name = type(error).__name__
    return f"{name}: {first}" if first else name


def _clear(line: str) -> str:
    """A line that a terminal shows as it is, whatever a stranger's file put into it."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(shown) > _LONGEST_LINE:
        shown = f"{shown[: _LONGEST_LINE * 2 // 3]} ... {shown[-_LONGEST_LINE // 4 :]}"
    return shown


def _summary(error: BaseException, collective_timeout_s: float | None) -> str:
    if collective_timeout_s is not None and _timed_out(error):
        return (
            f"waited {collective_timeout_s:g} s for the other ranks, of which one hangs or needs longer"
            " (collective_timeout_s sets the time)"
        )
    return one_line(error)


def _kind(error: BaseException) -> str:
    """Return what a launcher has to know of an error, see :func:`_record_for_launcher`."""
    for kind, found in (
        ("config", isinstance(error, ConfigError)),
        ("user", isinstance(error, UserError)),
        ("timeout", _timed_out(error)),
    ):
        if found:
            return kind
    return "error"


def _report(error: BaseException, summary: str, show_traceback: bool) -> None:
    if show_traceback:
        print(mask_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if not os.environ.get(LAUNCHED_VARIABLE):
        _say(summary)


def _say(lines: str) -> None:
    rank = os.environ.get("RANK")
    where = f"rank {rank}: " if rank is not None else ""
    for line in lines.splitlines():
        print(f"error: {where}{line}", file=sys.stderr)


def _leave(stopped: RunStopped) -> NoReturn:
    """End the process after a signal, in order.

    To torch's elastic agent a complete save is a success: anything else it would answer by ending
    the other ranks before they have left, or by starting all of them again. What it was stands in the
    run's folder, and the launcher exits with ``EXIT_STOPPED``.
    """
    release_output()
    folder = RunFolder.from_environment()
    if folder is None:
        if os.environ.get("RANK", "0") == "0":
            _say(str(stopped))
        _exit_now(stopped.exit_code)
    if stopped.exit_code == EXIT_STOPPED:
        folder.note_stopped(str(stopped))
        folder.withdraw()
        _exit_now(0)
    _record_for_launcher(stopped, kind="signal", summary=str(stopped), exit_code=stopped.exit_code)
    _exit_now(stopped.exit_code)


def end_by_signal(number: signal.Signals, *, lost_peer: bool) -> NoReturn:
    """End the process at once, whatever its main thread does; callable from any thread.

    Args:
        number: The signal, which gives the exit code.
        lost_peer: Whether it only says that another rank has ended: not the cause of anything.
    """
    summary = f"stopped by {number.name}"
    code = 128 + number
    _record_for_launcher(None, kind="signal", summary=summary, lost_peer=lost_peer, exit_code=code)
    if not os.environ.get(LAUNCHED_VARIABLE):
        _say(summary)
    os._exit(code)


def _record_for_launcher(
    error: BaseException | None,
    *,
    kind: str,
    summary: str,
    lost_peer: bool = False,
    exit_code: int = EXIT_FAILED,
) -> None:
    """Write the error where torch's elastic agent looks for it (``TORCHELASTIC_ERROR_FILE``).

    The format is that of ``torch.distributed.elastic.multiprocessing.errors``. Its time stamp counts
    seconds, too coarse to tell the first failing rank from those that lost their peer to it, so a
    finer one goes with it.

    Args:
        error: What was raised, if anything.
        kind: ``config`` and ``user`` are the user's to mend; ``signal`` ended the rank; ``timeout`` means
            that another rank did not come; ``error`` is the rest.
        summary: One line for the user (one a problem with ``config``).
        lost_peer: Whether the rank failed only because another one did.
        exit_code: What ``tune run`` exits with when this is the first cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time_ns()
    record = {
        "message": {
            "message": mask_text(summary if error is None else f"{type(error).__name__}: {error}"),
            "extraInfo": {
                "py_callstack": mask_text("".join(traceback.format_exception(error)))
                if error
                else "",
                "timestamp": str(now // 10**9),
                "time_ns": now,
                "kind": kind,
                "summary": summary,
                "lost_peer": lost_peer,
                "exit_code": exit_code,
            },
        }
    }
    try:
        Path(path).write_text(json.dumps(record), encoding="utf-8")
    except OSError as problem:
        print(f"warning: cannot write {path}: {problem}", file=sys.stderr)


def _timed_out(error: BaseException) -> bool:
    """Say whether a collective waited longer than its process group allows, by the backends' words."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "Timed out waiting",  # gloo
            "Application timeout caused pair closure",  # gloo, where another wait was under way
            "Watchdog caught collective operation timeout",  # NCCL
        )
    )


def _lost_its_peer(error: BaseException) -> bool:
    """Say whether this rank failed only because another one did: not the first cause.

    Errors that pass on another rank's say so with an attribute ``from_another_rank``; those of a
    collective whose peer went away are known by the backends' words.
    """
    if getattr(error, "from_another_rank", False):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "remote process exited",
            "recvVector failed",
        )
    )
