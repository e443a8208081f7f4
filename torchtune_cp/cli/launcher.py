"""Start a program on every process of this node through torch's elastic agent, and end it well.

The agent starts the processes, ends all of them when one fails or when a signal arrives, and
collects what each recorded. Here its noise is kept down and the first cause is picked out.
"""

import argparse
import contextlib
import logging
import os
import signal
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torchtune_cp.config import allow
from torchtune_cp.config.entry_point import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    LAUNCHED_VARIABLE,
    TRACEBACK_VARIABLE,
    wants_traceback,
)
from torchtune_cp.errors import ConfigError

_ELASTIC_LOGGERS = (
    "torch.distributed.elastic",
    "torch.distributed.run",
    "torch.distributed.launcher",
)


class RunFailed(Exception):
    """A run that was started and did not finish; the message is its first cause.

    Attributes:
        exit_code: What the command exits with.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        """Keep the message and the exit code."""
        super().__init__(message)
        self.exit_code = exit_code


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


def launch(args: argparse.Namespace) -> None:
    """Run ``args.training_script`` as torchrun would.

    One node without a rendezvous of its own gets a free port on the loopback interface, so that any
    number of runs stand side by side.

    Args:
        args: The options of torchrun's parser.

    Raises:
        RunFailed: A process failed, or a signal ended the run.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as torchrun

    _use_a_free_port(args)
    with _worker_environment(args), _quiet_agent():
        try:
            torchrun(args)
        except ChildFailedError as failed:
            raise _first_cause(failed.failures) from None
        except SignalException as stopped:
            raise RunFailed(
                f"stopped by {signal.Signals(stopped.sigval).name}", 128 + stopped.sigval
            ) from None
        except (RuntimeError, ValueError, OSError, TimeoutError) as error:
            if wants_traceback():
                raise
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise RunFailed(
                f"the processes could not be started: {type(error).__name__}: {first_line}"
            ) from None


def _use_a_free_port(args: argparse.Namespace) -> None:
    from torch.distributed.run import parse_min_max_nnodes

    one_node = parse_min_max_nnodes(args.nnodes)[1] == 1
    own_rendezvous = args.rdzv_backend != "static" or args.rdzv_endpoint or args.master_port
    if args.standalone or (one_node and not own_rendezvous):
        args.standalone = False
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
        if args.local_addr is None:
            # The host's own name need not resolve (containers, laptops off the network).
            args.local_addr = "localhost"


@contextlib.contextmanager
def _worker_environment(args: argparse.Namespace) -> Iterator[None]:
    """Set what the workers inherit, for the time of the run."""
    from torch.distributed.run import determine_local_world_size

    wanted = {LAUNCHED_VARIABLE: "1"}
    processes = determine_local_world_size(args.nproc_per_node)
    if "OMP_NUM_THREADS" not in os.environ and processes > 1:
        wanted["OMP_NUM_THREADS"] = str(max(1, _usable_cores() // processes))
    if allow.user_prefixes():
        # They may lie in the current folder: as in the launcher, see cli.main.
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


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def _first_cause(failures: Mapping[int, Any]) -> RunFailed:
    """Pick the failure that came first, and say it in the user's words.

    Ranks that only lost their peer, and ranks that the agent ended, come last. Among the others the
    earliest record wins; a rank that left no record (killed, or a program of the user's own) counts
    after those that did.
    """

    def order(item: tuple[int, Any]) -> tuple[bool, bool, int]:
        _, failure = item
        info = _recorded(failure)
        ended_by_agent = failure.exitcode == -signal.SIGTERM
        return (
            ended_by_agent or bool(info.get("lost_peer")),
            not info,
            int(info.get("time_ns", failure.timestamp * 10**9)),
        )

    rank, failure = min(failures.items(), key=order)
    info = _recorded(failure)
    if not info:
        return RunFailed(_without_record(rank, failure))
    kind, summary = info.get("kind"), str(info.get("summary") or failure.message)
    if kind == "config":
        return RunFailed(summary.replace("\n", "\nerror: "), EXIT_BAD_CONFIG)
    if kind == "user":
        return RunFailed(summary.replace("\n", "\nerror: "))
    hint = "" if wants_traceback() else f" ({TRACEBACK_VARIABLE}=1 shows the traceback)"
    return RunFailed(f"rank {rank}: {summary}{hint}")


def _recorded(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    info = message.get("extraInfo") if isinstance(message, dict) else None
    if not isinstance(info, dict):
        return {}
    return {"summary": str(message["message"]).splitlines()[0], **info}


def _without_record(rank: int, failure: Any) -> str:
    if failure.exitcode >= 0:
        return f"rank {rank} failed with exit code {failure.exitcode}"
    name = signal.Signals(-failure.exitcode).name
    hint = " (often the system ran out of memory)" if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{hint}"
