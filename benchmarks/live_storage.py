"""Tracks the bytes of tensor storages that come to life while it is active."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorage(TorchDispatchMode):
    """Counts every storage that an operator returns until it dies; exact to the byte.

    Storages that existed before (parameters, optimizer state) do not count, nor does what a kernel
    allocates and frees inside.

    Args:
        elsewhere: How many of the bytes alive lie in another memory and do not count for the peak.

    Attributes:
        live: Bytes alive now.
        peak: The most that were alive at once.
    """

    def __init__(self, elsewhere: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor's dispatcher then runs the operator on local tensors
        inputs = {
            id(t.untyped_storage())
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), inputs)
        self.peak = max(self.peak, self.live - self._elsewhere())
        return out

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = id(storage)
        if key in self._sizes:
            self.live += storage.nbytes() - self._sizes[key]  # resized in place
            self._sizes[key] = storage.nbytes()
        elif key not in inputs:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
