"""Counts and places at the longest planned sequence, 2**24 tokens: more than 2**31 pairs and elements."""

from __future__ import annotations

import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.balance import attention_flops
from torchtune_cp.distributed.context_parallel.documents import Document
from torchtune_cp.distributed.context_parallel.kernels import VarlenCall
from torchtune_cp.distributed.context_parallel.layout import balanced_layout
from torchtune_cp.distributed.context_parallel.schedule import make_schedule

TOKENS, RANKS = 2**24, 32
PAIRS = TOKENS * (TOKENS + 1) // 2


def test_every_pair_of_the_longest_document_is_counted_once_and_every_token_held_once():
    layout = balanced_layout((Document(0, TOKENS),), (1, TOKENS), RANKS, AttentionMask())
    assert layout.length == TOKENS // RANKS
    assert sum(layout.pairs()) == PAIRS
    # 4 operations forward and 10 backward a pair and element, of 32 heads of 128.
    assert sum(attention_flops(layout, 32, 128)) == PAIRS * 14 * 32 * 128
    held = torch.zeros(TOKENS, dtype=torch.int8)
    for row in layout.indices:
        held[row] += 1
    assert bool((held == 1).all())


def test_borders_of_a_kernel_call_are_exact_as_int32():
    """Tokens are counted in them, never elements: 2**31 tokens of a rank are out of reach."""
    layout = balanced_layout((Document(0, TOKENS),), (1, TOKENS), RANKS, AttentionMask())
    schedule = make_schedule(layout, layout.mask, "allgather", RANKS - 1)
    tiles = [tile for step in schedule.steps for tile in step]
    call = VarlenCall(tiles, torch.device("cpu"))
    borders_q, borders_k, most_q, most_k = call._sizes
    assert borders_q.dtype == borders_k.dtype == torch.int32
    assert borders_q.tolist()[-1] == sum(t.nq for t in tiles) == TOKENS // RANKS
    assert borders_k.tolist()[-1] == sum(t.nk for t in tiles)
    assert max(t.k + t.nk for t in tiles) <= TOKENS
    assert (most_q, most_k) == (max(t.nq for t in tiles), max(t.nk for t in tiles))
    assert borders_k.diff().tolist() == [t.nk for t in tiles]
