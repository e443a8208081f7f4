"""Runs the recipe on a few processes and says what came of it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import multiprocessing as mp
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch._dynamo.utils import counters

from benchmarks.live_storage import LiveStorage
from torchtune_cp.config import to_typed
from torchtune_cp.errors import UserError
from torchtune_cp.training.memory.offloading import ActivationOffload

CHECKOUT = Path(__file__).resolve().parents[1]

#: Seconds after which a rank that waits for another one gives up.
PATIENCE = timedelta(seconds=300)


class StepPeak:
    """A "profiler" of the recipe that counts the bytes that are allocated in its steps.

    The recipe enters it after the parameters have been read, so parameters do not count; gathered
    copies, activations, gradients and optimizer state do. What offloading has moved to the host does not.
    """

    last: int | None = None

    def __enter__(self) -> StepPeak:
        # The recipe has built its own by now; nothing hands it out.
        found = [o for o in gc.get_objects() if type(o) is ActivationOffload]
        self._live = LiveStorage(lambda: sum(o.host_bytes for o in found)).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)
        StepPeak.last = self._live.peak

    def step(self) -> None:
        """Nothing to do between steps."""


def _load_recipe() -> Any:
    path = CHECKOUT / "recipes" / "full_finetune_distributed.py"
    spec = importlib.util.spec_from_file_location("full_finetune_distributed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Loaded with this module, so that a process forked from one that has it starts immediately.
RECIPE = _load_recipe()


def _run_rank(rank: int, world: int, folder: str, config: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ["TUNE_ALLOW_COMPONENTS"] = "benchmarks"
    torch.set_num_threads(1)
    outcome: dict[str, Any] = {"refused": None, "failed": None}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=PATIENCE,
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the progress display
            RECIPE.main.__wrapped__(to_typed(OmegaConf.create(config)))
    except UserError as error:
        outcome["refused"] = str(error)
    except Exception as error:  # noqa: BLE001 - a failing row must not end the others
        outcome["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    graphs = counters["stats"]["unique_graphs"]
    pipe.send(outcome | {"peak": StepPeak.last, "graphs": graphs})
    if outcome["refused"] is None and outcome["failed"] is None:
        return
    os._exit(1)  # what a failed collective has left behind may never end


def run_recipe(cfg: DictConfig, world: int) -> dict[str, Any]:
    """Run a config on fresh processes.

    Fresh ones, because a process that has run many recipes keeps the threads of all their process
    groups and what was compiled; forked from one that has imported everything, which takes seconds.

    Args:
        cfg: A whole config.
        world: Number of processes.

    Returns:
        `refused` (the recipe's message, of the first rank with one), `failed` (any other
        error), `peak` (the largest, in bytes, with `StepPeak`) and `graphs` (compiled ones).
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.recipe_ranks"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(rank, world, folder, OmegaConf.to_yaml(cfg), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers = [_answer(pipe) for pipe in pipes]
        for process in processes:
            process.join(30)
            process.kill()
    peaks = [a["peak"] for a in answers if a["peak"] is not None]
    return {
        "refused": next((a["refused"] for a in answers if a["refused"]), None),
        "failed": next((a["failed"] for a in answers if a["failed"]), None),
        "peak": max(peaks, default=None),
        "graphs": max(a["graphs"] for a in answers),
    }


def _answer(pipe: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = pipe.recv()
    except EOFError:
        return {"refused": None, "failed": "the process died", "peak": None, "graphs": 0}
    return answer
