"""Tracks the bytes of tensor storages that are allocated while it is active."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorage(TorchDispatchMode):
    """Counts every storage that an operator returns until it dies; exact to the byte.

    Storages that existed before (parameters, optimizer state) do not count, nor does what a kernel
    allocates and frees inside. Sizes are read anew after every operator: FSDP frees gathered parameters by
    resizing their storages, which no operator shows.

    Args:
        elsewhere: How many of the bytes alive lie in another memory and do not count for the peak.

    Attributes:
        peak: The most bytes that existed at the same time.
    """

    def __init__(self, elsewhere: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self.peak = 0
        self._alive: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return sum(storage.nbytes() for storage in list(self._alive))

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
            if isinstance(tensor, AsyncCollectiveTensor):
                tensor = tensor.elem  # the wrapper's own storage has a size but no memory
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in inputs:
                self._alive[tensor.untyped_storage()] = None
        self.peak = max(self.peak, self.live - self._elsewhere())
        return out
