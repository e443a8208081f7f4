"""Runs the recipe on processes that stay up, one config after the other, and says what came of it."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch._dynamo.utils import counters

from benchmarks.common import Contender
from benchmarks.live_storage import LiveStorage

#: Seconds after which a rank that waits for another one gives up.
PATIENCE = timedelta(seconds=300)


class StepPeak:
    """A "profiler" of the recipe that counts the bytes that come to life in its steps.

    The recipe enters it after the parameters have been read, so parameters do not count; gathered
    copies, activations, gradients and optimizer state do. What offloading has moved to the host does not.
    """

    last: int | None = None

    def __enter__(self) -> StepPeak:
        from torchtune_cp.training.memory.offloading import ActivationOffload

        # The recipe has built its own by now; nothing hands it out.
        found = [o for o in gc.get_objects() if type(o) is ActivationOffload]
        self._live = LiveStorage(lambda: sum(o.host_bytes for o in found)).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)
        StepPeak.last = self._live.peak

    def step(self) -> None:
        """Nothing to do between steps."""


def build_runner(stores: str) -> Callable[[str], dict[str, Any]]:
    """Build what runs a config, given as YAML, on this rank (see :class:`Contender`).

    Each run has a process group of its own, as if freshly started. The runner returns ``refused`` (the
    recipe's own words), ``failed`` (any other error), ``peak`` (bytes, with :class:`StepPeak`) and
    ``graphs`` (compiled graphs).
    """
    from torchtune_cp.config import to_typed
    from torchtune_cp.errors import UserError

    os.environ["TUNE_ALLOW_COMPONENTS"] = "benchmarks"
    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
    import full_finetune_distributed as recipe

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    runs = 0

    def run(command: str) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        torch._dynamo.reset()
        counters.clear()
        StepPeak.last = None
        said: dict[str, Any] = {"refused": None, "failed": None}
        dist.init_process_group(
            "gloo",
            init_method=f"file://{stores}/run{runs}",
            rank=rank,
            world_size=world,
            timeout=PATIENCE,
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the progress display
                recipe.main.__wrapped__(to_typed(OmegaConf.create(command)))
        except UserError as error:
            said["refused"] = str(error)
        except Exception as error:  # noqa: BLE001 - a failing row must not end the others
            said["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return said | {"peak": StepPeak.last, "graphs": counters["stats"]["unique_graphs"]}

    return run


class RecipeRanks:
    """Processes that run configs one after the other.

    Args:
        world: Their number.
        folder: Empty; for their files.
    """

    def __init__(self, world: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._ranks = Contender(f"{world}", world, 1, build_runner, (str(folder),))
        self._ranks.start()
        self.world = world

    def run(self, cfg: DictConfig) -> dict[str, Any]:
        """Run a config on all ranks; the largest peak, and the first complaint of any rank."""
        _, answers = self._ranks.step(OmegaConf.to_yaml(cfg))
        said = {
            key: next((a[key] for a in answers if a[key]), None) for key in ("refused", "failed")
        }
        peaks = [a["peak"] for a in answers if a["peak"] is not None]
        graphs = max(a["graphs"] for a in answers)
        return said | {"peak": max(peaks, default=None), "graphs": graphs}

    def stop(self) -> None:
        """End the processes."""
        self._ranks.stop()
