"""One SGD step of the whole recipe against a plain single-process loop with transformers' model.

SGD, because Adam divides a wrong gradient scale away; weights, because a loss hides a wrong gradient.
Tolerance: 1e-5 of the largest weight of each tensor. Float32 sums over 200 tokens in another order
differ by about 1e-6 of it; a wrong position, a lost border label or a mean of means by 1e-3 and more.
"""

from __future__ import annotations

import json

import pytest
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
        expected[name] = references[samples]
    run_ranks(world, run_recipe, cfgs, tmp_path / "stores")
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
