"""How much attention work each rank has, counted in query-key pairs that the mask lets through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.documents import attention_pairs

if TYPE_CHECKING:
    from torchtune_cp.distributed.context_parallel.layout import Layout

#: Per pair, query head and element of a head: a multiplication and an addition for the score, and as
#: many for the value; backward has five products of that size where forward has two.
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


def attention_flops(
    layout: Layout,
    num_heads: int,
    head_dim: int,
    *,
    backward: bool = True,
) -> list[int]:
    """Count the floating-point operations of attention in one layer, by rank.

    Args:
        layout: Who holds what of a batch.
        num_heads: Query heads of the model.
        head_dim: Elements of a head.
        backward: Whether the backward pass counts as well.

    Returns:
        One number a context-parallel rank. Ranks that share their tokens' heads (Ulysses) have equal
        parts of the work.
    """
    per_pair = num_heads * head_dim * (_FORWARD_FLOPS + (_BACKWARD_FLOPS if backward else 0))
    return [
        pairs * per_pair // layout.heads_split
        for pairs in layout.pairs()
        for _ in range(layout.heads_split)
    ]


def attention_work(local: Mapping[str, torch.Tensor]) -> float:
    """Count the query-key pairs of one head that this rank attends to in a batch.

    All layers and heads do the same pairs, so FLOPs are a multiple of them. Where ranks share the heads
    (Ulysses), a rank counts its part.

    Args:
        local: What `context_parallel` yielded.
    """
    pairs: float | None = getattr(local, "attention_pairs", None)
    if pairs is not None:
        return pairs
    rows, length = local["tokens"].shape  # the whole batch, on one rank
    return rows * attention_pairs(0, length, length, AttentionMask())


def attention_imbalance(layout: Layout) -> float:
    """The largest over the mean attention work of the ranks; 1.0 when all have the same.

    Args:
        layout: Who holds what of a batch.
    """
    pairs = layout.pairs()
    total = sum(pairs)
    return max(pairs) * len(pairs) / total if total else 1.0
