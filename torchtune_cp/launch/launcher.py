"""Start a program on every process of this node through torch's elastic agent, and end it cleanly.

The agent starts the processes, ends (or restarts) all of them when one fails, and collects what each
recorded. This module reduces its output, selects the first cause, and passes signals to the ranks as a
request to save and exit.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune_cp.errors import EXIT_STOPPED, ConfigError
from torchtune_cp.launch.loopback import loopback_variables
from torchtune_cp.launch.process import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    LAUNCHED_VARIABLE,
    TRACEBACK_VARIABLE,
    usable_cores,
    wants_traceback,
)
from torchtune_cp.launch.run_folder import RUN_FOLDER_VARIABLE, STOP_SIGNALS, RunFolder
from torchtune_cp.launch.signal_relay import SignalRelay

_ELASTIC_LOGGERS = (
    "torch.distributed.elastic",
    "torch.distributed.run",
    "torch.distributed.launcher",
)


class RunFailed(Exception):
    """A run that was started and did not finish; the message is its first cause.

    Attributes:
        exit_code: What the command exits with.
        may_restart: Whether another attempt may do better.
    """

    def __init__(
        self, message: str, exit_code: int = EXIT_FAILED, *, may_restart: bool = True
    ) -> None:
        """Keep the message, the exit code and whether to try again."""
        super().__init__(message)
        self.exit_code = exit_code
        self.may_restart = may_restart


def world_size_of(args: argparse.Namespace) -> int | None:
    """Return how many processes torchrun's options ask for, None when nodes may join and leave.

    Raises:
        ConfigError: The numbers of nodes or processes cannot be read.
    """
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        fewest, most = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        raise ConfigError(f"--nnodes: expected N or MIN:MAX, got {args.nnodes!r}") from None
    try:
        local = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise ConfigError(f"--nproc_per_node: got {args.nproc_per_node!r}: {error}") from None
    if fewest < 1 or most < fewest or local < 1:
        raise ConfigError(
            f"--nnodes {args.nnodes} --nproc_per_node {args.nproc_per_node}: both are at least 1"
        )
    return fewest * local if fewest == most else None


@dataclass(frozen=True)
class RunSettings:
    """The parts of a run's config that the launcher needs; the defaults are those of the config.

    Attributes:
        stop_grace_s: How long the ranks may take to save and leave after a signal.
        collective_timeout_s: What a rank that waits longer than this names.
        with_current_folder: Whether the ranks import modules of the current folder, too.
        restart_point: Says from where a restart continues, as the end of a line for the user.
    """

    stop_grace_s: float = 300.0
    collective_timeout_s: float = 600.0
    restart_point: Callable[[], str] | None = None
    with_current_folder: bool = False


def launch(args: argparse.Namespace, settings: RunSettings | None = None) -> None:
    """Run `args.training_script` as torchrun would.

    Args:
        args: The options of torchrun's parser, those of the rendezvous settled.
        settings: Of the run's config.

    Raises:
        RunFailed: A process failed, or a signal ended the run.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run as torchrun

    from torchtune_cp.launch import rendezvous
    from torchtune_cp.launch.agent import AgentWatch, watched_agent

    settings = settings or RunSettings()
    rendezvous.register()
    folder = RunFolder.create()
    _choose_log_dir(args, folder)
    relay = SignalRelay(
        folder, settings.stop_grace_s, lambda number: SignalException(f"got {number}", number)
    )
    args.signals_to_handle = _left_to_the_agent(args.signals_to_handle)

    def may_restart(failures: Mapping[int, Any], restart: int) -> bool:
        cause = _first_cause(failures, settings)
        if not cause.may_restart or folder.asked() is not None:
            return False
        point = settings.restart_point() if settings.restart_point else ""
        print(f"restart {restart} of {args.max_restarts}: {cause}{point}", file=sys.stderr)
        return True

    @contextlib.contextmanager
    def stopping() -> Iterator[None]:
        folder.end()
        yield
        folder.forget_ranks()

    try:
        with (
            _worker_environment(args, folder, settings),
            _quiet_agent(),
            watched_agent(AgentWatch(relay.tick, may_restart, stopping)),
            relay.listening(),
        ):
            torchrun(args)
    except ChildFailedError as failed:
        raise _first_cause(failed.failures, settings) from None
    except SignalException as stopped:
        number = relay.ended_by or stopped.sigval
        late = (
            f": the ranks had not exited after stop_grace_s={settings.stop_grace_s:g} seconds"
            if relay.overdue
            else ""
        )
        raise RunFailed(f"stopped by {signal.Signals(number).name}{late}", 128 + number) from None
    except RendezvousError as error:
        if wants_traceback():
            raise
        raise RunFailed(str(error)) from None
    except (RuntimeError, ValueError, OSError, TimeoutError) as error:
        if wants_traceback():
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise RunFailed(
            f"the processes could not be started: {type(error).__name__}: {first_line}"
        ) from None
    finally:
        stopped_line = folder.stopped()
        folder.remove()
    if stopped_line is not None:
        raise RunFailed(stopped_line, EXIT_STOPPED)


def _left_to_the_agent(signals: str) -> str:
    """Take out of torchrun's `--signals-to-handle` those that `SignalRelay` handles."""
    ours = {number.name for number in STOP_SIGNALS}
    return ",".join(name for name in signals.split(",") if name.strip() not in ours)


def _choose_log_dir(args: argparse.Namespace, folder: RunFolder) -> None:
    """Give torch a temporary folder, unless the user requested files with the output of the ranks."""
    if args.log_dir or args.logs_specs:
        return
    asked = {
        "--redirects": args.redirects != "0",
        "--tee": args.tee != "0",
        "--duplicate-stdout-filters": getattr(args, "duplicate_stdout_filters", None),
        "--duplicate-stderr-filters": getattr(args, "duplicate_stderr_filters", None),
    }
    if any(asked.values()):
        args.log_dir = tempfile.mkdtemp(prefix="torchelastic_")  # as torchrun calls it
        names = ", ".join(option for option, is_asked in asked.items() if is_asked)
        print(f"note: the files of {names} are in {args.log_dir}", file=sys.stderr)
    else:
        # Torch's agent has the ranks write there why they failed, and would leave it.
        args.log_dir = str(folder.path / "ranks")


@contextlib.contextmanager
def _worker_environment(
    args: argparse.Namespace, folder: RunFolder, settings: RunSettings
) -> Iterator[None]:
    """Set what the workers inherit, for the time of the run."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    wanted = {LAUNCHED_VARIABLE: str(os.getpid()), RUN_FOLDER_VARIABLE: str(folder.path)}
    processes = determine_local_world_size(args.nproc_per_node)
    if "OMP_NUM_THREADS" not in os.environ and processes > 1:
        wanted["OMP_NUM_THREADS"] = str(max(1, usable_cores() // processes))
    if parse_min_max_nnodes(args.nnodes)[1] == 1:
        wanted |= loopback_variables()
    # Else torch's c10d rendezvous opens a store for the ranks in addition to the one of launch.rendezvous.
    wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if settings.with_current_folder:  # as in the launcher, see cli.main
        paths = [p for p in (os.environ.get("PYTHONPATH"), os.getcwd()) if p]
        wanted["PYTHONPATH"] = os.pathsep.join(paths)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's warnings and error tables (the workers' own output is theirs)."""
    if wants_traceback():
        yield
        return
    # Each of torch's modules sets its own logger's level, so that the parent's does not count.
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(_ELASTIC_LOGGERS)
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _first_cause(failures: Mapping[int, Any], settings: RunSettings | None = None) -> RunFailed:
    """Pick the failure that came first, and describe it for the user.

    Ranks that only lost their peer, and ranks that the agent ended, come last. Among the others the
    earliest record wins. A rank that left no record (killed, or a program of the user) counts
    after those that did; so does one whose collective timed out, as it waited for another one.
    """

    def order(item: tuple[int, Any]) -> tuple[bool, bool, int]:
        _, failure = item
        info = _recorded(failure)
        ended_by_agent = failure.exitcode == -signal.SIGTERM
        return (
            ended_by_agent or bool(info.get("lost_peer")),
            not info or info.get("kind") == "timeout",
            int(info.get("time_ns", failure.timestamp * 10**9)),
        )

    rank, failure = min(failures.items(), key=order)
    info = _recorded(failure)
    if not info:
        return _without_record(rank, failure, settings or RunSettings())
    kind, summary = info.get("kind"), str(info.get("summary") or failure.message)
    if kind == "config":
        return RunFailed(summary.replace("\n", "\nerror: "), EXIT_BAD_CONFIG, may_restart=False)
    if kind == "user":
        return RunFailed(summary.replace("\n", "\nerror: "))
    if kind == "signal":
        return RunFailed(summary, int(info["exit_code"]), may_restart=False)
    hint = "" if wants_traceback() else f" ({TRACEBACK_VARIABLE}=1 shows the traceback)"
    return RunFailed(f"rank {rank}: {summary}{hint}")


def _recorded(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    info = message.get("extraInfo") if isinstance(message, dict) else None
    if not isinstance(info, dict):
        return {}
    return {"summary": str(message["message"]).splitlines()[0], **info}


def _without_record(rank: int, failure: Any, settings: RunSettings) -> RunFailed:
    if failure.exitcode >= 0:
        return RunFailed(f"rank {rank} failed with exit code {failure.exitcode}")
    number = signal.Signals(-failure.exitcode)
    hint = ""
    if number == signal.SIGKILL:
        hint = " (often the system ran out of memory)"
    elif number == signal.SIGABRT:
        hint = (
            " (NCCL ends a rank like this if it waits longer than"
            f" collective_timeout_s={settings.collective_timeout_s:g} for the others)"
        )
    return RunFailed(
        f"rank {rank} was ended by {number.name}{hint}", may_restart=number not in STOP_SIGNALS
    )
