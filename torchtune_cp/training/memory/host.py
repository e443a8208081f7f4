"""Allocates all host memory that training uses in place of device memory."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from torch import Tensor, nn

#: torch rounds pinned memory up to powers of two (`CachingHostAllocator`, 2.11 to 2.13). A large buffer is
#: taken in at most so many pieces, each but the last a power of two: a sixteenth is lost at most, not half.
MOST_PIECES = 5
SMALLEST_PIECE = 2**20


def piece_sizes(num_bytes: int, smallest: int = SMALLEST_PIECE) -> list[int]:
    """Cut a number of bytes into few powers of two and a rest.

    Args:
        num_bytes: How many.
        smallest: What is not more than this is not cut.

    Returns:
        At most `MOST_PIECES` sizes that add up to `num_bytes`, the largest first.
    """
    sizes: list[int] = []
    rest = num_bytes
    while rest > smallest and len(sizes) < MOST_PIECES - 1:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return [*sizes, rest] if rest or not sizes else sizes


class HostBytes:
    """A buffer in host memory, in pieces; see `MOST_PIECES`.

    Args:
        num_bytes: How large.
        device: The device at the other end of the copies.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._pieces = [empty_on_host(size, device) for size in piece_sizes(num_bytes)]

    def _cut(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for piece in self._pieces:
            yield piece, flat[start : start + piece.numel()]
            start += piece.numel()

    def fill(self, source: Tensor) -> None:
        """Start to copy the bytes of `source`, uint8 [num_bytes] on the device, into the buffer."""
        for piece, part in self._cut(source):
            piece.copy_(part, non_blocking=True)

    def copy_to(self, target: Tensor) -> None:
        """Start to copy the buffer into `target`, uint8 [num_bytes] on the device."""
        for piece, part in self._cut(target):
            part.copy_(piece, non_blocking=True)


class HostMemory:
    """Memory and threads on the host; a plan gives another one, see `host_memory_from`."""

    #: Types of tensors that own plain memory, whose bytes can be copied.
    plain_tensors: tuple[type, ...] = (Tensor, nn.Parameter)

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        """See `empty_on_host`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See `empty_like_on_host`."""
        return torch.empty_like(tensor, device="cpu", pin_memory=device.type != "cpu")

    def thread(self) -> Executor:
        """See `host_thread`."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer")


_memory = HostMemory()


@contextlib.contextmanager
def host_memory_from(memory: HostMemory) -> Generator[None, None, None]:
    """Let training take its host memory from elsewhere, for a while.

    Args:
        memory: What gives it.
    """
    global _memory
    saved, _memory = _memory, memory
    try:
        yield
    finally:
        _memory = saved


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor owns plain memory, whose bytes can be copied."""
    return type(tensor) in _memory.plain_tensors and tensor.layout == torch.strided


def empty_on_host(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate host memory that can be copied to and from a device while it computes.

    Args:
        num_bytes: How much.
        device: The device at the other end; for a GPU the memory is pinned. Pinned memory comes from
            torch's cache of it, so that only the first step pays for the pinning.

    Returns:
        uint8, [num_bytes].
    """
    return _memory.empty(num_bytes, device)


def empty_like_on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate host memory of a tensor's layout that can be copied to and from a device.

    Args:
        tensor: Its shape and dtype are taken; of a DTensor also mesh and placements.
        device: As for `empty_on_host`.
    """
    return _memory.empty_like(tensor, device)


def host_thread() -> Executor:
    """Start a thread for work on the host that the device need not wait for."""
    return _memory.thread()
