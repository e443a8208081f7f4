"""Runs functions in separate processes, a few at a time."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from torchtune_cp.errors import UserError
from torchtune_cp.launch.process import usable_cores

#: Imported once by the process that all others are forked from.
_PRELOAD = ["torchtune_cp.planner.simulate"]


def _child(connection: Connection, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        connection.send(("result", function(**kwargs)))
    except UserError as error:
        connection.send(("user", error))
    except Exception as error:  # noqa: BLE001  (any error is passed to the parent)
        connection.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_apart(
    function: Callable[..., Any],
    tasks: Sequence[dict[str, Any]],
    at_once: int | None = None,
    *,
    keep_refusals: bool = False,
) -> list[Any]:
    """Call a function once for each task, each in a fresh process.

    A process that simulates a rank leaves a process group, caches and replaced functions: nothing of
    it is used again.

    Args:
        function: A module-level function.
        tasks: Its keyword arguments, one dict a call.
        at_once: Processes side by side; None for as many as there are cores.
        keep_refusals: Return a call's UserError as its result rather than raise it.

    Returns:
        What each call returned.

    Raises:
        UserError: What a call raised of that kind.
        RuntimeError: Any other error of a call, with its traceback, or a process that died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    at_once = at_once or usable_cores()
    results: list[Any] = [None] * len(tasks)
    waiting = list(enumerate(tasks))
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, kwargs = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(theirs, function, kwargs))
                process.start()
                theirs.close()
                running[ours] = index, process
            for connection in wait(list(running)):
                index, process = running.pop(connection)
                results[index] = _received(connection, process)
                if isinstance(results[index], UserError) and not keep_refusals:
                    raise results[index]
    finally:
        for _, process in running.values():
            process.terminate()
    return results


def _received(connection: Any, process: Any) -> Any:
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a planning process ended with exit code {process.exitcode}"
            " (-9: often the system ran out of memory)"
        ) from None
    process.join()
    if kind == "error":
        raise RuntimeError(value)
    return value
