"""Joins the processes that torchrun started, and says which device each one uses."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtune_cp.distributed.torch_private import set_default_group_timeout
from torchtune_cp.errors import UserError
from torchtune_cp.launch.loopback import loopback_variables

#: Set by torchrun: how often it has started the processes again after a failure.
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"

#: How long the ranks wait for each other's start: imports from a busy file system take minutes.
_START = timedelta(minutes=15)


def init_distributed(device: str, collective_timeout_s: float | None = None) -> torch.device:
    """Join the default process group and pick this rank's device.

    A script started without torchrun is a group of one process.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, with gloo for tensors on the host).
        collective_timeout_s: How many seconds a rank waits in a collective before it gives up, in this
            group and in those made later (the mesh's); torch's default if None. Not counted while
            processes start.

    Returns:
        `cpu`, or the CUDA device of this local rank.

    Raises:
        UserError: CUDA was asked for where torch sees none, or more ranks than devices.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device!r}: allowed are cpu and cuda")
    chosen = torch.device(device)
    if device == "cuda":
        count = torch.cuda.device_count()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if count == 0:
            raise UserError("device=cuda, but torch sees no CUDA device here: set device=cpu")
        if local_rank >= count:
            raise UserError(
                f"--nproc_per_node starts more processes than this machine's {count} CUDA devices"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = None
        if collective_timeout_s is not None:
            timeout = timedelta(seconds=collective_timeout_s)
            set_default_group_timeout(timeout)
        if "RANK" in os.environ:
            store, rank, world_size = _meet()
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        else:
            os.environ.update(loopback_variables())  # `tune run` does it for a node's ranks
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return chosen


def _meet() -> tuple[dist.Store, int, int]:
    """Wait until every rank has started, however short the time-out of collectives is."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=_START))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torch's agent keeps one store for all starts (2.13): ranks would meet at addresses that the
        # killed ones have left there. Agents of several nodes count restarts each for itself; for
        # them the launcher has a new store made.
        store = dist.PrefixStore(f"start_{restart_count()}", store)
    store.set(f"started/{rank}", "")
    store.wait([f"started/{other}" for other in range(world_size)], _START)
    return store, rank, world_size


def restart_count() -> int:
    """How often torchrun has started this run's processes again; 0 without it."""
    return int(os.environ.get(RESTARTS_VARIABLE, "0"))


def is_rank_zero() -> bool:
    """Whether this process prints and writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0
