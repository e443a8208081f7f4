"""Peak memory of steps of two layers of Llama 3 8B against what `tune plan` predicts for them.

The steps are the recipe's own, built from a config by the functions that the recipe calls.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.report import Report, Setting, short
from benchmarks.gpu.throughput import REHEARSAL_SHAPE, SHAPE
from benchmarks.planner_cases import FULL, OFFLOAD, REUSE, small_config

#: Largest relative difference of prediction and measurement. What a plan cannot know: how torch's
#: allocator rounds (512 bytes, 2 MiB), and the workspaces of cuBLAS.
TOLERANCE = 0.07


@dataclass(frozen=True)
class Case:
    """One config.

    Attributes:
        name: In the result.
        seq_len: Tokens.
        keys: Of the config, beside the model.
    """

    name: str
    seq_len: int
    keys: dict[str, Any]


def cases(*, rehearsal: bool) -> list[Case]:
    """Every layer checkpointed; then tiles; then all levers at two lengths."""
    length, tile, chunks = (128, 32, 2) if rehearsal else (32_768, 4096, 8)
    tiled = FULL | {"mlp_tile_tokens": tile}
    levers = tiled | OFFLOAD | REUSE | {"attention_head_chunks": chunks, "optimizer_on_host": True}
    return [
        Case("checkpointed", length, FULL),
        Case("checkpointed", 4 * length, FULL),
        Case("tiled MLP", 4 * length, tiled),
        Case("optimizer in backward", 4 * length, FULL | {"optimizer_in_bwd": True}),
        Case("all levers", 4 * length, levers),
        Case("all levers", 8 * length, levers),
    ]


class _Constant:
    """A checkpointer whose weights are all one number: random ones would take half a minute on the CPU."""

    def source(self, model: Any, seed: int) -> Any:
        """See `FullModelHFCheckpointer.source`."""
        from torchtune_cp.checkpointing.sources import RandomSource

        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return RandomSource(seed, shapes, lambda name, tensor, generator: tensor.fill_(0.01))


def _config(case: Case, shape: dict[str, Any], device: str) -> Any:
    model = {"max_seq_len": case.seq_len, **shape}
    return small_config(device=device, model=model, **case.keys)


def _predicted(found: list[Case], shape: dict[str, Any], device: str) -> list[tuple[int, str]]:
    """Bytes at the peak, and where it is, each planned in a separate process."""
    from torchtune_cp.config import to_typed
    from torchtune_cp.planner.processes import run_apart
    from torchtune_cp.planner.profile import Profile
    from torchtune_cp.planner.simulate import rank_profile

    tasks = [
        {
            "cfg": to_typed(_config(case, shape, device), world_size=1),
            "rank": 0,
            "world_size": 1,
            "seq_len": case.seq_len,
            "gpu": device == "cuda",
            "separate_host": True,
        }
        for case in found
    ]
    profiles: list[Profile] = run_apart(rank_profile, tasks)
    return [(profile.peak.total, str(profile.peak.location)) for profile in profiles]


def _measured(case: Case, shape: dict[str, Any], device: torch.device) -> tuple[int, float]:
    """Bytes at the peak of a step that is not the first, and its seconds.

    Raises:
        torch.OutOfMemoryError: The device is too small.
    """
    config = _config(case, shape, device.type)
    if device.type == "cpu":
        from benchmarks.planner_measured import measured_steps

        start = time.perf_counter()
        (counted,) = measured_steps([config], case.seq_len)
        return counted["peak"], time.perf_counter() - start
    from benchmarks.planner_measured import recipe_step
    from torchtune_cp.config import to_typed

    step = recipe_step(to_typed(config, world_size=1), device, _Constant())
    step(1024)  # makes the optimizer's state
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    step(case.seq_len)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), time.perf_counter() - start


def run(setting: Setting) -> str:
    """Predict and measure each case; returns the part's status."""
    from torchtune_cp.distributed.process_group import init_distributed

    shape = REHEARSAL_SHAPE if setting.rehearsal else SHAPE
    report = Report(
        "memory",
        setting,
        tolerances={
            "off_by": TOLERANCE,
            "reason": "a plan counts tensors; torch's allocator rounds them up, and libraries have"
            " workspaces of their own",
        },
        notes={
            "model": f"llama {shape}, bf16 compute, fp32 shards and AdamW state, one rank",
            "predicted": "what tune plan gives for the same config",
            "measured": "torch.cuda.max_memory_allocated over a step of the recipe after a short first one"
            + ("; here live bytes of tensors" if setting.rehearsal else ""),
            "seconds": "of that one step" + ("; here of two" if setting.rehearsal else ""),
        },
    )
    found = cases(rehearsal=setting.rehearsal)
    predicted = _predicted(found, shape, setting.device)  # before this process has a GPU
    device = init_distributed(setting.device)
    for case, (expected, place) in zip(found, predicted, strict=True):
        about = {"case": case.name, "seq_len": case.seq_len, "peak_at": place}
        try:
            peak, seconds = _measured(case, shape, device)
        except torch.OutOfMemoryError as error:
            report.add("out_of_memory", **about, predicted_GiB=expected / 2**30, error=short(error))
        else:
            off = expected / peak - 1
            report.add(
                "passed" if abs(off) <= TOLERANCE else "failed",
                **about,
                predicted_GiB=expected / 2**30,
                measured_GiB=peak / 2**30,
                off_by=off,
                seconds=seconds,
            )
        gc.collect()  # FSDP's modules refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    return report.finish()
