"""A model with a sliding window (as Mistral 7B v0.1) against transformers', whole and packed documents."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.fixtures import (
    DIM,
    VOCAB,
    recipe_config,
    reference_step,
    run_recipe,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from tests.distributed.packs import documents
from tests.distributed.test_packed_training import LR, METHODS, TOLERANCE, check_step

WINDOW = 13
DATA = {
    "uneven_samples": {"_component_": "tests.distributed.fixtures.uneven_samples"},
    "packs": {"_component_": "tests.distributed.packs.packs"},
}


def _save_mistral(folder, window):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        sliding_window=window,
        initializer_range=0.2,
    )
    MistralForCausalLM(config).save_pretrained(folder)


def _config(base, folder, data, **overrides):
    return recipe_config(
        base,
        folder,
        dataset=DATA[data],
        dataset_val=DATA[data],
        batch_size=6 if data == "uneven_samples" else 4,
        optimizer={"lr": LR},
        **overrides,
    )


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_of_a_model_with_a_window_equals_transformers(tmp_path, world):
    _save_mistral(tmp_path / "base", WINDOW)
    methods = METHODS if world > 1 else {"one": {}}
    cfgs = {
        (data, method): _config(
            tmp_path / "base",
            tmp_path / f"{data}_{method}",
            data,
            context_parallel_dim=world,
            **overrides,
        )
        for data in DATA
        for method, overrides in methods.items()
    }
    run_ranks(world, run_recipe, list(cfgs.values()))
    samples = {"uneven_samples": uneven_samples(), "packs": documents()}
    references = {
        data: reference_step(tmp_path / "base", given, LR) for data, given in samples.items()
    }
    for data, method in cfgs:
        check_step(tmp_path / f"{data}_{method}", references[data])
    # Without the window it would be another step.
    _save_mistral(tmp_path / "full", None)
    for data, given in samples.items():
        full = reference_step(tmp_path / "full", given, LR)
        assert abs(full["loss"] / references[data]["loss"] - 1) > 100 * TOLERANCE
