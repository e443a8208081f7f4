"""Attention over documents through the context manager, autograd and real process groups.

The full set of documents, masks and degrees is in test_document_parity.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.distributed.dispatch_watchers import BytesSent
from tests.distributed.harness import run_ranks
from tests.distributed.written_out import (
    DOCUMENTS,
    MASKS,
    distances_shown,
    is_token,
    output_and_gradients,
    random_inputs,
    seq_lens_of,
)
from torchtune_cp.distributed import ContextParallelOptions, context_parallel, unshard
from torchtune_cp.errors import UserError

HEADS, HEAD_DIM, TOLERANCE = 4, 8, 1e-10
METHODS = {
    "ring": {"method": "ring"},
    "ring_alltoall": {"method": "ring", "rotate_method": "alltoall"},
    "allgather": {"method": "allgather"},
    "ulysses": {"method": "ulysses"},
    "ulysses_and_ring": {"method": "ulysses", "ulysses_dim": 2},
}
#: Which documents, mask, KV heads; every method does each.
CASES = [("one_huge", "causal", 1), ("padded", "window", 2), ("padded", "bidirectional", 4)]


def _batch(rows, length):
    tokens = torch.arange(len(rows) * length).view(len(rows), length)
    return {"tokens": tokens, "seq_lens": seq_lens_of(rows)}


def _local(tensor, index):
    """This rank's tokens of [b, h, s, d]; on padding the first token's values, which must not matter."""
    return tensor.transpose(1, 2).flatten(0, 1)[index].transpose(1, 2).detach().clone()


def _attend(q, k, v, is_causal, call=None):
    gqa = q.size(1) != k.size(1)
    sdpa = lambda *t: F.scaled_dot_product_attention(*t, is_causal=is_causal, enable_gqa=gqa)  # noqa: E731
    return sdpa(q, k, v) if call is None else call(sdpa, q, k, v)


def _context(mesh, batch, *, is_causal=True, method="ring", rotate_method="allgather", **rarer):
    return context_parallel(
        mesh,
        batch,
        is_causal=is_causal,
        method=method,
        rotate_method=rotate_method,
        options=ContextParallelOptions(**rarer),
    )


def errors_of(mesh, rows, length, inputs, expected, is_causal, window, call=None, **options):
    """Largest error of the output and of dQ, dK, dV on this rank's tokens."""
    with _context(
        mesh, _batch(rows, length), is_causal=is_causal, window=window, **options
    ) as local:
        if mesh is None:
            *parts, gradient = (t.detach().clone() for t in inputs)
            right, real = expected, is_token(rows, length)
        else:
            index = local["tokens"]
            *parts, gradient = (_local(t, index) for t in inputs)
            right = [_local(t, index) for t in expected]
            real = (local.layout.indices[mesh.get_local_rank()] >= 0)[None]
        for part in parts:
            part.requires_grad_()
        out = _attend(*parts, is_causal, call)
        (out * gradient).sum().backward()
    got = [out.detach(), *(t.grad for t in parts)]
    assert all(t.isfinite().all() for t in got)
    real = real[:, None, :, None]
    return max(((a - b) * real).abs().max().item() for a, b in zip(got, right, strict=True))


def _case(name, mask, kv_heads):
    rows, length = DOCUMENTS[name]
    inputs = random_inputs(rows, length, HEADS, kv_heads, HEAD_DIM)
    is_causal, window = MASKS[mask]
    expected = output_and_gradients(rows, inputs, lambda n: distances_shown(n, is_causal, window))
    return rows, length, inputs, expected, is_causal, window


def test_a_single_rank_keeps_documents_and_windows_too():
    for name in DOCUMENTS:
        for mask in MASKS:
            assert errors_of(None, *_case(name, mask, 2)) < TOLERANCE, (name, mask)


def _parity(mesh):
    errors = {}
    for case in CASES:
        given = _case(*case)
        for method, options in METHODS.items():
            errors[(*case, method)] = errors_of(mesh, *given, **options)
    return errors


def _recomputed(mesh):
    """Under activation checkpointing, and compiled: how many graphs batches of all kinds need."""
    counter = CompileCounterWithBackend("aot_eager")

    def checkpointed(sdpa, *tensors):
        return checkpoint(sdpa, *tensors, use_reentrant=False)

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(q, k, v):
        out = F.scaled_dot_product_attention(q * 1, k * 1, v, is_causal=True, enable_gqa=True)
        return out + 0

    errors, graphs = {}, {}
    for method in ("ring", "ulysses"):
        torch._dynamo.reset()
        counter.clear()
        for name in ("padded", "one_huge", "halving", "many"):
            given, options = _case(name, "causal", 2), METHODS[method]
            errors[name, method, "checkpointed"] = errors_of(
                mesh, *given, call=checkpointed, **options
            )
            errors[name, method, "compiled"] = errors_of(
                mesh, *given, call=lambda _, *t: compiled(*t), **options
            )
        graphs[method] = counter.frame_count
    return errors, graphs


def _first_logits_of_each(mesh, options):
    """Outputs of all documents, then again with one token of the second document changed."""
    rows, length = [[50, 40, 9, 30], [70, 3]], 130
    results = []
    for changed in (False, True):
        q, k, v, _ = random_inputs(rows, length, HEADS, 2, HEAD_DIM, torch.float32)
        if changed:
            for t in (q, k, v):
                t[0, :, 50] += 1.0  # the first token of the second document
        with _context(mesh, _batch(rows, length), **options) as local:
            parts = [_local(t, local["tokens"]) for t in (q, k, v)]
            out = _attend(*parts, True)
        results.append(unshard(out, mesh, layout=local.layout, dim=2))
    before, after = results
    differs = (before != after).any(1).any(-1)
    same_elsewhere = not (differs[0, :50].any() or differs[0, 90:].any() or differs[1].any())
    return same_elsewhere, bool(differs[0, 50:90].all())


def _bytes(mesh, options):
    """Bytes sent forward and backward for one document, and for one short document a rank."""
    cp, counts = mesh.size(), []
    for rows in ([[512]], [[64] * 8]):
        with _context(mesh, _batch(rows, 512), **options) as local:
            n = local["tokens"].size(1)
            q = torch.randn(1, n, 8, HEAD_DIM).transpose(1, 2).requires_grad_()
            k, v = (
                torch.randn(1, n, 4, HEAD_DIM).transpose(1, 2).requires_grad_() for _ in range(2)
            )
            with BytesSent() as forward:
                out = _attend(q, k, v, True)
            with BytesSent() as backward:
                out.sum().backward()
        counts.append((sum(forward.sent.values()), sum(backward.sent.values())))
    return cp, counts


def _refused(mesh):
    batch = _batch([[20, 12]], 32)
    q = torch.randn(1, 3, 32 // mesh.size(), 8)
    said = {}

    def attempt(name, fn):
        try:
            fn()
        except (UserError, NotImplementedError, RuntimeError) as e:
            said[name] = f"{type(e).__name__}: {e}"

    def inside(options, call):
        with _context(mesh, batch, **options):
            call()

    sdpa = lambda **kw: F.scaled_dot_product_attention(q, q, q, **kw)  # noqa: E731
    before = F.scaled_dot_product_attention
    attempt("heads", lambda: inside({"method": "ulysses"}, lambda: sdpa(is_causal=True)))
    attempt("causal", lambda: inside({}, lambda: sdpa()))
    attempt("mask", lambda: inside({}, lambda: sdpa(attn_mask=torch.ones(1), is_causal=True)))
    attempt("method", lambda: inside({"method": "rings"}, lambda: None))
    attempt("ulysses_dim", lambda: inside({"method": "ulysses", "ulysses_dim": 3}, lambda: None))
    attempt("mask_mod", lambda: inside({"mask_mod": lambda b, h, q, k: q >= k}, lambda: None))
    attempt("nested", lambda: inside({}, lambda: inside({}, lambda: None)))
    attempt(
        "length",
        lambda: inside(
            {},
            lambda: F.scaled_dot_product_attention(
                q[:, :, 1:], q[:, :, 1:], q[:, :, 1:], is_causal=True
            ),
        ),
    )
    leaf = q.clone().requires_grad_()
    with context_parallel(mesh, batch):
        late = F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True).sum()
    attempt("outside", late.backward)
    return said, F.scaled_dot_product_attention is before


def _chunked(b, h, q, k):
    """Chunked attention: causal within chunks of 16 tokens, head 0 without chunks."""
    return (q >= k) & ((q // 16 == k // 16) | (h == 0))


def _mask_mod(mesh):
    rows, length = DOCUMENTS["padded"]
    inputs = random_inputs(rows, length, HEADS, 2, HEAD_DIM)
    position = lambda n: (torch.arange(n)[:, None], torch.arange(n))  # noqa: E731
    head = torch.arange(HEADS)[:, None, None]
    shown = lambda n: _chunked(None, head, *position(n))  # noqa: E731
    expected = output_and_gradients(rows, inputs, shown)
    options = {"method": "allgather", "mask_mod": _chunked}
    return errors_of(mesh, rows, length, inputs, expected, True, None, **options)


def test_a_mask_function_on_a_single_rank():
    assert _mask_mod(None) < TOLERANCE


def _all_of_it():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))
    return {
        "parity": _parity(mesh),
        "recomputed": _recomputed(mesh),
        "untouched": {name: _first_logits_of_each(mesh, o) for name, o in METHODS.items()},
        "bytes": {name: _bytes(mesh, options) for name, options in METHODS.items()},
        "refused": _refused(mesh),
        "mask_mod": _mask_mod(mesh),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("cp", [2, 4])
def test_documents_over_process_groups(cp):
    for rank in run_ranks(cp, _all_of_it):
        wrong = {case: e for case, e in rank["parity"].items() if not e < TOLERANCE}
        assert wrong == {}
        assert len(rank["parity"]) == len(CASES) * len(METHODS)
        errors, graphs = rank["recomputed"]
        assert {case: e for case, e in errors.items() if not e < TOLERANCE} == {}
        # One for the first batch, one for all lengths: the documents are not part of the graph.
        assert all(0 < count <= 2 for count in graphs.values()), graphs
        # Case N5: the others bit by bit the same; the changed one not, from its changed token on.
        assert rank["untouched"] == dict.fromkeys(METHODS, (True, True))
        assert rank["mask_mod"] < TOLERANCE
        for name, (degree, counts) in rank["bytes"].items():
            (forward, backward), (forward_short, backward_short) = counts
            expected = _bytes_expected(name, degree)
            assert forward == pytest.approx(expected[0], rel=0.05), name
            assert backward == pytest.approx(expected[1], rel=0.05), name
            if not name.startswith("ulysses"):
                assert forward_short == backward_short == 0, "whole documents stay where they are"
        said, restored = rank["refused"]
        assert restored
        assert "num_heads=3" in said["heads"]
        assert "context_parallel_ulysses_dim" in said["heads"]
        assert "is_causal=False" in said["causal"]
        assert "mask" in said["mask"]
        assert "ring, allgather, ulysses" in said["method"]
        assert "3 does not divide context_parallel_dim" in said["ulysses_dim"]
        assert "context_parallel_method: must be allgather" in said["mask_mod"]
        assert "inside another" in said["nested"]
        assert "uncut" in said["length"]
        assert "enclose forward and backward" in said["outside"]


def _bytes_expected(method, cp):
    """The formulas of docs/context_parallel.md for 512 tokens, 8 query and 4 KV heads, float32."""
    kv = 2 * 512 * 4 * HEAD_DIM * 4
    q = 512 * 8 * HEAD_DIM * 4
    if method.startswith("ulysses"):
        parts = 2 if method == "ulysses_and_ring" else cp
        rings = cp // parts
        to_heads = (parts - 1) / parts * (q + kv) / cp
        to_tokens = (parts - 1) / parts * q / cp
        ring = (rings - 1) / rings * kv / parts
        return to_heads + to_tokens + ring, to_heads + to_tokens + 2 * ring
    return (cp - 1) / cp * kv, 2 * (cp - 1) / cp * kv
