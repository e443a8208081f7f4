"""Makes a step on fake CPU tensors allocate the same memory as on a GPU.

Without a GPU there are no fake tensors on one (autograd wants its driver), so the step runs on fake CPU
tensors, and the few operators that differ on a GPU are replaced by those of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtune_cp.errors import UserError
from torchtune_cp.models.norm import RMSNorm, rms_norm_from
from torchtune_cp.planner.arithmetic import arguments

aten = torch.ops.aten

_FLASH_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._flash_attention_backward,
}
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch's function of this name becomes on a GPU, by precision.

    Flash attention takes 16-bit numbers only. In float32 the memory-efficient kernel is used, which
    does not support grouped queries; with them torch falls back to whole matrices of scores.
    """
    if query.dtype in _LOW_PRECISION and attn_mask is None:
        results = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
    elif query.size(1) == key.size(1):
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    elif isinstance(query, DTensor):
        raise UserError(
            "grouped-query attention in float32 under context parallelism on a GPU: torch has no fused"
            " kernel for it to put into the ring; set dtype=bf16"
        )
    else:
        results = aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    out: Tensor = results[0]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates, keeps and touches what the fused kernel of CUDA does.

    `aten._fused_rms_norm` itself would not do: on a CPU it is a composite of other operators, and two
    float32 copies of each input would be kept for backward. Results are of no use, only their shapes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        inverse_rms = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, scale, inverse_rms)
        return torch.neg(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, _ = ctx.saved_tensors
        return torch.add(grad, x), torch.empty_like(scale)


def _fused_norm(self: RMSNorm, x: Tensor, scale: Tensor) -> Tensor:
    if x.dtype != scale.dtype:  # torch then has no fused kernel either
        return F.rms_norm(x, (self.dim,), scale, self.eps)
    normed: Tensor = _FusedRMSNorm.apply(x, scale)
    return normed


@contextlib.contextmanager
def gpu_operators() -> Generator[None, None, None]:
    """Replace attention and RMS norm by what runs on a GPU."""
    attention = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        with rms_norm_from(_fused_norm):
            yield
    finally:
        F.scaled_dot_product_attention = attention


@contextlib.contextmanager
def attention_inside(
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> Generator[None, None, None]:
    """Enclose every call of `F.scaled_dot_product_attention`.

    Args:
        around: Gives a fresh context for each call.
    """
    original = F.scaled_dot_product_attention

    def enclosed(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    # torch's context_parallel finds what it replaces by this name.
    enclosed.__name__ = "scaled_dot_product_attention"
    F.scaled_dot_product_attention = enclosed
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def flash_attention_workspace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that the flash attention kernels take from torch's allocator while they run.

    As in `mha_bwd` of FlashAttention-2, which torch ships: the gradient of the queries is summed in
    float32; with grouped queries the gradients of keys and values first exist for every query head. Both
    are an estimate until measured on a GPU.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its other arguments.

    Returns:
        0 for all operators but the backward of flash attention.
    """
    if func._overloadpacket not in _FLASH_BACKWARD:
        return 0
    given = arguments(func, args, kwargs)
    if (
        func._overloadpacket is aten._flash_attention_backward
    ):  # [tokens, heads, dim] of many segments
        query, key = (given[name].transpose(0, 1)[None] for name in ("query", "key"))
        segments = given["cum_seq_q"].numel() - 1
    else:
        query, key, segments = given["query"], given["key"], 0
    batch, heads, length, dim = query.shape
    # Segments follow each other in one buffer with room for the rounding of each.
    rounded = -(-length // 128) * 128 + 128 * segments
    accumulated = batch * heads * rounded * (-(-dim // 32) * 32) * 4
    row_sums = batch * heads * rounded * 4
    expanded = 0
    if key.size(1) != heads:
        expanded = 2 * batch * heads * key.size(2) * dim * key.itemsize
    return int(accumulated + row_sums + expanded)
