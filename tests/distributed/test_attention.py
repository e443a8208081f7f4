"""Attention alone, through the context manager, against plain attention in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from torchtune_cp.distributed import context_parallel, unshard
from torchtune_cp.distributed.context_parallel.torch_private import cp_impl
from torchtune_cp.errors import UserError

HEADS, KV_HEADS, HEAD_DIM, BATCH = 4, 1, 16, 1


def plain_attention(q, k, v, is_causal):
    """Softmax attention written out: independent of every fused kernel."""
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    if is_causal:
        n = q.size(2)
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(-1) @ v


def _inputs(seq_len, kv_heads):
    g = torch.Generator().manual_seed(seq_len)
    shape = lambda h: (BATCH, seq_len, h, HEAD_DIM)  # noqa: E731
    return [
        torch.randn(shape(h), generator=g, dtype=torch.float64)
        for h in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def _sharded_errors(cases):
    """Largest error of the output and of dQ, dK, dV for each case, on the real tokens."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    errors = {}
    for seq_len, kv_heads, is_causal, rotate in cases:
        whole = [t.transpose(1, 2).requires_grad_() for t in _inputs(seq_len, kv_heads)[:3]]
        weight = _inputs(seq_len, kv_heads)[3].transpose(1, 2)
        reference = plain_attention(*whole, is_causal)
        (reference * weight).sum().backward()
        batch = {"tokens": torch.arange(seq_len).expand(BATCH, seq_len)}
        with context_parallel(mesh, batch, is_causal=is_causal, rotate_method=rotate) as local:
            index = local["tokens"][0]
            real = local["input_pos"][0] < seq_len
            index = torch.where(real, index, 0)
            # Padding carries values too: they must not reach a real token's output or gradient.
            parts = [t.detach()[:, :, index].clone().requires_grad_() for t in whole]
            gqa = kv_heads != HEADS
            out = F.scaled_dot_product_attention(*parts, is_causal=is_causal, enable_gqa=gqa)
            (out * (weight[:, :, index] * real[:, None])).sum().backward()
        pairs = [(out.detach(), reference.detach())]
        pairs += [(p.grad, t.grad) for p, t in zip(parts, whole, strict=True)]
        errors[seq_len, kv_heads, is_causal, rotate] = [
            (unshard(a, mesh, seq_len=seq_len, is_causal=is_causal, dim=2) - b).abs().max().item()
            for a, b in pairs
        ]
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cp", "longest_by"),
    [
        (2, ("allgather",)),
        (4, ("alltoall",)),
        # The longest is most of the test's time: each method with the other degree is slow.
        pytest.param(2, ("alltoall",), marks=pytest.mark.slow),
        pytest.param(4, ("allgather",), marks=pytest.mark.slow),
    ],
)
def test_output_and_gradients_equal_plain_attention_in_float64(cp, longest_by):
    cases = [
        (seq_len, kv_heads, True, rotate)
        for seq_len in (1, 7, 40)
        for kv_heads in (HEADS, KV_HEADS)
        for rotate in ("allgather", "alltoall")
    ]
    cases += [(2999, KV_HEADS, True, rotate) for rotate in longest_by]
    cases += [(64, KV_HEADS, False, rotate) for rotate in ("allgather", "alltoall")]
    for per_rank in run_ranks(cp, _sharded_errors, cases):
        assert len(per_rank) == len(cases)
        for case, errors in per_rank.items():
            assert max(errors) < 1e-10, (case, errors)


def _outside_and_inside():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    before = F.scaled_dot_product_attention
    batch = {"tokens": torch.arange(10)[None], "labels": torch.arange(10)[None]}
    with context_parallel(mesh, batch) as local:
        inside = F.scaled_dot_product_attention
        mask = torch.ones(6, 6, dtype=torch.bool)
        q = torch.randn(1, 2, 6, 8)
        refused = []
        for wrong in ({"attn_mask": mask}, {"dropout_p": 0.1}, {"is_causal": False}):
            try:
                F.scaled_dot_product_attention(q, q, q, **wrong)
            except NotImplementedError as e:
                refused.append(str(e))
    with context_parallel(mesh, batch):
        again = F.scaled_dot_product_attention
        try:
            with context_parallel(mesh, batch):
                raise AssertionError("the replaced function would be replaced again")
        except RuntimeError as e:
            refused.append(str(e))
    try:
        with context_parallel(mesh, batch):
            raise RuntimeError("boom")
    except RuntimeError:
        pass
    try:
        with context_parallel(mesh, batch, is_causal=False):
            raise AssertionError("10 tokens on 2 ranks need padding")
    except UserError as e:
        refused.append(str(e))
    restored = F.scaled_dot_product_attention is before
    return {
        "local": {k: v.tolist() for k, v in local.items()},
        "whole": batch["tokens"].tolist(),
        "restored": restored,
        "same_patch_twice": inside is again and inside is not before,
        "refused": refused,
        "left_in_torch": len(cp_impl._replaced_functions),
    }


@pytest.mark.distributed
def test_the_manager_cuts_head_tail_pads_and_leaves_no_trace():
    first, second = run_ranks(2, _outside_and_inside)
    assert first["local"]["tokens"] == [[0, 1, 2, 9, 0, 0]]
    assert first["local"]["labels"] == [[0, 1, 2, 9, -100, -100]]
    assert first["local"]["input_pos"] == [[0, 1, 2, 9, 10, 11]]
    assert second["local"]["tokens"] == [[3, 4, 5, 6, 7, 8]]
    assert first["whole"] == [list(range(10))]
    for rank in (first, second):
        assert rank["restored"]
        assert rank["left_in_torch"] == 0
        # torch.compile guards on the patched function: a new one each step would recompile each step.
        assert rank["same_patch_twice"]
        mask, dropout, causal, nested, padding = rank["refused"]
        assert "inside another" in nested
        assert "divides by 4" in padding
        assert "mask" in mask
        assert "dropout" in dropout
        assert "is_causal=False" in causal


def test_a_mesh_of_one_yields_the_batch_itself():
    batch = {"tokens": torch.arange(4)[None]}
    with context_parallel(None, batch) as local:
        assert local is batch
