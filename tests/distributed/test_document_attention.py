"""Attention over documents, in every method, against masked attention written out in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from torchtune_cp.distributed import context_parallel, unshard

HEADS, HEAD_DIM = 4, 8
TOLERANCE = 1e-10

#: Document lengths by row of the batch, and the length of a row (what is left is padding).
DOCUMENTS = {
    "one": ([[171]], 171),
    "halving": ([[128, 64, 32, 16, 8, 8]], 256),
    "many": ([[1 + (37 * i) % 50 for i in range(32)], [1 + (61 * i) % 40 for i in range(32)]], 1024),
    "one_huge": ([[400, *[3] * 20]], 460),
    "of_one_token": ([[1] * 9], 9),
    "padded": ([[60, 17, 0], [100, 0, 0], [0, 0, 0]], 128),
}
#: Issue 5's own sizes.
LARGE_DOCUMENTS = {
    "halving": ([[2048, 1024, 512, 256, 128, 128]], 4096),
    "many": ([[1 + (37 * i) % 200 for i in range(64)]], 200 * 64),
    "one_huge": ([[3000, *[5] * 40]], 3200),
}
MASKS = {"causal": (True, None), "bidirectional": (False, None), "window": (True, 23)}
MASKS["both_sides"] = (False, 9)
METHODS = {
    "ring": {"method": "ring"},
    "ring_alltoall": {"method": "ring", "rotate_method": "alltoall"},
    "allgather": {"method": "allgather"},
    "ulysses": {"method": "ulysses"},
}


def _seq_lens(rows):
    most = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])


def written_out(q, k, v, rows, is_causal, window):
    """Softmax attention of each document alone, independent of every kernel; 0 on padding."""
    out = torch.zeros_like(q)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    for row, lengths in enumerate(rows):
        start = 0
        for n in lengths:
            here = slice(start, start + n)
            start += n
            distance = torch.arange(n)[:, None] - torch.arange(n)
            hidden = distance < 0 if is_causal else torch.zeros(n, n, dtype=torch.bool)
            if window is not None:
                hidden = hidden | (distance.abs() >= window)
            scores = q[row, :, here] @ k[row, :, here].transpose(-1, -2) / q.size(-1) ** 0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[row, :, here] = weights @ v[row, :, here]
    return out


def _inputs(rows, length, kv_heads):
    g = torch.Generator().manual_seed(length + len(rows))
    return [
        torch.randn(len(rows), length, h, HEAD_DIM, generator=g, dtype=torch.float64)
        .transpose(1, 2)
        .requires_grad_()
        for h in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def errors_of(mesh, rows, length, kv_heads, is_causal, window, **options):
    """Largest error of the output and of dQ, dK, dV over all ranks."""
    *whole, weight = _inputs(rows, length, kv_heads)
    reference = written_out(*whole, rows, is_causal, window)
    expected = [reference, *torch.autograd.grad((reference * weight).sum(), whole)]
    shape = (len(rows), length)
    batch = {"tokens": torch.arange(len(rows) * length).view(shape), "seq_lens": _seq_lens(rows)}
    with context_parallel(mesh, batch, is_causal=is_causal, window=window, **options) as local:
        index = local["tokens"]
        if mesh is None:
            parts = [t.detach().clone().requires_grad_() for t in whole]
            factor = weight
        else:
            # Whatever stands on padding must not reach a token: token 0's values do here.
            flat = [t.transpose(1, 2).flatten(0, 1)[index].transpose(1, 2) for t in (*whole, weight)]
            *parts, factor = (t.detach().clone().requires_grad_() for t in flat)
        gqa = kv_heads != HEADS
        out = F.scaled_dot_product_attention(*parts, is_causal=is_causal, enable_gqa=gqa)
        (out * factor).sum().backward()
    got = [out.detach(), *(t.grad for t in parts)]
    real = torch.zeros(shape, dtype=torch.bool)
    for row, lengths in enumerate(rows):
        real[row, : sum(lengths)] = True
    errors = []
    for mine, right in zip(got, expected, strict=True):
        assert mine.isfinite().all()
        mine = unshard(mine, mesh, layout=getattr(local, "layout", None), dim=2)
        assert mine.shape == right.shape
        errors.append(((mine - right) * real[:, None, :, None]).abs().max().item())
    return errors


def _cases(documents):
    yield from itertools.product(documents, MASKS, (HEADS, 1), METHODS)


def _parity(documents):
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    return {
        case: errors_of(mesh, *documents[case[0]], case[2], *MASKS[case[1]], **METHODS[case[3]])
        for case in _cases(documents)
    }


@pytest.mark.distributed
@pytest.mark.parametrize("cp", [2, 4])
def test_each_method_equals_masked_attention_in_float64(cp):
    for errors in run_ranks(cp, _parity, DOCUMENTS):
        assert len(errors) == len(list(_cases(DOCUMENTS)))
        wrong = {case: e for case, e in errors.items() if not max(e) < TOLERANCE}
        assert not wrong
