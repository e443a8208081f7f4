"""How many bytes a rank sends in each collective."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtune_cp.planner.torch_private import group_by_name

#: Operators of these namespaces communicate with other ranks.
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")

_SENDS_NOTHING = ("wait_tensor", "barrier", "monitored_barrier_")


class Sent(NamedTuple):
    """What one collective does.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` or `broadcast`.
        group: The ranks that take part.
        bytes: What this rank sends to others.
    """

    kind: str
    group: dist.ProcessGroup
    bytes: float


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.itemsize
    return sum(map(_bytes, tensors))


def _group(given: Any) -> dist.ProcessGroup:
    return group_by_name(given) if isinstance(given, str) else dist.ProcessGroup.unbox(given)


def sent(func: Any, args: tuple[Any, ...]) -> Sent | None:
    """Say what an operator sends.

    An all-gather sends this rank's part to each of the g - 1 others, a reduce-scatter each other's
    part to it, an all-reduce (by a ring) both; an all-to-all everything but the rank's own part.

    Args:
        func: An operator of one of `NAMESPACES`.
        args: Its positional arguments.

    Returns:
        None for an operator that sends nothing.

    Raises:
        RuntimeError: A collective that this function does not know.
    """
    name = func._overloadpacket.__name__
    if name in _SENDS_NOTHING or name.startswith("_wrap_tensor"):
        return None
    if name in ("_allgather_base_", "allgather_"):
        group = _group(args[2])
        return Sent("all_gather", group, _bytes(args[1]) * (group.size() - 1))
    if name == "all_gather_into_tensor":
        group = _group(args[2])
        return Sent("all_gather", group, _bytes(args[0]) * (group.size() - 1))
    if name == "_reduce_scatter_base_":
        group = _group(args[2])
        return Sent("reduce_scatter", group, _bytes(args[0]) * (group.size() - 1))
    if name == "reduce_scatter_tensor":
        group = _group(args[3])
        return Sent("reduce_scatter", group, _bytes(args[0]) / group.size() * (group.size() - 1))
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        group = _group(args[1] if name == "allreduce_" else args[2])
        return Sent("all_reduce", group, 2 * _bytes(args[0]) * (group.size() - 1) / group.size())
    if name == "all_to_all_single":
        tensor, _, splits, group_name = args
        group = _group(group_name)
        row = math.prod(tensor.shape[1:]) * tensor.itemsize
        kept = splits[group.rank()] if splits else tensor.size(0) // group.size()
        return Sent("all_to_all", group, (tensor.size(0) - kept) * row)
    if name == "alltoall_base_":
        group, sizes = _group(args[2]), args[4]
        mine = sizes[group.rank()] if sizes else args[1].numel() // group.size()
        return Sent("all_to_all", group, (args[1].numel() - mine) * args[1].itemsize)
    if name == "shard_dim_alltoall":
        group = _group(args[3])
        return Sent("all_to_all", group, _bytes(args[0]) / group.size() * (group.size() - 1))
    if name == "broadcast_":
        return Sent("broadcast", _group(args[1]), _bytes(args[0]))
    raise RuntimeError(f"the planner does not support the collective {func}")
