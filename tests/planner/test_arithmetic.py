"""Operations counted in a simulated step against formulas written by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.planner_cases import FULL, SEQ_LEN, small_config
from torchtune_cp.config import to_typed
from torchtune_cp.planner.arithmetic import attention_pairs
from torchtune_cp.planner.estimate import model_flops
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.simulate import rank_profile

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 4, 8, 2, 128, 384, 512
HEAD_DIM = DIM // HEADS
#: Multiply-adds of a token in the matrices of all layers, and in the output projection.
IN_LAYERS = LAYERS * (2 * DIM * DIM + 2 * DIM * KV_HEADS * HEAD_DIM + 3 * DIM * HIDDEN)
IN_HEAD = DIM * VOCAB


@pytest.mark.parametrize(("gpu", "ranks"), [(True, 4), (False, 1)])
def test_ranks_together_compute_the_causal_triangle_and_each_product_once(gpu, ranks):
    tree = small_config(context_parallel_dim=ranks, **FULL)
    profiles = run_apart(
        rank_profile,
        [
            {
                "cfg": to_typed(tree, world_size=ranks),
                "rank": rank,
                "world_size": ranks,
                "seq_len": SEQ_LEN,
                "gpu": gpu,
            }
            for rank in range(ranks)
        ],
    )

    def total(kind, again):
        return sum(profile.flops.get((kind, again), 0) for profile in profiles)

    pairs = SEQ_LEN * (SEQ_LEN + 1) // 2
    # A rank has a slice of the head and one of the tail, so that all have the same number of pairs.
    assert len({p.flops["attention", False] for p in profiles}) == 1
    in_attention = LAYERS * HEADS * HEAD_DIM * pairs
    assert total("attention", False) == 4 * in_attention
    assert total("attention", True) == 4 * in_attention
    assert total("attention_backward", False) == 10 * in_attention
    # Forward 2 operations a multiply-add, backward 4; checkpointed layers forward again, all but the last
    # product, whose result nobody needs.
    assert total("matmul", False) == 6 * SEQ_LEN * (IN_LAYERS + IN_HEAD)
    last = LAYERS * DIM * HIDDEN
    assert total("matmul", True) == 2 * SEQ_LEN * (IN_LAYERS - last)
    # What papers call model FLOPs: 6 a parameter and token, 12 a pair, head and dimension.
    needed = 6 * SEQ_LEN * (IN_LAYERS + IN_HEAD) + 12 * in_attention
    assert sum(map(model_flops, profiles)) == needed


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_pairs_are_those_of_the_mask(queries, keys):
    mask = torch.ones(queries, keys, dtype=torch.bool)
    assert attention_pairs(queries, keys, is_causal=False) == mask.sum()
    assert attention_pairs(queries, keys, is_causal=True) == mask.tril().sum()
