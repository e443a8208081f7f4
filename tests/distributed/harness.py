"""Runs a function on several gloo ranks and brings back what each returned.

The ranks are fresh processes, but not fresh interpreters: they are forked from a server that has
imported what they need and done nothing else. Importing torch takes a rank longer than most tests.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: What the ranks' server imports before the first of them is forked.
PRELOADED = ("tests.distributed.preloaded",)

#: Seconds after which a hanging test ends; a healthy one takes a few.
TIME_LIMIT_S = 240


def _worker(
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()  # the server's, of the time when it was started
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    out = os.path.join(folder, f"rank{rank}")
    try:
        # A file store needs no port, so tests that run side by side cannot clash.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = fn(*args)
        torch.save(result, out + ".pt")
        if dist.is_initialized():  # a whole recipe closes the group itself
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - carried to the parent, whatever it is
        with open(out + ".error", "w") as f:
            f.write(traceback.format_exc())
        os._exit(1)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` new processes joined in a gloo group.

    Args:
        world_size: Number of processes.
        fn: A module-level function (it is pickled by name).
        args: Its arguments.

    Returns:
        What each rank returned, by rank.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        environment = dict(os.environ)
        processes = [
            context.Process(target=_worker, args=(rank, world_size, folder, environment, fn, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIME_LIMIT_S)
        hanging = [p for p in processes if p.is_alive()]
        for process in hanging:
            process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        if errors:
            raise AssertionError(
                f"{len(errors)} of {world_size} ranks failed; the first:\n{errors[0]}"
            )
        assert not hanging, f"{len(hanging)} of {world_size} ranks hung for {TIME_LIMIT_S} s"
        return [
            torch.load(os.path.join(folder, f"rank{rank}.pt"), weights_only=False)
            for rank in range(world_size)
        ]
