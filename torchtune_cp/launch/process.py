"""The process of a rank: how it ends, and what it records for the launcher."""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from torchtune_cp.errors import EXIT_STOPPED, RunStopped
from torchtune_cp.launch.run_folder import RunFolder, is_running

#: Set by `tune run` for its workers, to its process id: they leave the report to the launcher.
LAUNCHED_VARIABLE = "TUNE_LAUNCHED"
#: Set by the user (or by `--log-level DEBUG`) to see tracebacks.
TRACEBACK_VARIABLE = "TUNE_TRACEBACK"

#: Exit codes of `tune` and of every recipe (with `errors.EXIT_STOPPED`, and 128 + the number of a
#: signal that ended it immediately).
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

_PR_SET_PDEATHSIG = 1


def wants_traceback() -> bool:
    """Say whether the environment asks for tracebacks."""
    return os.environ.get(TRACEBACK_VARIABLE, "0").lower() not in ("", "0", "false")


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launched_by() -> int | None:
    """The process that started this one and may start it again: `tune run`, or torch's agent."""
    launcher = os.environ.get(LAUNCHED_VARIABLE)
    if launcher:
        return int(launcher)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def die_with_the_launcher() -> None:
    """Have the kernel kill this rank when the launcher is killed: a rank must not outlive it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not is_running(int(os.environ[LAUNCHED_VARIABLE])):  # it died before that
        exit_now(EXIT_FAILED)


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads, which may sit in a collective forever."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the reader has exited: no process reads the rest
    os._exit(code)


def print_error(lines: str) -> None:
    """Print an error for the user, with the rank in front of each line."""
    rank = os.environ.get("RANK")
    where = f"rank {rank}: " if rank is not None else ""
    for line in lines.splitlines():
        print(f"error: {where}{line}", file=sys.stderr)


def leave(stopped: RunStopped) -> NoReturn:
    """End the process after a signal, in order.

    To torch's elastic agent a complete save is a success: anything else it would answer by ending
    the other ranks before they have left, or by starting all of them again. What it was stands in the
    run's folder, and the launcher exits with `EXIT_STOPPED`.
    """
    folder = RunFolder.from_environment()
    if folder is None:
        if os.environ.get("RANK", "0") == "0":
            print_error(str(stopped))
        exit_now(stopped.exit_code)
    if stopped.exit_code == EXIT_STOPPED:
        folder.note_stopped(str(stopped))
        folder.withdraw()
        exit_now(0)
    record_failure(str(stopped), kind="signal", exit_code=stopped.exit_code)
    exit_now(stopped.exit_code)


def end_by_signal(number: signal.Signals, *, lost_peer: bool) -> NoReturn:
    """End the process immediately, even if its main thread is blocked; callable from any thread.

    Args:
        number: The signal, which gives the exit code.
        lost_peer: Whether the error only reports that another rank has ended, so it is not the cause.
    """
    summary = f"stopped by {number.name}"
    code = 128 + number
    record_failure(summary, kind="signal", lost_peer=lost_peer, exit_code=code)
    if not os.environ.get(LAUNCHED_VARIABLE):
        print_error(summary)
    os._exit(code)


def record_failure(
    summary: str,
    *,
    kind: str,
    message: str | None = None,
    stack: str = "",
    lost_peer: bool = False,
    exit_code: int = EXIT_FAILED,
) -> None:
    """Write the error where torch's elastic agent looks for it (`TORCHELASTIC_ERROR_FILE`).

    The format is that of `torch.distributed.elastic.multiprocessing.errors`. Its time stamp counts
    seconds, too coarse to distinguish the first failing rank from those that lost their peer to it, so a
    finer one goes with it.

    Args:
        summary: One line for the user (one a problem with `config`). No text may hold a secret.
        kind: `config` and `user` are the user's to mend; `signal` ended the rank; `timeout` means
            that another rank did not come; `error` is the rest.
        message: The error with its type; the summary without one.
        stack: Its traceback.
        lost_peer: Whether the rank failed only because another one did.
        exit_code: What `tune run` exits with when this is the first cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time_ns()
    record = {
        "message": {
            "message": message or summary,
            "extraInfo": {
                "py_callstack": stack,
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


def timed_out(error: BaseException) -> bool:
    """Say whether a collective waited longer than its process group allows, by the backends' words."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "Timed out waiting",  # gloo
            "Application timeout caused pair closure",  # gloo, where another wait was in progress
            "Watchdog caught collective operation timeout",  # NCCL
        )
    )


def lost_its_peer(error: BaseException) -> bool:
    """Say whether this rank failed only because another one did: not the first cause.

    Errors that forward another rank's error have an attribute `from_another_rank`; those of a
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
