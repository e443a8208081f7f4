"""Documents cut head and tail, each with its padding: attention equals that written out without padding."""

from __future__ import annotations

import itertools

import torch

from tests.distributed.simulated_ranks import simulate
from tests.distributed.test_document_parity import HEAD_DIM, _on_one_rank
from tests.distributed.written_out import (
    MASKS,
    distances_shown,
    output_and_gradients,
    random_inputs,
)
from torchtune_cp.attention import AttentionMask
from torchtune_cp.data import cut_for_ranks
from torchtune_cp.distributed.context_parallel.cut import restore
from torchtune_cp.distributed.context_parallel.layout import even_layout, padded_length

TOLERANCE = 1e-10
LENGTHS = (1, 7, 8, 33, 2, 60)
#: Degree, parts of the heads, schedule, rotate method.
WAYS = (
    (1, 1, "ring", "allgather"),
    (2, 1, "ring", "allgather"),
    (2, 1, "allgather", "allgather"),
    (4, 1, "ring", "alltoall"),
    (4, 1, "allgather", "allgather"),
    (2, 2, "ring", "allgather"),
    (4, 4, "ring", "allgather"),
    (4, 2, "ring", "alltoall"),
    (4, 2, "ring", "allgather"),
)


def _padded(cp: int, as_rows: bool, lengths=LENGTHS) -> list[int]:
    padded = [padded_length(n, 2 * cp if cp > 1 else 1) for n in lengths]
    return [max(padded)] * len(padded) if as_rows else padded


def _largest_error(cp, parts, schedule, rotate, mask, as_rows, tail=0):
    inputs = random_inputs([list(LENGTHS)], sum(LENGTHS), 4, 2, HEAD_DIM)
    expected = output_and_gradients([list(LENGTHS)], inputs, lambda n: distances_shown(n, *mask))
    padded = _padded(cp, as_rows)
    shape = (len(padded), padded[0]) if as_rows else (1, sum(padded) + tail)
    layout = even_layout(LENGTHS, tuple(padded), shape, cp, AttentionMask(*mask))
    layout = layout.sharing_heads(parts)
    offsets = torch.tensor([0, *padded]).cumsum(0)
    real = torch.cat([o + torch.arange(n) for o, n in zip(offsets, LENGTHS, strict=False)])
    flat = []
    for tensor in inputs:
        whole = torch.ones(shape[0] * shape[1], *tensor.shape[1::2], dtype=tensor.dtype)
        flat.append(whole.index_copy(0, real, tensor[0].transpose(0, 1)))
    held = layout.indices
    assert sorted(held[held >= 0].tolist()) == real.tolist()
    by_rank = simulate(cp, lambda grid: _on_one_rank(grid, layout, flat, schedule, rotate), parts)
    errors = []
    for mine, right in zip(zip(*by_rank, strict=True), expected, strict=True):
        assert all(part.isfinite().all() for part in mine)
        whole = restore(layout, mine, 2).transpose(1, 2).flatten(0, 1)
        errors.append((whole[real] - right[0].transpose(0, 1)).abs().max().item())
    return max(errors)


def test_attention_is_that_of_each_document_alone() -> None:
    errors = {
        (way, mask, as_rows): _largest_error(*way, MASKS[mask], as_rows)
        for way, mask, as_rows in itertools.product(WAYS, MASKS, (False, True))
    }
    assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}


def test_padding_behind_all_documents_changes_nothing() -> None:
    for way in WAYS:
        assert _largest_error(*way, MASKS["bidirectional"], False, tail=3 * way[0]) < TOLERANCE, way


def test_every_rank_holds_chunks_r_and_2cp_minus_1_minus_r_of_every_document() -> None:
    for cp, lengths in itertools.product((2, 4), ((1, 7, 8), (8081,), (16, 8081, 1))):
        padded = _padded(cp, False, lengths)
        tail = cp  # padding behind all documents, given out in consecutive parts
        total = sum(padded) + tail
        batch = {
            "tokens": torch.arange(total)[None],
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "cu_seqlens_padded": torch.tensor([0, *padded]).cumsum(0),
        }
        slices = cut_for_ranks(batch, cp)
        for rank, own in enumerate(slices):
            expected, offset = [], 0
            for size in padded:
                chunks = torch.arange(offset, offset + size).chunk(2 * cp)
                expected += [chunks[rank], chunks[2 * cp - 1 - rank]]
                offset += size
            expected.append(torch.tensor([offset + rank]))
            assert own["tokens"].tolist() == [torch.cat(expected).tolist()]
