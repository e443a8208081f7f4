"""A resumed run is the run that was never interrupted: to the bit on its mesh, to rounding on others."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.resume_runs import (
    MESHES,
    SAMPLES,
    adamw_config,
    lines,
    load_and_save_again,
    run_all,
    whole_tensors,
)

pytestmark = pytest.mark.distributed
FOUR = ("dp2_cp2", "dp4", "tp2_cp2", "replicate2_cp2")


def _assert_losses_close(resumed: list[dict], straight: list[dict]) -> None:
    assert [line["step"] for line in resumed] == [line["step"] for line in straight]
    for ours, theirs in zip(resumed, straight, strict=True):
        assert (ours["tokens"], ours["lr"]) == (theirs["tokens"], theirs["lr"])
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def _samples_of_both(read: list[list[list[int]]], run: int, ranks: tuple[int, ...]) -> list[int]:
    return sorted(index for rank in ranks for index in read[rank][run])


def test_resuming_is_exact_on_the_mesh_and_close_on_another(tmp_path):
    """K17, K18 and K19 on two data-parallel times two context-parallel ranks, 2 epochs of 4 steps."""
    out = {name: tmp_path / name for name in ("straight", "async", "in_bwd", "accumulate")}
    kept = out["straight"] / "checkpoints"

    def straight(name: str, **overrides: object):
        settings = {"save_every_n_steps": 3, "save_every_epoch": True, **overrides}
        return adamw_config(out[name], "dp2_cp2", **settings)

    def resumed(name: str, step: int, mesh: str = "dp2_cp2", **overrides: object):
        point = str(out[name] / "checkpoints" / f"step_{step}")
        target = tmp_path / f"{name}_{step}_{mesh}"
        return adamw_config(target, mesh, resume_from_checkpoint=point, **overrides)

    accumulate = {"gradient_accumulation_steps": 2, "batch_size": 1}
    cfgs = [
        straight("straight"),
        resumed("straight", 3),  # in the middle of the first epoch
        resumed("straight", 4),  # at its end
        resumed("straight", 6),
        resumed("straight", 8),  # at the run's end
        resumed("straight", 3, "dp4"),
        resumed("straight", 3, "tp2_cp2"),
        straight("async", enable_async_checkpointing=True),
        straight("in_bwd", optimizer_in_bwd=True, clip_grad_norm=None),
        resumed("in_bwd", 3, optimizer_in_bwd=True, clip_grad_norm=None),
        straight("accumulate", **accumulate),
        resumed("accumulate", 3, **accumulate),
    ]
    read = run_ranks(4, run_all, cfgs)

    assert sorted(path.name for path in kept.iterdir()) == ["step_3", "step_4", "step_6", "step_8"]
    whole = lines(out["straight"])
    assert len(whole) == 8
    assert len({line["loss"] for line in whole}) == 8, "the losses have to tell the steps apart"
    for step in (3, 4, 6):
        assert lines(tmp_path / f"straight_{step}_dp2_cp2") == whole[step:]
    assert lines(tmp_path / "straight_8_dp2_cp2") == []
    assert (tmp_path / "straight_8_dp2_cp2" / "final" / "model.safetensors").read_bytes() == (
        out["straight"] / "final" / "model.safetensors"
    ).read_bytes()

    # Ranks 0 and 2 read for the two data-parallel groups; the fourth of 4 steps is left, then 4 more.
    after_3 = _samples_of_both(read, 1, (0, 2))
    assert after_3 == sorted(read[0][0][3 * 2 :] + read[2][0][3 * 2 :]), (
        "the samples after step 3 are those of the straight run"
    )
    assert len(after_3) == 5 * 4
    assert len(set(read[0][0][:8] + read[2][0][:8])) == 16 == SAMPLES - 1

    for mesh in ("dp4", "tp2_cp2"):
        _assert_losses_close(lines(tmp_path / f"straight_3_{mesh}"), whole[3:])
    assert _samples_of_both(read, 5, (0, 1, 2, 3)) == after_3
    assert sorted(read[0][6]) == after_3

    assert lines(out["async"]) == whole, "saving in the background changes no number"
    for step in ("step_3", "step_8"):
        ours, theirs = (
            whole_tensors(out[name] / "checkpoints" / step) for name in ("async", "straight")
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for name in ("in_bwd", "accumulate"):
        assert lines(tmp_path / f"{name}_3_dp2_cp2") == lines(out[name], after=3)
        assert len(lines(out[name], after=3)) == 5


def test_a_checkpoint_is_taken_apart_and_put_together_again_on_another_mesh(tmp_path):
    """Weights and both moments are equal to the bit after saving and loading over four meshes in a row."""
    first = adamw_config(tmp_path / "dp2_cp2", "dp2_cp2", save_every_n_steps=2, epochs=1)
    chain = ["dp2_cp2", "tp2_cp2", "dp4", "replicate2_cp2", "dp2_cp2_again"]
    cfgs = [
        adamw_config(
            tmp_path / after,
            after.removesuffix("_again"),
            resume_from_checkpoint=str(tmp_path / before / "checkpoints" / "step_2"),
            epochs=1,
        )
        for before, after in pairwise(chain)
    ]
    run_ranks(4, _save_then_chain, first, cfgs)
    tensors = {name: whole_tensors(tmp_path / name / "checkpoints" / "step_2") for name in chain}
    names = set(tensors["dp2_cp2"])
    assert {name.split(".")[0] for name in names} == {"model", "optimizer"}
    moments = [n for n in names if n.endswith(("exp_avg", "exp_avg_sq"))]
    weights = [n for n in names if n.startswith("model.")]
    assert len(moments) == 2 * len(weights)
    for name in chain[1:]:
        torch.testing.assert_close(tensors[name], tensors["dp2_cp2"], rtol=0, atol=0)
    later = whole_tensors(tmp_path / "dp2_cp2" / "checkpoints" / "step_4")
    for name in names:
        assert not torch.equal(later[name], tensors["dp2_cp2"][name]), name


def _save_then_chain(first, cfgs) -> None:
    run_all([first])
    for cfg in cfgs:
        load_and_save_again(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("saved_on", FOUR)
def test_the_whole_matrix_of_meshes(tmp_path, saved_on):
    """Saved on one mesh of four ranks, resumed on each of four, on two ranks and on one."""
    first = tmp_path / "first"
    cfg = adamw_config(first, saved_on, save_every_n_steps=3)
    point = str(first / "checkpoints" / "step_3")

    def resumed(mesh: str):
        return adamw_config(tmp_path / mesh, mesh, resume_from_checkpoint=point)

    run_ranks(4, run_all, [cfg, *map(resumed, FOUR)])
    run_ranks(2, run_all, [resumed("cp2")])
    run_ranks(1, run_all, [resumed("single")])
    straight = lines(first, after=3)
    assert len(straight) == 5
    for mesh in MESHES:
        _assert_losses_close(lines(tmp_path / mesh), straight)
    assert lines(tmp_path / saved_on) == straight
    manifest = json.loads((Path(point) / "checkpoint.json").read_text())
    assert manifest["content"]["state"]["world_size"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_cpu_offload": True},
        {"enable_fp8_training": True, "fp8_emulate": True},
        {"compile": True},
        {"enable_activation_checkpointing": True, "enable_async_checkpointing": True},
        {
            "model": {
                "_component_": "torchtune_cp.models.llama3.llama3",
                "tie_word_embeddings": True,
            }
        },
        {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 2e-3}},
    ],
    ids=lambda options: "-".join(options),
)
def test_resuming_is_exact_with_each_option(tmp_path, options):
    def cfg(name: str, **more: object):
        return adamw_config(tmp_path / name, "dp2_cp2" if world == 4 else "cp2", **options, **more)

    world = 2
    if "model" in options:
        options["model"] = {**adamw_config(tmp_path).model, **options["model"]}
    point = str(tmp_path / "straight" / "checkpoints" / "step_3")
    cfgs = [cfg("straight", save_every_n_steps=3), cfg("resumed", resume_from_checkpoint=point)]
    run_ranks(world, run_all, cfgs)
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight", after=3)
    assert len(lines(tmp_path / "resumed")) == 5
