"""Dispatch modes that see what really runs: bytes handed to the process group, shapes of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_cp.distributed.context_parallel import ops

#: Operators that torch does not look into, and what they do: a mode sees the latter.
_OPAQUE = {
    getattr(torch.ops.torchtune_cp, name).default: function
    for name, function in {
        "attention": ops.attend,
        "attention_backward": ops.attend_backward,
        "to_heads": ops.to_heads,
        "to_heads_backward": ops.to_heads_backward,
        "to_tokens": ops.to_tokens,
        "to_tokens_backward": ops.to_tokens_backward,
    }.items()
}


class _BelowDTensor(TorchDispatchMode):
    """Sees the operators on local tensors that DTensor's dispatcher runs, not those on DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func in _OPAQUE:
            with self:
                return _OPAQUE[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.saw(func, args, out)
        return out

    def saw(self, func: Any, args: Any, out: Any) -> None:
        raise NotImplementedError


_SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


def _group_of(args: Any) -> Any:
    (group,) = (a for a in args if isinstance(a, torch.ScriptObject))
    return torch.distributed.ProcessGroup.unbox(group)


class BytesSent(_BelowDTensor):
    """Adds up the bytes that this rank sends to others, by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def saw(self, func: Any, args: Any, out: Any) -> None:
        name = func._overloadpacket.__name__
        if name == "all_gather_into_tensor":
            tensor, group_size = args[0], args[1]
            self._add(name, tensor.numel() * tensor.itemsize * (group_size - 1))
        elif name == "all_to_all_single":
            tensor, splits = args[0], args[2]
            rank = torch.distributed.get_rank()
            kept = splits[rank] if splits else tensor.size(0) // torch.distributed.get_world_size()
            row = math.prod(tensor.shape[1:]) * tensor.itemsize
            self._add(name, (tensor.size(0) - kept) * row)
        elif name == "_allgather_base_":
            tensor, group = args[1], _group_of(args)
            self._add(name, tensor.numel() * tensor.itemsize * (group.size() - 1))
        elif name == "alltoall_base_":
            tensor, group, splits = args[1], _group_of(args), args[4]
            self._add(name, (tensor.numel() - splits[group.rank()]) * tensor.itemsize)
        elif func.namespace in ("_c10d_functional", "c10d") and name not in _SENDS_NOTHING:
            raise AssertionError(f"a collective that this counter does not know: {func}")

    def _add(self, name: str, count: int) -> None:
        self.sent[name] = self.sent.get(name, 0) + count


class MostRows(_BelowDTensor):
    """Remembers the most rows of any tensor whose last dimension is ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows = 0

    def saw(self, func: Any, args: Any, out: Any) -> None:
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
