"""What several parts measure with: errors against a float64 reference, and peak memory."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """2-norm of the difference over the 2-norm of the float64 reference; NaN if `actual` has one.

    Args:
        actual: Any floating dtype.
        expected: The reference, float64, the same shape.
    """
    return ((actual.double() - expected).norm() / expected.norm()).item()


def worst_row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error of a single row (one head of one position).

    A few wrong rows among thousands hardly show in the norm of the whole. A row smaller than the
    average is compared with the average: the first query's gradient, for one, is exactly 0.

    Args:
        actual: [..., head_dim].
        expected: The reference, float64, the same shape.
    """
    norms = expected.norm(dim=-1)
    floor = norms.mean()
    return ((actual.double() - expected).norm(dim=-1) / norms.clamp_min(floor.item())).max().item()


@dataclass
class Peak:
    """Filled when the block of `peak_memory` ends.

    Attributes:
        bytes: The most memory in use at the same time, without what was there before (tensors that the block
            freed count as if they had stayed).
    """

    bytes: int = 0


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Generator[Peak, None, None]:
    """Measure the peak of a block: torch's allocator on a GPU, bytes of live storages on the CPU.

    Args:
        device: Where the block computes.

    Yields:
        The result, valid after the block.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        from benchmarks.live_storage import LiveStorage

        with LiveStorage() as live:
            yield peak
        peak.bytes = live.peak
