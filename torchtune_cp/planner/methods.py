"""What a plan wants to know of attention by documents, which is a single operator to a fake mode.

The methods `allgather` and `ulysses`, and packed documents and windows in a ring, run as operators of
this project's own. A fake mode sees only the result shapes of such an operator; here its implementation is
executed, so that its buffers, kernels and communication are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from omegaconf import ListConfig

from torchtune_cp.attention import AttentionMask
from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.distributed import ContextParallelOptions
from torchtune_cp.distributed.context_parallel.kernels import (
    Call,
    PlainCall,
    VarlenCall,
    at_most,
    by_limits,
    calls_of,
)
from torchtune_cp.distributed.context_parallel.ops import BODIES as BODIES
from torchtune_cp.distributed.context_parallel.ops import active_batch
from torchtune_cp.distributed.context_parallel.tiles import Tile
from torchtune_cp.planner.torch_private import no_modes

#: The namespace of the operators.
NAMESPACE = "torchtune_cp"


def packs_documents(cfg: FullFinetuneConfig) -> bool:
    """Whether some of a config's training data come packed, several documents in a row."""
    datasets = list(cfg.dataset) if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
    return any(bool(dataset.get("packed", False)) for dataset in datasets)


def pairs_of_this_rank(is_causal: bool, window: int | None, chunk: int | None) -> int:
    """Query-key pairs of a head in the batch whose region is active, under a mask."""
    return active_batch().under(AttentionMask(is_causal, window, chunk)).schedule.pairs


# What calls keep of the tiles is made once a batch, in no mode: it is no tensor of the step.


def _calls_on_cpu(tiles: Sequence[Tile], device: torch.device, dtype: torch.dtype) -> list[Call]:
    with no_modes():
        return calls_of(tiles, device, dtype)


def _calls_on_gpu(tiles: Sequence[Tile], device: torch.device, dtype: torch.dtype) -> list[Call]:
    """The calls that would be chosen for the same tiles on CUDA, their indices on `device`."""
    with no_modes():
        if dtype in (torch.float16, torch.bfloat16):
            return [VarlenCall(group, device) for group in by_limits(tiles)]
        return [PlainCall(part) for part in at_most(tiles, PlainCall.MOST_QUERIES)]


def options_of_plan(
    cfg: FullFinetuneConfig, options: ContextParallelOptions, *, gpu: bool
) -> ContextParallelOptions:
    """The options of a run as its plan takes them.

    Args:
        cfg: The run's config. Packed rows use attention by documents, even with one document per row.
        options: Of the run.
        gpu: Whether kernels are those of a GPU.
    """
    return replace(
        options,
        by_documents=options.by_documents or packs_documents(cfg),
        kernels=_calls_on_gpu if gpu else _calls_on_cpu,
    )
