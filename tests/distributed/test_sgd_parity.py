"""One SGD step of the whole recipe against a plain single-process loop with transformers' model.

SGD, because Adam divides a wrong gradient scale away; weights, because a loss hides a wrong gradient.
Tolerance: 1e-5 of the largest weight of each tensor. Float32 sums over 200 tokens in another order
differ by about 1e-6 of it; a wrong position, a lost border label or a mean of means by 1e-3 and more.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.fixtures import (
    long_sample,
    recipe_config,
    reference_step,
    run_recipe,
    save_llama,
    uneven_samples,
)
from tests.distributed.harness import run_ranks

LR = 2.0
TOLERANCE = 1e-5


def _layouts(world):
    """(name, overrides) for every mesh of this world, six samples in one optimizer step."""
    for dp, cp in {2: [(1, 2)], 4: [(1, 4), (2, 2)]}[world]:
        for accumulation in (1, 3):
            for rotate in ("allgather", "alltoall") if accumulation == 1 else ("allgather",):
                yield (
                    f"dp{dp}_cp{cp}_acc{accumulation}_{rotate}",
                    {
                        "data_parallel_shard_dim": dp,
                        "context_parallel_dim": cp,
                        "context_parallel_rotate_method": rotate,
                        "gradient_accumulation_steps": accumulation,
                        "batch_size": 6 // accumulation // dp,
                        "optimizer": {"lr": LR},
                    },
                )
    if world == 4:
        yield (
            "replicate2_cp2",
            {
                "data_parallel_replicate_dim": 2,
                "context_parallel_dim": 2,
                "batch_size": 3,
                "optimizer": {"lr": LR},
            },
        )
    yield (
        "one_micro_batch_without_any_label",
        {
            "context_parallel_dim": world,
            "dataset": {"_component_": "tests.distributed.fixtures.one_unlabelled_micro_batch"},
            "gradient_accumulation_steps": 3,
            "batch_size": 2,
            "optimizer": {"lr": LR},
        },
    )
    yield (
        "length_2999",
        {
            "context_parallel_dim": world,
            "dataset": {"_component_": "tests.distributed.fixtures.long_sample"},
            "optimizer": {"lr": LR},
        },
    )
    yield (
        "selective_checkpointing",
        {
            "context_parallel_dim": world,
            "batch_size": 6,
            "ac_mode": "selective",
            "ac_option": 2,
            "optimizer": {"lr": LR},
        },
    )
    yield (
        "checkpointing",
        {
            "context_parallel_dim": world,
            "batch_size": 6,
            "enable_activation_checkpointing": True,
            "optimizer": {"lr": LR},
        },
    )


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "tie"), [(2, False), (4, False), (2, True)])
def test_weights_loss_and_norm_equal_a_plain_loop_after_one_step(tmp_path, world, tie):
    save_llama(tmp_path / "base", tie)
    references = {
        "uneven_samples": reference_step(tmp_path / "base", uneven_samples(), LR),
        "long_sample": reference_step(tmp_path / "base", long_sample(), LR),
    }
    expected, cfgs = {}, []
    for name, overrides in _layouts(world):
        cfgs.append(recipe_config(tmp_path / "base", tmp_path / name, **overrides))
        samples = cfgs[-1].dataset["_component_"].rpartition(".")[2]
        expected[name] = references[samples.replace("one_unlabelled_micro_batch", "uneven_samples")]
    run_ranks(world, run_recipe, cfgs)
    for name, reference in expected.items():
        (line,) = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert line["tokens"] == reference["tokens"]
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
        weights = load_file(tmp_path / name / "final" / "model.safetensors")
        assert set(weights) == set(reference["after"])
        for key, after in reference["after"].items():
            moved = (after - reference["before"][key]).abs().max()
            scale = after.abs().max()
            assert moved > 100 * TOLERANCE * scale, (
                f"{key} hardly moves: the test would see nothing"
            )
            error = (weights[key] - after).abs().max()
            assert error < TOLERANCE * scale, (name, key, error / scale)


def _update_error(weights, reference, key):
    """Norm of the difference of the two updates over the norm of the reference's update."""
    before, after = reference["before"][key], reference["after"][key]
    return ((weights[key] - after).norm() / (after - before).norm()).item()


@pytest.mark.distributed
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(tmp_path):
    # bfloat16 keeps 8 bits: each operation is off by up to 0.4 %, and two orders of the same sums
    # (padded batches and slices here, sample by sample there) differ by a few of those. A missing
    # position or label moves updates by 10 % and more.
    save_llama(tmp_path / "base")
    reference = reference_step(tmp_path / "base", uneven_samples(), LR, torch.bfloat16)
    exact = reference_step(tmp_path / "base", uneven_samples(), LR)
    cfg = recipe_config(
        tmp_path / "base",
        tmp_path / "out",
        context_parallel_dim=2,
        batch_size=2,
        gradient_accumulation_steps=3,
        dtype="bf16",
        optimizer={"lr": LR},
    )
    run_ranks(2, run_recipe, [cfg])
    (line,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(reference["loss"], rel=5e-3)
    assert line["loss"] != pytest.approx(exact["loss"], rel=1e-6), "this was no bfloat16"
    weights = load_file(tmp_path / "out" / "final" / "model.safetensors")
    for key, weight in weights.items():
        assert _update_error(weights, reference, key) < 0.05, key
        assert weight.dtype == torch.float32
        rounded = weight.to(torch.bfloat16).to(torch.float32)
        assert not torch.equal(weight, rounded), f"{key} was rounded to bfloat16"


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_layers_give_the_same_step(tmp_path):
    save_llama(tmp_path / "base")
    reference = reference_step(tmp_path / "base", uneven_samples(), LR)
    cfgs = [
        recipe_config(
            tmp_path / "base",
            tmp_path / name,
            context_parallel_dim=2,
            batch_size=2,
            gradient_accumulation_steps=3,
            compile=True,
            optimizer={"lr": LR},
            enable_activation_checkpointing=name == "checkpointing",
        )
        for name in ("plain", "checkpointing")
    ]
    run_ranks(2, run_recipe, cfgs)
    for name in ("plain", "checkpointing"):
        weights = load_file(tmp_path / name / "final" / "model.safetensors")
        for key, after in reference["after"].items():
            error = (weights[key] - after).abs().max() / after.abs().max()
            assert error < TOLERANCE, (name, key)
