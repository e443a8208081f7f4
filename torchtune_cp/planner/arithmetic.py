"""Floating-point operations of one operator; a multiply-add counts as two.

Matrix products are counted by torch's own formulas. Those for attention ignore the causal mask, so it is
counted here: only pairs of a query and a key that the mask allows. A pair costs 4 d operations per head
forward (scores, weighted values) and 10 d backward, where the fused kernels recompute the scores (arXiv
2307.08691, section 3.3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm}

_ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}

#: Operations of a query-key pair for each dimension of a head.
FORWARD_PER_PAIR = 4
BACKWARD_PER_PAIR = 10
#: Of those of backward, what the algorithm itself needs: the scores need not be computed again.
MODEL_BACKWARD_PER_PAIR = 8


def attention_pairs(queries: int, keys: int, *, is_causal: bool) -> int:
    """Query-key pairs that a mask lets through.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        is_causal: Query i sees keys 0 to i.
    """
    if not is_causal:
        return queries * keys
    full = max(queries - keys, 0)
    part = queries - full
    return part * (part + 1) // 2 + full * keys


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by their names, defaults left out."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[str, float] | None:
    """Count an operator.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its other arguments.
        out: What it returned.

    Returns:
        `matmul`, `attention` or `attention_backward` and the number of operations; None for
        everything else, whose time is that of reading and writing memory.
    """
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        return "matmul", float(flop_registry[packet](*args, **kwargs, out_val=out))
    backward = packet in _ATTENTION_BACKWARD
    if not backward and packet not in _ATTENTION:
        return None
    given = arguments(func, args, kwargs)
    query, key = given["query"], given["key"]
    batch, heads, length, dim = query.shape
    pairs = attention_pairs(length, key.size(2), is_causal=bool(given.get("is_causal", False)))
    per_pair = BACKWARD_PER_PAIR if backward else FORWARD_PER_PAIR
    kind = "attention_backward" if backward else "attention"
    return kind, float(per_pair * batch * heads * dim * pairs)
