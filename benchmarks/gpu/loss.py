"""The chunked loss on the GPU against float64, and its peak memory against whole logits.

Shape legend: N tokens, d embedding, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measure import peak_memory, relative_error
from benchmarks.gpu.report import Report, Setting, short

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IGNORE_INDEX = -100

#: Of the loss: a mean over thousands of tokens of rounding errors of either sign.
LOSS_TOLERANCES = {"fp32": 1e-6, "bf16": 1e-3}

#: Of the two gradients, 2-norm. bf16: logits, their gradient and the result are rounded once each, to
#: about eps / 5 in the mean square, so 2 eps leaves room. fp32: sums of d = 4096 or N terms.
GRAD_TOLERANCES = {"fp32": 1e-5, "bf16": 2 * 2**-7}

#: Peak of the chunked loss over that of whole logits at 16,384 tokens (8 chunks). Both need the
#: head's gradient, [v, d] (ours adds it up in float32), which chunks cannot shrink.
MEMORY_TOLERANCE = 0.4


def make_inputs(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, d] of unit variance, a head [v, d], labels [N] with every tenth ignored."""
    n, d, v = sizes
    g = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(n, d, generator=g, device=device).to(dtype)
    weight = (torch.randn(v, d, generator=g, device=device) * 0.02).to(dtype)
    labels = torch.randint(v, (n,), generator=g, device=device)
    labels[::10] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and both gradients by autograd on float64 logits, `rows` tokens at a time."""
    w = weight.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    grads = []
    for start in range(0, hidden.size(0), rows):
        h = hidden.detach()[start : start + rows].double().requires_grad_()
        loss = F.cross_entropy(
            h @ w.t(), labels[start : start + rows], ignore_index=IGNORE_INDEX, reduction="sum"
        )
        loss.backward()
        assert h.grad is not None
        total += loss.detach()
        grads.append(h.grad)
    assert w.grad is not None
    return total, torch.cat(grads), w.grad


def check_accuracy(
    dtype_name: str, sizes: tuple[int, int, int], device: torch.device
) -> dict[str, Any]:
    """Loss and gradients against the reference on the same, already rounded, inputs."""
    from torchtune_cp.training.loss import LinearCrossEntropyLoss

    hidden, weight, labels = make_inputs(sizes, DTYPES[dtype_name], device)
    loss = LinearCrossEntropyLoss()(hidden[None], weight, labels[None])
    # A scale of its own: backward must pass on the incoming gradient.
    (loss * 0.5).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    expected, grad_hidden, grad_weight = reference(hidden, weight, labels)
    with torch.no_grad():
        without_grad = LinearCrossEntropyLoss()(hidden[None], weight, labels[None])
    errors = {
        "loss_error": abs(loss.item() / expected.item() - 1),
        "no_grad_loss_error": abs(without_grad.item() / expected.item() - 1),
        "grad_hidden_error": relative_error(hidden.grad, 0.5 * grad_hidden),
        "grad_weight_error": relative_error(weight.grad, 0.5 * grad_weight),
    }
    limits = [LOSS_TOLERANCES[dtype_name]] * 2 + [GRAD_TOLERANCES[dtype_name]] * 2
    good = all(e <= limit for e, limit in zip(errors.values(), limits, strict=True))
    return {"status": "passed" if good else "failed", **errors}


def check_memory(
    dtype_name: str, sizes: tuple[int, int, int], device: torch.device
) -> dict[str, Any]:
    """Peak of forward and backward, chunked and with whole logits."""
    from torchtune_cp.training.loss import LinearCrossEntropyLoss

    hidden, weight, labels = make_inputs(sizes, DTYPES[dtype_name], device)
    with peak_memory(device) as chunked:
        LinearCrossEntropyLoss()(hidden[None], weight, labels[None]).backward()
    hidden.grad = weight.grad = None
    row: dict[str, Any] = {"chunked_peak_MiB": round(chunked.bytes / 2**20, 2)}
    try:
        with peak_memory(device) as whole:
            logits = (hidden @ weight.t()).float()
            F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum").backward()
    except torch.OutOfMemoryError as error:
        return {"status": "out_of_memory", **row, "whole_logits_error": short(error)}
    ratio = chunked.bytes / whole.bytes
    return {
        "status": "passed" if ratio <= MEMORY_TOLERANCE else "failed",
        **row,
        "whole_peak_MiB": round(whole.bytes / 2**20, 2),
        "ratio": ratio,
        "tolerance": MEMORY_TOLERANCE,
    }


def run(setting: Setting) -> str:
    """Check accuracy and memory; returns the part's status."""
    device = torch.device(setting.device)
    # Llama 3 8B's head. The rehearsal keeps tokens, d and v in proportion for the memory's sake.
    accuracy, memory = (2048, 4096, 128_256), (16_384, 4096, 128_256)
    if setting.rehearsal:
        accuracy, memory = (300, 64, 1000), (2048, 64, 2048)
    report = Report(
        "loss",
        setting,
        tolerances={
            **{f"loss_{name}": value for name, value in LOSS_TOLERANCES.items()},
            **{f"gradients_{name}": value for name, value in GRAD_TOLERANCES.items()},
            "memory_ratio": MEMORY_TOLERANCE,
            "reason": "relative to float64 on the same rounded inputs; gradients 2 eps in bf16;"
            " see benchmarks/gpu/loss.py",
        },
        notes={"memory": "peak of forward and backward above inputs and weight"},
    )
    for what, check, sizes in (
        ("accuracy", check_accuracy, accuracy),
        ("memory", check_memory, memory),
    ):
        for dtype in ("fp32", "bf16") if what == "accuracy" else ("bf16",):
            named = dict(zip(("tokens", "embed_dim", "vocab_size"), sizes, strict=True))
            try:
                row = check(dtype, sizes, device)
            except torch.OutOfMemoryError as error:
                row = {"status": "out_of_memory", "error": short(error)}
            report.add(row.pop("status"), check=what, dtype=dtype, **named, **row)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return report.finish()
