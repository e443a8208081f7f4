"""Compiled layers under context parallelism: how often they compile, and the same step as a plain loop.

The recipe's backend is inductor, which takes 15 s a graph; "aot_eager" traces the same graphs, forward
and backward, and runs them without generating code.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.distributed.fixtures import (
    Samples,
    recipe_config,
    reference_step,
    run_recipe,
    save_llama,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from torchtune_cp.metrics import read_metrics
from torchtune_cp.training import compile as compile_module
from torchtune_cp.training import setup

LR, TOLERANCE = 2.0, 1e-5
#: Training and validation (without gradient) compile apart; each of them first for its first length,
#: then, at the second length, once for all lengths.
MOST_GRAPHS = 4
LENGTHS = [37 * n + 5 for n in range(20)]


def samples_of_many_lengths(tokenizer=None):
    """Twenty samples, each of another length between 5 and 708."""
    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 64, (n,), generator=g).tolist() for n in LENGTHS]
    return Samples([{"tokens": row, "labels": row} for row in rows])


def _compiled(cfgs, backend):
    """Run the configs; returns for each the graphs compiled and the graph breaks."""
    seen = []
    for cfg in cfgs:
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounterWithBackend(backend)
        setup.compile_layers = partial(compile_module.compile_layers, backend=counter)
        run_recipe([cfg])
        seen.append((counter.frame_count, dict(counters["graph_break"])))
    return seen


def _many_lengths(base, output):
    dataset = {"_component_": f"{__name__}.samples_of_many_lengths"}
    return recipe_config(
        base,
        output,
        context_parallel_dim=2,
        compile=True,
        run_val_every_n_steps=10,
        dataset=dataset,
        dataset_val=dataset,
    )


def _one_step(base, output, cp, **overrides):
    return recipe_config(
        base,
        output,
        context_parallel_dim=cp,
        batch_size=2,
        gradient_accumulation_steps=3,
        compile=True,
        optimizer={"lr": LR},
        **overrides,
    )


def _check_step(output, reference):
    (line,) = read_metrics(output / "metrics.jsonl")
    assert line["tokens"] == reference["tokens"], "padding was counted"
    assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    weights = load_file(output / "final" / "model.safetensors")
    for key, after in reference["after"].items():
        error = (weights[key] - after).abs().max() / after.abs().max()
        assert error < TOLERANCE, (output.name, key)


def _run(tmp_path, world, cfgs, backend):
    by_rank = run_ranks(world, _compiled, cfgs, backend)
    for rank in by_rank[1:]:
        assert rank == by_rank[0]
    return by_rank[0]


@pytest.mark.distributed
def test_twenty_lengths_compile_a_bounded_number_of_times_without_graph_breaks(tmp_path):
    assert len(set(LENGTHS)) == 20
    save_llama(tmp_path / "base")
    reference = reference_step(tmp_path / "base", uneven_samples(), LR)
    cfgs = [
        _one_step(tmp_path / "base", tmp_path / "step", 2),
        _many_lengths(tmp_path / "base", tmp_path / "lengths"),
    ]
    for count, breaks in _run(tmp_path, 2, cfgs, "aot_eager"):
        assert 0 < count <= MOST_GRAPHS
        assert breaks == {}
    _check_step(tmp_path / "step", reference)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_inductor_gives_the_same_step(tmp_path, world):
    save_llama(tmp_path / "base")
    reference = reference_step(tmp_path / "base", uneven_samples(), LR)
    base = tmp_path / "base"
    cfgs = [
        _one_step(base, tmp_path / "cp", world),
        _one_step(base, tmp_path / "checkpointing", world, enable_activation_checkpointing=True),
        _many_lengths(base, tmp_path / "lengths"),
    ]
    for count, breaks in _run(tmp_path, world, cfgs, "inductor"):
        assert 0 < count <= MOST_GRAPHS
        assert breaks == {}
    for name in ("cp", "checkpointing"):
        _check_step(tmp_path / name, reference)
