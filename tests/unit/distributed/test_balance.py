"""The work of the ranks on packed documents, computed from their lengths."""

from __future__ import annotations

from statistics import mean

import pytest
import torch

from benchmarks.balance import imbalances, library_lengths, protein_lengths
from torchtune_cp.attention import AttentionMask
from torchtune_cp.data.packing import STRATEGIES
from torchtune_cp.distributed.context_parallel import (
    attention_flops,
    attention_imbalance,
    attention_work,
    context_parallel,
)
from torchtune_cp.distributed.context_parallel.documents import Document
from torchtune_cp.distributed.context_parallel.layout import balanced_layout, ring_layout


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [library_lengths, protein_lengths], ids=["library", "proteins"])
def test_no_rank_of_eight_has_more_than_a_twentieth_above_the_mean(lengths, strategy):
    found = imbalances(lengths(), strategy)
    ours, head_tail = found["by_documents"], found["whole_sequence_head_tail"]
    print(f"worst {max(ours):.3f}, whole-sequence head-tail {max(head_tail):.3f}")
    assert len(ours) >= 10
    assert max(ours) <= 1.05
    assert mean(ours) < mean(head_tail)
    assert max(head_tail) > 1.2, "documents that need no balancing prove nothing"


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(),
        AttentionMask(False),
        AttentionMask(True, 9),
        AttentionMask(False, None, 6),
        AttentionMask(True, 4, 10),
    ],
)
def test_work_is_the_number_of_pairs_that_are_shown(mask):
    lengths = [40, 7, 21]
    offsets = [0, 40, 47]
    documents = tuple(map(Document, offsets, lengths))
    shown = 0
    for n in lengths:
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = distance >= 0 if mask.is_causal else torch.ones(n, n, dtype=torch.bool)
        if mask.window is not None:
            seen &= distance.abs() < mask.window
        if mask.chunk is not None:
            chunk = torch.arange(n) // mask.chunk
            seen &= chunk[:, None] == chunk
        shown += int(seen.sum())
    for parts in (1, 2):
        layout = balanced_layout(documents, (1, 68), 4, mask, heads_split=parts)
        assert sum(layout.pairs()) == shown
        flops = attention_flops(layout, num_heads=4, head_dim=8, backward=False)
        assert sum(flops) == pytest.approx(shown * 4 * 8 * 4, rel=1e-3)
        assert len(flops) == 4
        assert attention_imbalance(layout) == pytest.approx(max(flops) * 4 / sum(flops), rel=1e-2)


def test_rows_that_are_cut_alike_are_balanced_and_a_single_rank_does_all():
    layout = ring_layout((3, 10), 12, 2, is_causal=True)
    assert layout.pairs() == [3 * 12 * 13 // 2 // 2] * 2
    assert attention_imbalance(layout) == 1.0
    batch = {"tokens": torch.zeros(2, 5, dtype=torch.int64)}
    with context_parallel(None, batch) as local:
        assert attention_work(local) == 2 * 15
    with context_parallel(None, {**batch, "seq_lens": torch.tensor([[3, 2], [4, 0]])}) as local:
        assert attention_work(local) == 6 + 3 + 10
