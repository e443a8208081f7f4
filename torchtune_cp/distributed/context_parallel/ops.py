"""Distributed attention as operators of torch: the models' ``scaled_dot_product_attention`` ends here.

They are opaque to ``torch.compile``, which keeps a layer in one graph whatever the batch looks like, and one
unit to selective activation checkpointing, which can keep the output of attention as a whole. What they
do depends on the batch, so they look it up in the region that is active when they run.

Shape legend: b rows, h query heads, g KV heads, n tokens of this rank, d elements of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F

from torchtune_cp.distributed.context_parallel.attention import DocumentAttention
from torchtune_cp.distributed.context_parallel.heads import HeadSplit
from torchtune_cp.errors import UserError

_active: DocumentAttention | None = None


def active_attention() -> DocumentAttention:
    """The attention of the active region.

    Raises:
        RuntimeError: There is no region in which attention is computed per document.
    """
    if _active is None:
        raise RuntimeError(
            "attention over documents ran outside of context_parallel(...): the context must enclose the"
            " backward pass, too"
        )
    return _active


def active_heads_split() -> tuple[int, int]:
    """How many ranks share the heads in the active region, and which of them this is.

    Raises:
        RuntimeError: There is no region in which attention goes by documents.
    """
    if _active is None:
        raise RuntimeError(
            "attention over chunks of heads ran outside of context_parallel(..., by_documents=True): the"
            " context must enclose forward and backward"
        )
    grid = _active.grid
    return (1, 0) if grid is None else (grid.heads_split, grid.head_rank)


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`torch.ops.torchtune_cp.attention` does."""
    attention = active_attention()
    layout = attention.schedule.layout
    if is_causal != layout.mask.is_causal:
        raise NotImplementedError(
            f"attention with is_causal={is_causal} inside context_parallel(...,"
            f" is_causal={layout.mask.is_causal}): the sequence was cut for the other kind"
        )
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`torch.ops.torchtune_cp.attention_backward` does."""
    gradient, q, k, v, output = map(_one_sequence, (grad_out, query, key, value, out))
    grads = active_attention().backward(gradient, q, k, v, output, logsumexp, scale)
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _heads_inside(query), _heads_inside(key), _heads_inside(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, _, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.torchtune_cp.attention_backward(grad_out, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None)


_attention.register_autograd(_gradients, setup_context=_keep)


def checked_scale(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> float:
    """Refuse in words what attention inside the context cannot do; return the scale of the scores."""
    if attn_mask is not None:
        raise NotImplementedError(
            "an attention mask was given to scaled_dot_product_attention inside context_parallel: give"
            " it documents (seq_lens), a window or a mask_mod"
        )
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"attention dropout {dropout_p} inside context_parallel: set attn_dropout to 0"
        )
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError(
            f"{query.size(1)} query heads and {key.size(1)} key heads: set enable_gqa=True"
        )
    return query.size(-1) ** -0.5 if scale is None else scale


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand for ``F.scaled_dot_product_attention`` under the methods ring and allgather.

    Args:
        query: [b, h, n, d].
        key: [b, g, n, d].
        value: As ``key``.
        attn_mask: Refused.
        dropout_p: Refused unless 0.
        is_causal: As given to the context.
        scale: Of the scores; None for ``d ** -0.5``.
        enable_gqa: Whether g may be smaller than h.

    Returns:
        [b, h, n, d].
    """
    scale = checked_scale(query, key, attn_mask, dropout_p, scale, enable_gqa)
    out: torch.Tensor = torch.ops.torchtune_cp.attention(query, key, value, is_causal, scale)[0]
    return out


# --- heads given out to the ranks (Ulysses) ------------------------------------------------------


def _head_split(query_heads: int, kv_heads: int) -> HeadSplit:
    grid = active_attention().grid
    assert grid is not None
    return HeadSplit(grid, query_heads, kv_heads)


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`torch.ops.torchtune_cp.to_heads` does: [1, h, n, d] to [1, h / parts, n parts, d]."""
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
    """What :func:`torch.ops.torchtune_cp.to_heads_backward` does; copies of a KV head are added up."""
    q, k, v = _head_split(query_heads, kv_heads).take_back([grad_query, grad_key, grad_value])
    return q, k, v


def to_tokens(out: torch.Tensor, parts: int) -> torch.Tensor:
    """What :func:`torch.ops.torchtune_cp.to_tokens` does: [1, h / parts, n parts, d] to [1, h, n, d]."""
    heads = out.size(1) * parts
    return _head_split(heads, heads).take_back([out])[0]


def to_tokens_backward(grad_out: torch.Tensor, parts: int) -> torch.Tensor:
    """What :func:`torch.ops.torchtune_cp.to_tokens_backward` does."""
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


def ulysses_attention(parts: int, rank: int) -> Callable[..., torch.Tensor]:
    """Make what stands for ``F.scaled_dot_product_attention`` where ranks have parts of the heads.

    As in DeepSpeed Ulysses (arXiv 2309.14509): an all-to-all gives each rank all tokens of its heads, a
    second one brings the outputs back. Where there are fewer KV heads than ranks, several ranks get the
    same one.

    Args:
        parts: Ranks that share the heads.
        rank: This rank's place among them.
    """

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        heads, kv_heads = query.size(1), key.size(1)
        scale = checked_scale(query, key, attn_mask, dropout_p, scale, enable_gqa)
        if heads % parts:
            raise UserError(
                f"context_parallel_method=ulysses over {parts} ranks: they do not divide the"
                f" num_heads={heads} of attention on this rank; set context_parallel_ulysses_dim to a"
                " divisor of both context_parallel_dim and num_heads, or"
                " context_parallel_method=ring"
            )
        query, key, value = torch.ops.torchtune_cp.to_heads(query, key, value, parts, rank)
        place = HeadSplit.kv_places(rank, heads, kv_heads, parts)
        if place is not None:
            at = torch.tensor(place, device=key.device)
            key, value = key.index_select(1, at), value.index_select(1, at)
        out = torch.ops.torchtune_cp.attention(query, key, value, is_causal, scale)[0]
        result: torch.Tensor = torch.ops.torchtune_cp.to_tokens(out, parts)
        return result

    return scaled_dot_product_attention


#: torch.compile guards on the function: one per split, not one per step.
_ulysses: dict[tuple[int, int], Callable[..., torch.Tensor]] = {}


@contextlib.contextmanager
def sdpa_replaced_by(replacement: Callable[..., torch.Tensor]) -> Generator[None, None, None]:
    """Let ``F.scaled_dot_product_attention`` be another function, and put it back afterwards.

    Args:
        replacement: The same object every time for the same purpose: torch.compile guards on it.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = replacement
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@contextlib.contextmanager
def document_region(attention: DocumentAttention) -> Generator[None, None, None]:
    """Let ``F.scaled_dot_product_attention`` run a schedule.

    Args:
        attention: Of the batch.
    """
    global _active
    replacement: Callable[..., torch.Tensor] = document_attention
    grid = attention.grid
    if grid is not None and grid.heads_split > 1:
        split = (grid.heads_split, grid.head_rank)
        replacement = _ulysses.setdefault(split, ulysses_attention(*split))
    _active = attention
    try:
        with sdpa_replaced_by(replacement):
            yield
    finally:
        _active = None
