"""Makes the parts of attention over documents, which is a single operator otherwise, visible to a plan.

The methods `allgather` and `ulysses`, and packed documents and windows in a ring, run as operators of
this project's own. A fake mode sees only the result shapes of such an operator; here its implementation is
executed, so that its buffers, kernels and communication are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from omegaconf import ListConfig

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.distributed.context_parallel import manager, ops, schedule
from torchtune_cp.distributed.context_parallel.kernels import (
    Call,
    PlainCall,
    VarlenCall,
    at_most,
    by_limits,
)
from torchtune_cp.distributed.context_parallel.tiles import Tile
from torchtune_cp.planner.torch_private import no_modes

#: The namespace of the operators.
NAMESPACE = "torchtune_cp"

#: What each operator does.
BODIES: dict[str, Callable[..., Any]] = {
    "attention": ops.attend,
    "attention_backward": ops.attend_backward,
    "to_heads": ops.to_heads,
    "to_heads_backward": ops.to_heads_backward,
    "to_tokens": ops.to_tokens,
    "to_tokens_backward": ops.to_tokens_backward,
}


def packs_documents(cfg: FullFinetuneConfig) -> bool:
    """Whether some of a config's training data come packed, several documents in a row."""
    datasets = list(cfg.dataset) if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
    return any(bool(dataset.get("packed", False)) for dataset in datasets)


def pairs_of_this_rank() -> int:
    """Query-key pairs of a head in the batch whose region is active."""
    active = ops.active_attention().schedule
    return active.layout.pairs()[active.rank]


def _calls_on_gpu(tiles: Sequence[Tile], device: torch.device, dtype: torch.dtype) -> list[Call]:
    """The calls that would be chosen for the same tiles on CUDA, their indices on `device`."""
    if dtype in (torch.float16, torch.bfloat16):
        return [VarlenCall(group, device) for group in by_limits(tiles)]
    return [PlainCall(part) for part in at_most(tiles, PlainCall.MOST_QUERIES)]


def _outside(function: Callable[..., Any], then: Callable[[Any], Any] = lambda _: None) -> Any:
    """A function that runs in no mode: what it decides depends on values."""

    def real(*args: Any, **kwargs: Any) -> Any:
        with no_modes():
            result = function(*args, **kwargs)
            then(result)
            return result

    return real


@contextlib.contextmanager
def document_attention_seen(*, gpu: bool) -> Generator[None, None, None]:
    """Make layouts and schedules of real numbers, with the kernels of a GPU if asked for.

    Args:
        gpu: Whether kernels are those of a GPU.
    """
    replaced = [
        (manager, "document_layout", _outside(manager.document_layout, lambda made: made.indices)),
        (manager, "whole_rows", _outside(manager.whole_rows)),
        (manager, "make_schedule", _outside(manager.make_schedule)),
        (schedule.Schedule, "calls", _outside(schedule.Schedule.calls)),
    ]
    if gpu:
        replaced.append((schedule, "calls_of", _calls_on_gpu))
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
