"""The recipe on the GPU against the same run on the CPU, and with each option against without it.

`tiny/llama_cpu`, fp32 and bf16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import CHECKOUT, Report, Setting, short

STEPS = 10

#: Largest relative difference of a step's loss between the two devices. fp32: the same operations in
#: another order, 1e-7 a sum, which ten AdamW steps can enlarge a thousandfold (Adam turns the sign of
#: a tiny gradient into a whole step); the tests hold the curves of different meshes to the same
#: number. bf16: each activation is rounded to 3 digits, at other places on each device; on a CPU that
#: moves the losses by up to 3e-4 from those of fp32.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-3}

#: Of the first step's gradient norm, before any weight has moved. bf16 moves it by 3e-3 from fp32's.
GRAD_NORM_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}

LIMIT_S = 100


#: Options of the recipe, each compared with the same run without it on the same device: those that
#: change where or when something is computed but not what, within fp32's tolerance; float8 rounds, to
#: 2 digits, and has the same tolerance as on a CPU.
OPTIONS: dict[str, tuple[str, list[str]]] = {
    "activation checkpointing": ("fp32", ["enable_activation_checkpointing=true"]),
    "checkpointing by operator": ("fp32", ["ac_mode=selective", "ac_option=op"]),
    "activation offloading": ("fp32", ["enable_activation_offloading=true"]),
    "parameters on the CPU": ("fp32", ["fsdp_cpu_offload=true"]),
    "optimizer in backward": ("fp32", ["optimizer_in_bwd=true"]),
    "compile": ("fp32", ["compile=true"]),
    "float8": ("bf16", ["enable_fp8_training=true", "fp8_recipe_name=tensorwise"]),
}
FLOAT8_LOSS_TOLERANCE = 1e-2


def run_recipe(
    device: str, dtype: str, folder: Path, options: list[str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Run the recipe in a separate process.

    Args:
        device: The config key.
        dtype: The config key.
        folder: Becomes the run's `output_dir`.
        options: Further `key=value` overrides.

    Returns:
        The lines of `metrics.jsonl` and the command.

    Raises:
        RuntimeError: It failed; the message contains the end of its output.
    """
    arguments = ["run", "full_finetune_distributed", "--config", "tiny/llama_cpu"]
    arguments += [f"device={device}", f"dtype={dtype}", f"max_steps_per_epoch={STEPS}"]
    # Without clipping: an optimizer that steps in backward cannot have it, and all runs are compared.
    arguments += ["clip_grad_norm=null", *(options or [])]
    # A run must not depend on how many cores the others leave it.
    threads = os.environ.get("OMP_NUM_THREADS", "2")
    done = subprocess.run(
        [sys.executable, "-m", "torchtune_cp", *arguments, f"output_dir={folder}"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": threads,
            "TUNE_TRACEBACK": "1",
        },
    )
    if done.returncode != 0:
        output = (done.stderr or done.stdout)[-1500:]
        raise RuntimeError(f"exit code {done.returncode}: {output}")
    if not (folder / "final" / "config.json").exists():
        raise RuntimeError(f"no model in {folder / 'final'}")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], " ".join(["tune", *arguments])


def compare(
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    loss_tolerance: float,
    norm_tolerance: float,
) -> dict[str, Any]:
    """Compare two runs' metrics; the row's status says whether all lie within the tolerances."""

    def series(lines: list[dict[str, Any]], key: str) -> list[float]:
        return [line[key] for line in lines if key in line]

    def apart(key: str) -> list[float]:
        pairs = zip(series(ours, key), series(theirs, key), strict=True)
        return [abs(a - b) / abs(b) for a, b in pairs]

    losses, validation, norms = apart("loss"), apart("val_loss"), apart("grad_norm")
    same_tokens = series(ours, "tokens") == series(theirs, "tokens")
    good = (
        len(losses) == STEPS
        and same_tokens
        and all(d <= loss_tolerance for d in losses + validation)
        and norms[0] <= norm_tolerance
    )
    return {
        "status": "passed" if good else "failed",
        "steps": len(losses),
        "same_token_counts": same_tokens,
        "first_loss_difference": losses[0],
        "largest_loss_difference": max(losses),
        "largest_val_loss_difference": max(validation),
        "first_grad_norm_difference": norms[0],
        "tolerance": loss_tolerance,
        "losses": series(ours, "loss"),
        "losses_reference": series(theirs, "loss"),
    }


def run(setting: Setting) -> str:
    """Run the recipe on both devices, and on this one with each option; returns the part's status."""
    report = Report(
        "recipe",
        setting,
        tolerances={
            **{f"loss_{name}": value for name, value in LOSS_TOLERANCES.items()},
            **{f"first_grad_norm_{name}": value for name, value in GRAD_NORM_TOLERANCES.items()},
            "loss_float8": FLOAT8_LOSS_TOLERANCE,
            "reason": "relative; fp32: rounding in another order, enlarged by ten AdamW steps;"
            " bf16: activations of 3 digits; see benchmarks/gpu/recipe.py",
        },
        notes={"runs": f"{STEPS} AdamW steps and 3 validations, one process, no network"},
    )
    runs = [(device, dtype) for dtype in ("fp32", "bf16") for device in (setting.device, "cpu")]
    # Loading torch takes most of each run's time; where there are cores, side by side.
    workers = len(runs) if (os.cpu_count() or 1) >= 8 else 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        started = [
            pool.submit(run_recipe, device, dtype, Path(folder) / str(number))
            for number, (device, dtype) in enumerate(runs)
        ]
        with_option = {
            name: pool.submit(run_recipe, setting.device, dtype, Path(folder) / name, options)
            for name, (dtype, options) in OPTIONS.items()
        }
        for dtype, here, cpu in zip(("fp32", "bf16"), started[::2], started[1::2], strict=True):
            try:
                ours, command = here.result()
                theirs, _ = cpu.result()
            except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
                report.add("failed", dtype=dtype, error=short(error, 1500))
                continue
            row = compare(ours, theirs, LOSS_TOLERANCES[dtype], GRAD_NORM_TOLERANCES[dtype])
            report.add(row.pop("status"), dtype=dtype, command=command, **row)
        plain = dict(zip(("fp32", "bf16"), started[::2], strict=True))
        for name, future in with_option.items():
            dtype = OPTIONS[name][0]
            try:
                ours, command = future.result()
                theirs, _ = plain[dtype].result()
            except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
                report.add("failed", dtype=dtype, option=name, error=short(error, 1500))
                continue
            loose = FLOAT8_LOSS_TOLERANCE if name == "float8" else LOSS_TOLERANCES[dtype]
            norm = 5e-2 if name == "float8" else GRAD_NORM_TOLERANCES[dtype]
            row = compare(ours, theirs, loose, norm)
            report.add(row.pop("status"), dtype=dtype, option=name, command=command, **row)
    return report.finish()
