"""Training steps of two layers of Llama 3 8B at long sequences on one GPU.

Two layers, not 32, so that optimizer state leaves the memory to activations; tokens per second are
those of this model, and what carries over to the whole one is the utilisation.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.report import Report, Setting, short

#: Dense bf16 peaks of the makers' data sheets, FLOP/s, by the start of torch's device name. The
#: longer name first.
PEAK_FLOPS = {
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
}

#: Standard deviation of the random weights.
INIT_STD = 0.02

#: The loss of random weights on random tokens is ln(vocabulary) + half the logits' variance, which is
#: embed_dim x INIT_STD^2 behind the last norm, and the few steps here are too small to move it far:
#: further off than this, something else was computed.
LOSS_TOLERANCE = 0.3

SHAPE: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_layers": 2,
    "num_heads": 32,
    "num_kv_heads": 8,
    "embed_dim": 4096,
    "intermediate_dim": 14_336,
}
REHEARSAL_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 224,
}


def flops_per_step(shape: dict[str, Any], seq_len: int) -> dict[str, int]:
    """Floating-point operations of a training step on one sequence; a multiply-add counts as two.

    `model`: forward and twice that for backward (the gradients of both factors of each product).
    Counted are the products of the layers and of the head, and attention's two products over exactly
    the `s (s + 1) / 2` pairs that a causal mask leaves. Recomputation is no model FLOP, nor are
    the embedding's lookup, norms, rotations and the softmax.
    `executed`: with the second forward pass of the layers that activation checkpointing makes (not
    what a fused attention kernel recomputes inside).

    Args:
        shape: Sizes of the model, all of its layers checkpointed.
        seq_len: s.
    """
    d = shape["embed_dim"]
    kv_dim = d // shape["num_heads"] * shape["num_kv_heads"]
    weights = 2 * d * d + 2 * d * kv_dim + 3 * d * shape["intermediate_dim"]
    attention = 2 * 2 * d * (seq_len * (seq_len + 1) // 2)
    layers = shape["num_layers"] * (2 * weights * seq_len + attention)
    head = 2 * d * shape["vocab_size"] * seq_len
    model = 3 * (layers + head)
    return {
        "model": model,
        "executed": model + layers,
        "attention": 3 * shape["num_layers"] * attention,
    }


def measured_matmul_flops(device: torch.device, size: int) -> float:
    """FLOP/s of a square bf16 product: what this very device reaches under this load."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        _wait(device)
        seconds.append((time.perf_counter() - start) / 4)
    return 2 * size**3 / statistics.median(seconds[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trainer:
    """The recipe's step on a model of `shape`: FSDP2 of one rank, bf16, AdamW, checkpointed layers.

    Args:
        shape: Sizes of the model.
        device: Where it trains.
        max_seq_len: The longest sequence.
    """

    def __init__(self, shape: dict[str, Any], device: torch.device, max_seq_len: int) -> None:
        from torch.distributed.tensor import DTensor

        from torchtune_cp.distributed import Meshes, ParallelDims
        from torchtune_cp.distributed.fsdp import shard_model
        from torchtune_cp.models.llama3 import llama3
        from torchtune_cp.training.loss import LinearCrossEntropyLoss
        from torchtune_cp.training.memory import apply_activation_checkpointing

        self.device = device
        self.vocab_size = shape["vocab_size"]
        self.meshes = Meshes.build(ParallelDims(1, 1, 1, 1, 1), device.type)
        with torch.device("meta"):
            self.model = llama3(**shape, max_seq_len=max_seq_len)
        apply_activation_checkpointing(self.model)
        shard_model(self.model, self.meshes.fsdp, dtype=torch.bfloat16)
        self.model.to_empty(device=device)
        torch.manual_seed(0)
        with torch.no_grad():  # on the device: 1.5 billion numbers would take the CPU half a minute
            for name, parameter in self.model.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if name.endswith("scale"):
                    local.fill_(1.0)
                else:
                    local.normal_(0.0, INIT_STD)
        self.loss_fn = LinearCrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens: torch.Tensor) -> float:
        """Train on one sequence, [1, s]; returns the mean loss of the step."""
        from torchtune_cp.distributed import context_parallel

        labels = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], dim=1)
        positions = torch.arange(tokens.size(1), device=self.device)[None]
        batch = {"tokens": tokens, "labels": labels, "input_pos": positions}
        with context_parallel(self.meshes.cp, batch) as local:
            head = partial(self.loss_fn, labels=local["labels"])
            loss = self.model(local["tokens"], local["input_pos"], output_fn=head)
            (loss / (tokens.size(1) - 1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item() / (tokens.size(1) - 1)


def measure(trainer: Trainer, shape: dict[str, Any], seq_len: int, steps: int) -> dict[str, Any]:
    """Time `steps` steps after a warm-up one.

    Raises:
        torch.OutOfMemoryError: The device is too small.
    """
    from torchtune_cp.metrics import peak_memory_bytes

    device = trainer.device
    g = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(trainer.vocab_size, (1, seq_len), generator=g).to(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [trainer.step(tokens)], []
    for _ in range(steps):
        _wait(device)
        start = time.perf_counter()
        losses.append(trainer.step(tokens))
        _wait(device)
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds)
    flops = flops_per_step(shape, seq_len)
    expected_loss = math.log(shape["vocab_size"]) + shape["embed_dim"] * INIT_STD**2 / 2
    good = all(abs(loss - expected_loss) <= LOSS_TOLERANCE for loss in losses)  # NaN fails
    return {
        "status": "passed" if good else "failed",
        "seconds": took,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_s": round(seq_len / took),
        "max_memory_allocated_GiB": round(peak_memory_bytes(device) / 2**30, 2),
        "model_flops": flops["model"],
        "attention_share": flops["attention"] / flops["model"],
        "model_flops_per_s": flops["model"] / took,
        "executed_flops_per_s": flops["executed"] / took,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "expected_loss": expected_loss,
    }


def run(setting: Setting) -> str:
    """Measure each length; returns the part's status."""
    from torchtune_cp.distributed.process_group import init_distributed

    device = init_distributed(setting.device)
    shape = REHEARSAL_SHAPE if setting.rehearsal else SHAPE
    lengths = [128, 256, 512] if setting.rehearsal else [8192, 32_768, 131_072]
    report = Report(
        "throughput",
        setting,
        tolerances={
            "losses": f"within {LOSS_TOLERANCE} of ln(vocab_size) + embed_dim x {INIT_STD}^2 / 2, the"
            " loss of random weights",
            "mfu": "above 0, below 1: at 1 or more the clock or the count is wrong",
            "reason": "no speed is asked for: the figures are the result",
        },
        notes={
            "model": f"llama {shape}, untied, random weights; bf16 compute and gathered parameters,"
            " fp32 shards and AdamW state, every layer checkpointed, eager",
            "step": "forward, backward, AdamW on one sequence of random tokens; median of the timed"
            " steps after one warm-up step",
            "mfu": "model FLOPs / seconds / the maker's dense bf16 peak. Model FLOPs: 3 x forward;"
            " products of layers and head, a multiply-add is 2; attention exactly over the"
            " s (s + 1) / 2 causal pairs; no recomputation, embedding, norms or softmax",
            "hfu": "the same with the checkpointed layers' second forward pass",
            "max_memory_allocated": "torch.cuda.max_memory_allocated over all steps of the length,"
            " model and optimizer included"
            + ("; here the peak resident set of the process" if setting.rehearsal else ""),
        },
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = next((flops for start, flops in PEAK_FLOPS.items() if name.startswith(start)), None)
    matmul = measured_matmul_flops(device, 256 if setting.rehearsal else 8192)
    report.add("passed", check="matmul", matmul_flops_per_s=matmul, peak_flops_per_s=peak)
    trainer = Trainer(shape, device, max(lengths))
    for number, seq_len in enumerate(lengths):
        try:
            row = measure(trainer, shape, seq_len, steps=5 if seq_len < 100_000 else 3)
        except torch.OutOfMemoryError as error:
            for longer in lengths[number:]:
                report.add("out_of_memory", seq_len=longer, error=short(error))
            break
        row["share_of_measured_matmul"] = row["model_flops_per_s"] / matmul
        row["mfu"] = None if peak is None else row["model_flops_per_s"] / peak
        row["hfu"] = None if peak is None else row["executed_flops_per_s"] / peak
        if row["mfu"] is not None and not 0 < row["mfu"] < 1:
            row["status"] = "failed"
        report.add(row.pop("status"), seq_len=seq_len, **row)
    torch.distributed.destroy_process_group()
    return report.finish()
