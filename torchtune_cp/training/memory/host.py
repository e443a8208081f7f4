"""The one place where training takes host memory for what belongs to the device."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from torch import Tensor, nn

#: Tensors that own plain memory, whose bytes can be copied. The planner adds tensors without memory.
PLAIN_TENSORS: set[type] = {Tensor, nn.Parameter}


def empty_on_host(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate host memory that can be copied to and from a device while it computes.

    Args:
        num_bytes: How much.
        device: The device at the other end; for a GPU the memory is pinned. Pinned memory comes from
            torch's cache of it, so that only the first step pays for the pinning.

    Returns:
        uint8, [num_bytes].
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


def empty_like_on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate host memory of a tensor's layout that can be copied to and from a device.

    Args:
        tensor: Its shape and dtype are taken; of a DTensor also mesh and placements.
        device: As for :func:`empty_on_host`.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=device.type != "cpu")


def host_thread() -> Executor:
    """Start a thread for work on the host that the device need not wait for."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer")
