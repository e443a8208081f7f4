"""Which checkpoint a run continues from, which it keeps, and what it says; one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.harness import run_ranks
from tests.distributed.resume_runs import adamw_config, lines, run_all_with_messages

pytestmark = pytest.mark.distributed


def _steps(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "checkpoints").glob("[!.]*"))


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def _damage_newest_then_run(cfgs, before, after, out: str):
    told = run_all_with_messages([*before])
    _flip_a_bit(Path(out) / "checkpoints" / "step_8" / "rank_00000.safetensors")
    return told + run_all_with_messages([*cfgs, *after])


def _said(messages: list[str], *parts: str) -> bool:
    return any(all(part in message for part in parts) for message in messages)


def test_what_is_continued_kept_and_said(tmp_path):
    straight, elsewhere = tmp_path / "straight", tmp_path / "elsewhere"
    validation = {
        "dataset_val": {"_component_": "tests.distributed.resume_runs.recorded_samples"},
        "run_val_every_n_steps": 2,
    }
    final = str(straight / "final")
    before = [
        # 0: no checkpoint yet, and everything is kept
        adamw_config(straight, resume_from_checkpoint=True, save_every_n_steps=2),
    ]
    damaged = [
        # 1: the newest is damaged: step_6 of the same folder, by the run's output_dir
        adamw_config(elsewhere, resume_from_checkpoint=str(straight), save_every_n_steps=8),
        # 2: asked for by name it is refused
        adamw_config(
            tmp_path / "by_name", resume_from_checkpoint=str(straight / "checkpoints" / "step_8")
        ),
    ]
    after = [
        # 3: weights only
        adamw_config(tmp_path / "weights", resume_from_checkpoint=final, epochs=1),
        # 4: a folder that holds nothing to continue from
        adamw_config(tmp_path / "nothing", resume_from_checkpoint=str(tmp_path)),
        # 5: two newest and the best by validation loss, in the background
        adamw_config(
            tmp_path / "pruned",
            save_every_n_steps=2,
            keep_last_n=2,
            keep_best=True,
            enable_async_checkpointing=True,
            # The loss falls at first and rises once the rate is absurd: an early one is the best.
            lr_scheduler=None,
            optimizer={"_component_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9},
            **validation,
        ),
        # 6: another global batch, in the middle of an epoch
        adamw_config(
            tmp_path / "batch",
            resume_from_checkpoint=str(straight / "checkpoints" / "step_2"),
            batch_size=2,
        ),
        # 7: another rate and more epochs
        adamw_config(
            tmp_path / "rate",
            resume_from_checkpoint=str(straight / "checkpoints" / "step_6"),
            optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-3},
            epochs=3,
        ),
        # 8: the same with that rate from the start: its schedule is that of 7
        adamw_config(
            tmp_path / "rate_straight",
            optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-3},
            epochs=3,
        ),
        # 9: another optimizer
        adamw_config(
            tmp_path / "optimizer",
            resume_from_checkpoint=str(straight / "checkpoints" / "step_2"),
            optimizer={"_component_": "torch.optim.SGD", "lr": 1e-3},
        ),
        # 10: SGD without state, saved and resumed
        adamw_config(
            tmp_path / "sgd",
            save_every_n_steps=3,
            optimizer={"_component_": "torch.optim.SGD", "lr": 0.1},
        ),
        adamw_config(
            tmp_path / "sgd_resumed",
            resume_from_checkpoint=str(tmp_path / "sgd"),
            optimizer={"_component_": "torch.optim.SGD", "lr": 0.1},
        ),
        # 12: a new run where there are checkpoints of another
        adamw_config(straight, epochs=1, save_every_n_steps=3),
    ]
    told = run_ranks(1, _damage_newest_then_run, damaged, before, after, str(straight))[0]
    whole = lines(straight / ".." / "elsewhere")

    assert _said(told[0], "no checkpoint in", "starting from the beginning")
    assert _said(told[1], "WARNING skipped step_8", "rank_00000.safetensors is damaged")
    assert _said(told[1], "continuing from", "step_6")
    assert [line["step"] for line in whole] == [7, 8]
    assert _said(told[2], "UserError", "step_8", "damaged")

    assert _said(told[3], "WARNING", "weights only")
    assert [line["step"] for line in lines(tmp_path / "weights")] == [1, 2, 3, 4]
    start = load_file(straight / ".." / "weights" / "final" / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in start.values())
    assert _said(told[4], "UserError", "holds no checkpoint", "step_N")

    validated = {
        line["step"]: line["val_loss"] for line in lines(tmp_path / "pruned") if "val_loss" in line
    }
    best = min((loss, -step) for step, loss in validated.items() if step)[1] * -1
    assert _steps(tmp_path / "pruned") == sorted({f"step_{best}", "step_6", "step_8"})

    assert _said(told[6], "WARNING", "global batch is 2 samples instead of 4")
    # 8 samples of 17 were read: 9 are left, 4 steps of 2; then 8 more.
    assert [line["step"] for line in lines(tmp_path / "batch")] == list(range(3, 15))

    assert _said(told[7], "WARNING", "optimizer", "number of steps")
    rates = {line["step"]: line["lr"] for line in lines(tmp_path / "rate_straight")}
    assert {line["step"]: line["lr"] for line in lines(tmp_path / "rate")} == {
        step: rate for step, rate in rates.items() if step > 6
    }
    assert _said(told[9], "UserError", "AdamW", "SGD")
    assert lines(tmp_path / "sgd_resumed") == lines(tmp_path / "sgd", after=6)

    assert _said(told[12], "moved step_8", "checkpoints.earlier_1")
    assert _steps(straight) == ["step_3"]
    aside = straight / "checkpoints.earlier_1"
    assert sorted(path.name for path in aside.iterdir()) == ["step_2", "step_4", "step_6", "step_8"]
    state = json.loads((aside / "step_6" / "checkpoint.json").read_text())["content"]["state"]
    assert (state["epoch"], state["step_in_epoch"], state["loader"]["samples_read"]) == (1, 2, 8)
