"""Attention over packed documents with the kernels of the GPU, against plain attention in float64.

Half precision takes variable-length flash calls, fp32 plain operators, a mask function FlexAttention. One
rank: what several ranks do differently (the exchange, the merging) has nothing of the device in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.attention import DTYPES, ROW_FACTOR, TOLERANCES
from benchmarks.gpu.measure import relative_error, worst_row_error
from benchmarks.gpu.report import Report, Setting, short
from torchtune_cp.distributed import ContextParallelOptions, context_parallel

HEADS, KV_HEADS = 8, 2
#: Document lengths by row; what is left of a row is padding.
DOCUMENTS = {
    "halving": [[2048, 1024, 512, 256, 128, 128]],
    "many": [[1 + (37 * i) % 200 for i in range(64)]],
    "padded rows": [[1500, 1, 300], [700]],
}
REHEARSED = {"small": [[40, 20, 1, 3], [30]]}


def _in_chunks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q // 16 == k // 16)


#: Which keys a query sees, by their positions in the document: query [n, 1], key [n].
MASKS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": ({}, lambda q, k: q >= k),
    "bidirectional": ({"is_causal": False}, lambda q, k: (q >= 0) & (k >= 0)),
    "window": (
        {"options": ContextParallelOptions(window=17)},
        lambda q, k: (q >= k) & (q - k < 17),
    ),
    "mask function": (
        {"method": "allgather", "options": ContextParallelOptions(mask_mod=_in_chunks)},
        lambda q, k: (q >= k) & (q // 16 == k // 16),
    ),
    "chunk": (
        {"options": ContextParallelOptions(chunk=16)},
        lambda q, k: (q >= k) & (q // 16 == k // 16),
    ),
}


def _written_out(
    rows: list[list[int]], inputs: list[Tensor], seen: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """Output, dQ, dK and dV, each document alone, in float64."""
    query, key, value = (t.double().requires_grad_() for t in inputs[:3])
    out = torch.zeros_like(query)
    for row, lengths in enumerate(rows):
        start = 0
        for n in lengths:
            here = slice(start, start + n)
            position = torch.arange(n, device=query.device)
            out[row, :, here] = F.scaled_dot_product_attention(
                *(t[row : row + 1, :, here] for t in (query, key, value)),
                attn_mask=seen(position[:, None], position),
                enable_gqa=True,
            )[0]
            start += n
    grads = torch.autograd.grad((out * inputs[3].double()).sum(), (query, key, value))
    return [out.detach(), *grads]


def _case(
    rows: list[list[int]], mask: str, dtype: str, head_dim: int, device: torch.device
) -> dict[str, Any]:
    options, seen = MASKS[mask]
    length = max(map(sum, rows)) + 5
    most = max(map(len, rows))
    seq_lens = torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])
    g = torch.Generator().manual_seed(length)
    inputs = [
        torch.randn(len(rows), length, h, head_dim, generator=g).to(device, DTYPES[dtype])
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    inputs = [t.transpose(1, 2) for t in inputs]
    ends = seq_lens.sum(1, keepdim=True)
    inputs[3] = inputs[3] * (torch.arange(length) < ends).to(device)[:, None, :, None]
    expected = _written_out(rows, inputs, seen)
    parts = [t.detach().clone().requires_grad_() for t in inputs[:3]]
    batch = {
        "tokens": torch.zeros(len(rows), length, dtype=torch.int64, device=device),
        "seq_lens": seq_lens,
    }
    with context_parallel(None, batch, **options):
        out = F.scaled_dot_product_attention(
            *parts, is_causal=options.get("is_causal", True), enable_gqa=True
        )
        grads = torch.autograd.grad((out * inputs[3]).sum(), parts)
    results = [out.detach(), *grads]
    names = ("out", "dq", "dk", "dv")
    pairs = list(zip(results, expected, strict=True))
    errors = {name: relative_error(*pair) for name, pair in zip(names, pairs, strict=True)}
    rows_off = max(worst_row_error(*pair) for pair in pairs)
    limit = TOLERANCES[dtype]
    good = all(e <= limit for e in errors.values()) and rows_off <= ROW_FACTOR * limit
    return {
        "status": "passed" if good else "failed",
        **{f"{name}_error": error for name, error in errors.items()},
        "worst_row_error": rows_off,
        "tolerance": limit,
    }


def run(setting: Setting) -> str:
    """Check attention over documents; returns the part's status."""
    device = torch.device(setting.device)
    head_dim = 16 if setting.rehearsal else 128
    report = Report(
        "documents",
        setting,
        tolerances={
            **{f"relative_error_{name}": value for name, value in TOLERANCES.items()},
            "worst_row_error": f"{ROW_FACTOR} times the dtype's",
            "reason": "see TOLERANCES in benchmarks/gpu/attention.py",
        },
        notes={"shapes": f"{HEADS} heads, {KV_HEADS} KV heads of {head_dim}, one rank"},
    )
    for name, rows in (REHEARSED if setting.rehearsal else DOCUMENTS).items():
        for mask in MASKS:
            for dtype in DTYPES:
                described = {"documents": name, "mask": mask, "dtype": dtype}
                try:
                    row = _case(rows, mask, dtype, head_dim, device)
                except torch.OutOfMemoryError as error:
                    report.add("out_of_memory", **described, error=short(error))
                    continue
                except (RuntimeError, NotImplementedError) as error:
                    report.add("failed", **described, error=short(error))
                    continue
                report.add(row.pop("status"), **described, **row)
    return report.finish()
