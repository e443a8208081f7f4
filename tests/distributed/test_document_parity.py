"""Attention over documents in every method, layout and mask, against attention written out, in float64.

The ranks are threads of this process, so that many layouts and degrees can be tried; the same through real
process groups is in test_document_attention.py.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.simulated_ranks import simulate
from tests.distributed.written_out import (
    DOCUMENTS,
    LARGE_DOCUMENTS,
    MASKS,
    distances_shown,
    is_token,
    output_and_gradients,
    random_inputs,
    seq_lens_of,
)
from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel import kernels
from torchtune_cp.distributed.context_parallel.attention import DocumentAttention
from torchtune_cp.distributed.context_parallel.cut import restore
from torchtune_cp.distributed.context_parallel.documents import documents_of
from torchtune_cp.distributed.context_parallel.heads import HeadSplit
from torchtune_cp.distributed.context_parallel.kernels import calls_of
from torchtune_cp.distributed.context_parallel.layout import balanced_layout
from torchtune_cp.distributed.context_parallel.schedule import make_schedule
from torchtune_cp.distributed.context_parallel.torch_private import Backward

HEAD_DIM, TOLERANCE = 8, 1e-10
#: Schedule, rotate method, and in how many parts the heads are given out (0: as many as ranks).
METHODS = {
    "ring": ("ring", "allgather", 1),
    "ring_alltoall": ("ring", "alltoall", 1),
    "allgather": ("allgather", "allgather", 1),
    "ulysses": ("ring", "allgather", 0),
}


def _on_one_rank(grid, layout, flat, method, rotate, mask=None, kernels=calls_of):
    """Output and gradients of this rank's tokens, by the operators' own forward and backward."""
    index = layout.indices[grid.rank]
    # What stands on padding must not reach a token: the first token's values do here.
    q, k, v, gradient = (t[index.clamp(min=0)].transpose(0, 1)[None] for t in flat)
    schedule = make_schedule(layout, mask or layout.mask, method, grid.ring_rank, kernels)
    attention = DocumentAttention(schedule, grid, rotate)
    scale = HEAD_DIM**-0.5
    if grid.heads_split == 1:
        out, sums = attention.forward(q, k, v, scale)
        return [out, *attention.backward(Backward(gradient, q, k, v, out, sums, scale))]
    heads = (q.size(1), k.size(1))
    inputs, outputs = HeadSplit(grid, *heads), HeadSplit(grid, heads[0], heads[0])
    q, k, v = inputs.give([q, k, v])
    (gradient,) = outputs.give([gradient])
    places = HeadSplit.kv_places(grid.head_rank, *heads, grid.heads_split)
    used = list(range(k.size(1))) if places is None else places
    k_used, v_used = k[:, used], v[:, used]
    out, sums = attention.forward(q, k_used, v_used, scale)
    grads = attention.backward(Backward(gradient, q, k_used, v_used, out, sums, scale))
    grad_kv = [torch.zeros_like(k).index_add_(1, torch.tensor(used), grad) for grad in grads[1:]]
    (out,) = outputs.take_back([out])
    return [out, *inputs.take_back([grads[0], *grad_kv])]


def largest_error(
    cp, rows, length, heads, mask, method, expected, inputs, balanced_for=None, kernels=calls_of
):
    """Of the output and of dQ, dK and dV, over all ranks."""
    schedule, rotate, parts = METHODS[method] if isinstance(method, str) else method
    parts = parts or cp
    batch = {"tokens": torch.zeros(len(rows), length), "seq_lens": seq_lens_of(rows)}
    layout = balanced_layout(
        documents_of(batch),
        (len(rows), length),
        cp,
        AttentionMask(*(balanced_for or mask)),
        heads_split=parts,
    )
    # Every token is somewhere, once.
    places = layout.indices.flatten()
    held = torch.bincount(places[places >= 0], minlength=len(rows) * length)
    assert torch.equal(held, is_token(rows, length).flatten().long())
    flat = [t.transpose(1, 2).flatten(0, 1) for t in inputs]
    one_rank = partial(
        _on_one_rank,
        layout=layout,
        flat=flat,
        method=schedule,
        rotate=rotate,
        mask=AttentionMask(*mask),
        kernels=kernels,
    )
    by_rank = simulate(cp, one_rank, parts)
    errors = []
    for mine, right in zip(zip(*by_rank, strict=True), expected, strict=True):
        assert all(part.isfinite().all() for part in mine)
        whole = restore(layout, mine, 2)
        assert whole.shape == right.shape
        real = is_token(rows, length)[:, None, :, None]
        errors.append(((whole - right) * real).abs().max().item())
    return max(errors)


def _errors(documents, cps, masks=MASKS, kv_heads=(4, 1), **options):
    for name, kv, mask in itertools.product(documents, kv_heads, masks):
        rows, length = documents[name]
        inputs = random_inputs(rows, length, 4, kv, HEAD_DIM)
        expected = output_and_gradients(
            rows, inputs, lambda n, mask=mask: distances_shown(n, *masks[mask])
        )
        for cp, method in itertools.product(cps, METHODS):
            given = (cp, rows, length, 4, masks[mask], method, expected, inputs)
            error = largest_error(*given, **options)
            yield (name, kv, mask, cp, method), error


def test_each_method_equals_attention_written_out():
    errors = dict(_errors(DOCUMENTS, (2, 4)))
    assert len(errors) == len(DOCUMENTS) * 2 * len(MASKS) * 2 * len(METHODS)
    assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}


#: As Llama 4 has them; a chunk may end in the middle of a rank's piece.
CHUNKS = {
    "chunks": (True, None, 16),
    "chunks, bidirectional": (False, None, 37),
    "chunks with a window": (True, 9, 24),
}


def test_chunks_of_documents_are_done_too():
    documents = {name: DOCUMENTS[name] for name in ("one", "many", "padded")}
    errors = dict(_errors(documents, (2, 4), CHUNKS, kv_heads=(2,)))
    assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}


def test_a_layout_that_is_balanced_for_one_mask_does_every_other():
    """Layers that differ share one layout."""
    documents = {name: DOCUMENTS[name] for name in ("one", "padded", "one_huge")}
    for balanced_for in ((True, None), (False, 9), (True, None, 16)):
        wanted = {**MASKS, **CHUNKS}
        errors = dict(_errors(documents, (4,), wanted, kv_heads=(1,), balanced_for=balanced_for))
        assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}


@pytest.mark.slow
def test_each_method_equals_attention_written_out_on_large_packs():
    masks = {"causal": (True, None), "bidirectional": (False, None), "window": (True, 700)}
    errors = dict(_errors(LARGE_DOCUMENTS, (2, 4), masks))
    assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}


#: Degree, parts of the heads, query heads, KV heads: KV heads split, shared by ranks, shared unevenly.
HEAD_SPLITS = [(4, 2, 4, 2), (4, 2, 4, 1), (4, 4, 8, 2), (6, 3, 6, 2), (6, 6, 12, 4), (8, 4, 4, 4)]


@pytest.mark.parametrize(("cp", "parts", "heads", "kv_heads"), HEAD_SPLITS)
def test_rings_of_ranks_that_share_heads_equal_attention_written_out(cp, parts, heads, kv_heads):
    rows, length = [[90, 40, 3], [25, 25, 50]], 140
    inputs = random_inputs(rows, length, heads, kv_heads, HEAD_DIM)
    for mask in MASKS.values():
        expected = output_and_gradients(rows, inputs, lambda n, m=mask: distances_shown(n, *m))
        for rotate in ("allgather", "alltoall"):
            method = ("ring", rotate, parts)
            error = largest_error(cp, rows, length, heads, mask, method, expected, inputs)
            assert error < TOLERANCE, (mask, rotate)


_masks = st.tuples(st.booleans(), st.one_of(st.none(), st.integers(1, 40)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    cp=st.sampled_from([2, 3, 4, 8]),
    mask=_masks,
    method=st.sampled_from(["ring", "ring_alltoall", "allgather"]),
    padding=st.integers(0, 5),
)
def test_random_documents(lengths, cp, mask, method, padding):
    rows, length = [lengths], sum(lengths) + padding
    inputs = random_inputs(rows, length, 2, 1, HEAD_DIM)
    expected = output_and_gradients(rows, inputs, lambda n: distances_shown(n, *mask))
    assert largest_error(cp, rows, length, 2, mask, method, expected, inputs) < TOLERANCE


def _reference_varlen(q, k, v, cu_q, cu_k, max_q, max_k, left, right, scale):
    """What flash attention's variable-length operator computes, segment by segment."""
    outs, sums = [], []
    for i in range(len(cu_q) - 1):
        out, logsumexp = _segment(q, k, v, cu_q, cu_k, i, left, right, scale)
        outs.append(out.transpose(0, 1))
        sums.append(logsumexp)
        assert out.size(1) <= max_q
    return torch.cat(outs), torch.cat(sums, 1)


def _segment(q, k, v, cu_q, cu_k, i, left, right, scale):
    q, k, v = (t[cu[i] : cu[i + 1]].transpose(0, 1) for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
    groups = q.size(0) // k.size(0)
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    nq, nk = q.size(1), k.size(1)
    # Written as flash attention documents it: aligned at the last query and key.
    row, column = torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)
    shown = torch.ones(nq, nk, dtype=torch.bool)
    shown &= True if left is None else column >= row - left
    shown &= True if right is None else column <= row + right
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~shown, float("-inf"))
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp[..., None]).exp() @ v, logsumexp


def _reference_varlen_backward(given, *sizes_limits):
    gradient, q, k, v, out, sums, scale = given
    cu_q, cu_k, _, _, left, right = sizes_limits
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    for i in range(len(cu_q) - 1):
        with torch.enable_grad():
            part, own = _segment(*inputs, cu_q, cu_k, i, left, right, scale)
        here = slice(cu_q[i], cu_q[i + 1])
        # P of all keys = P of these x exp(own sum - sum of all); and delta belongs to the whole output.
        share = (own.detach() - sums[:, here]).exp()
        d_out = gradient[here].transpose(0, 1)
        delta = (d_out * out[here].transpose(0, 1)).sum(-1)
        d_part = d_out * share[..., None]
        d_own = (d_part * part.detach()).sum(-1) - delta * share
        torch.autograd.backward([part, own], [d_part, d_own])
    return tuple(t.grad for t in inputs)


@pytest.mark.parametrize("kind", ["varlen", "plain"])
def test_the_calls_of_other_devices_do_the_same_tiles(monkeypatch, kind):
    """The variable-length kernel is replaced by what it computes; which calls are made is the CUDA path's."""
    if kind == "varlen":
        monkeypatch.setattr(kernels.torch_private, "flash_varlen", _reference_varlen)
        monkeypatch.setattr(
            kernels.torch_private, "flash_varlen_backward", _reference_varlen_backward
        )
        chosen = lambda tiles, device, _: [  # noqa: E731
            kernels.VarlenCall(group, device) for group in kernels.by_limits(tiles)
        ]
    else:
        chosen = lambda tiles, device, _: [  # noqa: E731
            kernels.PlainCall(part) for part in kernels.at_most(tiles, 24)
        ]
    documents = {name: DOCUMENTS[name] for name in ("halving", "padded", "one_huge")}
    errors = dict(_errors(documents, (4,), kv_heads=(2,), kernels=chosen))
    assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}
