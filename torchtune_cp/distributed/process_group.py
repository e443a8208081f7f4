"""Joins the processes that torchrun started, and says which device each one uses."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtune_cp.errors import UserError


def init_distributed(device: str, timeout: timedelta | None = None) -> torch.device:
    """Join the default process group and pick this rank's device.

    A script started without torchrun is a group of one process.

    Args:
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, with gloo for tensors on the host).
        timeout: How long a collective may take before the rank gives up; torch's default if None.

    Returns:
        ``cpu``, or the CUDA device of this local rank.

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
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return chosen


def is_rank_zero() -> bool:
    """Whether this process prints and writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0
