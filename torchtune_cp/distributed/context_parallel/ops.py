"""Attention by documents as operators of torch, and the function through which models reach them.

They are opaque to `torch.compile`, which keeps a layer in one graph whatever the batch looks like, and one
unit to selective activation checkpointing, which can keep the output of attention as a whole. What they
do depends on the batch, so they look it up in the region that is active when they run.

Shape legend: b rows, h query heads, g KV heads, n tokens of this rank, d elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from torchtune_cp.attention import AttentionMask, MaskMod, active_region, is_distributed
from torchtune_cp.config.context_parallel_rules import heads_problems
from torchtune_cp.distributed.context_parallel.batch_attention import BatchAttention
from torchtune_cp.distributed.context_parallel.heads import HeadSplit
from torchtune_cp.distributed.context_parallel.options import refuse
from torchtune_cp.distributed.context_parallel.torch_private import Backward


def active_batch() -> BatchAttention:
    """The batch of the active region.

    Raises:
        RuntimeError: There is no region in which attention is computed by documents.
    """
    batch = active_region().batch if is_distributed() else None
    if not isinstance(batch, BatchAttention):
        raise RuntimeError(
            "attention by documents ran outside of its context_parallel(...): the context must enclose"
            " forward and backward; attention over chunks of heads needs"
            " options=ContextParallelOptions(head_chunks=...)"
        )
    return batch


def _one_sequence(heads_first: torch.Tensor) -> torch.Tensor:
    """[b, h, n, d] as one sequence [1, h, b n, d]; a view where heads lie inside tokens."""
    b, _, n, _ = heads_first.shape
    if b == 1:
        return heads_first
    return heads_first.transpose(1, 2).reshape(1, b * n, *heads_first.shape[1::2]).transpose(1, 2)


def _rows_again(one: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    b, _, n, _ = like.shape
    if b == 1:
        return one
    return one.transpose(1, 2).reshape(b, n, *one.shape[1::2]).transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `torch.ops.torchtune_cp.attention` does."""
    attention = active_batch().under(AttentionMask(is_causal, window, chunk))
    tokens = query.size(0) * query.size(2)
    if tokens != attention.schedule.length:
        raise RuntimeError(
            f"attention over {tokens} tokens inside context_parallel(...) of a batch with"
            f" {attention.schedule.length} on this rank: give the model the batch that it yields, uncut"
        )
    out, logsumexp = attention.forward(
        _one_sequence(query), _one_sequence(key), _one_sequence(value), scale
    )
    return _rows_again(out, query), logsumexp


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `torch.ops.torchtune_cp.attention_backward` does."""
    folded = map(_one_sequence, (grad_out, query, key, value, out))
    attention = active_batch().under(AttentionMask(is_causal, window, chunk))
    grads = attention.backward(Backward._make((*folded, logsumexp, scale)))
    return _rows_again(grads[0], query), _rows_again(grads[1], key), _rows_again(grads[2], value)


def _heads_inside(like: torch.Tensor) -> torch.Tensor:
    """Empty, of the shape of [b, h, n, d], with the heads of a token side by side."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


_attention = torch.library.custom_op("torchtune_cp::attention", attend, mutates_args=())
_attention_backward = torch.library.custom_op(
    "torchtune_cp::attention_backward", attend_backward, mutates_args=()
)


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    b, h, n, _ = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _heads_inside(query), query.new_empty(1, h, b * n, dtype=exact)


@_attention_backward.register_fake
def _(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _heads_inside(query), _heads_inside(key), _heads_inside(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, *ctx.mask, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.torchtune_cp.attention_backward(
        grad_out, *ctx.saved_tensors, ctx.scale, *ctx.mask
    )
    return (*grads, None, None, None, None)


_attention.register_autograd(_gradients, setup_context=_keep)


# --- heads given out to the ranks (Ulysses) ------------------------------------------------------


def _head_split(query_heads: int, kv_heads: int) -> HeadSplit:
    grid = active_batch().grid
    assert grid is not None
    return HeadSplit(grid, query_heads, kv_heads)


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `torch.ops.torchtune_cp.to_heads` does: [1, h, n, d] to [1, h / parts, n parts, d]."""
    q, k, v = _head_split(query.size(1), key.size(1)).give([query, key, value])
    return q, k, v


def to_heads_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    query_heads: int,
    kv_heads: int,
    parts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `torch.ops.torchtune_cp.to_heads_backward` does; copies of a KV head are added up."""
    q, k, v = _head_split(query_heads, kv_heads).take_back([grad_query, grad_key, grad_value])
    return q, k, v


def to_tokens(out: torch.Tensor, parts: int) -> torch.Tensor:
    """What `torch.ops.torchtune_cp.to_tokens` does: [1, h / parts, n parts, d] to [1, h, n, d]."""
    heads = out.size(1) * parts
    return _head_split(heads, heads).take_back([out])[0]


def to_tokens_backward(grad_out: torch.Tensor, parts: int) -> torch.Tensor:
    """What `torch.ops.torchtune_cp.to_tokens_backward` does."""
    return _head_split(grad_out.size(1), grad_out.size(1)).give([grad_out])[0]


_to_heads = torch.library.custom_op("torchtune_cp::to_heads", to_heads, mutates_args=())
_to_heads_backward = torch.library.custom_op(
    "torchtune_cp::to_heads_backward", to_heads_backward, mutates_args=()
)
_to_tokens = torch.library.custom_op("torchtune_cp::to_tokens", to_tokens, mutates_args=())
_to_tokens_backward = torch.library.custom_op(
    "torchtune_cp::to_tokens_backward", to_tokens_backward, mutates_args=()
)


@_to_heads.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, h, n, d = query.shape
    first, last = HeadSplit.kv_range(rank, h, key.size(1), parts)
    kv_shape = (1, last - first, n * parts, d)
    return (
        query.new_empty(1, h // parts, n * parts, d),
        key.new_empty(kv_shape),
        value.new_empty(kv_shape),
    )


@_to_heads_backward.register_fake
def _(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    query_heads: int,
    kv_heads: int,
    parts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, d = grad_query.size(2) // parts, grad_query.size(3)
    query, key, value = (
        t.new_empty(1, n, heads, d).transpose(1, 2)
        for t, heads in ((grad_query, query_heads), (grad_key, kv_heads), (grad_value, kv_heads))
    )
    return query, key, value


@_to_tokens.register_fake
def _(out: torch.Tensor, parts: int) -> torch.Tensor:
    _, h, n, d = out.shape
    return out.new_empty(1, n // parts, h * parts, d).transpose(1, 2)


@_to_tokens_backward.register_fake
def _(grad_out: torch.Tensor, parts: int) -> torch.Tensor:
    _, h, n, d = grad_out.shape
    return grad_out.new_empty(1, h // parts, n * parts, d)


def _remember_heads(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, _, ctx.parts, _ = inputs
    ctx.heads = query.size(1), key.size(1)


_to_heads.register_autograd(
    lambda ctx, *grads: (
        *torch.ops.torchtune_cp.to_heads_backward(*grads, *ctx.heads, ctx.parts),
        None,
        None,
    ),
    setup_context=_remember_heads,
)


def _remember_parts(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.parts = inputs[1]


_to_tokens.register_autograd(
    lambda ctx, grad: (torch.ops.torchtune_cp.to_tokens_backward(grad, ctx.parts), None),
    setup_context=_remember_parts,
)


# --- what the region attends with -----------------------------------------------------------------


@torch.compiler.disable
def _under_function(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask_mod: MaskMod, scale: float
) -> torch.Tensor:
    attention = active_batch().under_function(mask_mod, query.device)
    b, _, n, _ = query.shape
    q, k, v = (
        t.transpose(1, 2).reshape(1, b * n, *t.shape[1::2]).transpose(1, 2)
        for t in (query, key, value)
    )
    out = attention.attend(q, k, v, scale)
    return out.transpose(1, 2).reshape(b, n, *out.shape[1::2]).transpose(1, 2)


@lru_cache
def by_documents(parts: int, rank: int) -> Callable[..., torch.Tensor]:
    """Make the attention of a region by documents; see `torchtune_cp.attention.Region`.

    Where ranks share the heads, as in DeepSpeed Ulysses (arXiv 2309.14509), an all-to-all gives each rank all
    tokens of its heads, a second one brings the outputs back. Where there are fewer KV heads than ranks,
    several ranks get the same one.

    Args:
        parts: Ranks that share the heads.
        rank: This rank's place among them.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool,
        window: int | None,
        chunk: int | None,
        mask_mod: MaskMod | None,
        scale: float | None,
    ) -> torch.Tensor:
        scale = query.size(-1) ** -0.5 if scale is None else scale
        if mask_mod is not None:
            return _under_function(query, key, value, mask_mod, scale)
        heads, kv_heads = query.size(1), key.size(1)
        if parts > 1:
            if heads % parts:
                refuse(heads_problems(heads, parts))
            query, key, value = torch.ops.torchtune_cp.to_heads(query, key, value, parts, rank)
            place = HeadSplit.kv_places(rank, heads, kv_heads, parts)
            if place is not None:
                at = torch.tensor(place, device=key.device)
                key, value = key.index_select(1, at), value.index_select(1, at)
        out: torch.Tensor = torch.ops.torchtune_cp.attention(
            query, key, value, is_causal, window, chunk, scale
        )[0]
        return torch.ops.torchtune_cp.to_tokens(out, parts) if parts > 1 else out

    return attend


#: What each operator does, by name: for who wants to see inside, as plans do.
BODIES: dict[str, Callable[..., Any]] = {
    "attention": attend,
    "attention_backward": attend_backward,
    "to_heads": to_heads,
    "to_heads_backward": to_heads_backward,
    "to_tokens": to_tokens,
    "to_tokens_backward": to_tokens_backward,
}
