"""Tiled MLP, reused hidden states, optimizer on the host: the same run as without, and really on."""

from __future__ import annotations

import json
import threading

import pytest
from safetensors.torch import load_file

from tests.distributed.fixtures import (
    recipe_config,
    reference_step,
    run_recipe,
    save_llama,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from tests.distributed.resume_runs import adamw_config, lines, run_all

SGD_LR = 2.0
STEPS = 3
TILE = 5  # divides none of the slices' lengths
LAYERS = 2
LOSS = {"_component_": "torchtune_cp.training.loss.LinearCrossEntropyLoss", "num_output_chunks": 3}

TILED = {"mlp_tile_tokens": TILE}
REUSE = {"loss": LOSS | {"reuse_hidden": True}}
ON_HOST = {"optimizer_on_host": True}
FULL = {"enable_activation_checkpointing": True}
OFFLOAD = FULL | {"enable_activation_offloading": True}
EVERYTHING = TILED | REUSE | ON_HOST | OFFLOAD

#: On four processes in the default suite, without replicas; the slow one has every case on every mesh.
FEW = ("plain", "tiled", "everything", "adamw", "adamw_on_host", "adamw_everything")

#: Single SGD steps, each compared with a plain loop and with the run without any of it.
STEP_CASES = {
    "plain": {},
    "tiled": TILED,
    "tiled_full": TILED | FULL,
    "tiled_by_op": TILED | {"ac_mode": "selective", "ac_option": "op"},
    "tiled_accumulated": TILED | {"gradient_accumulation_steps": 3},
    "reuse": REUSE,
    "on_host": ON_HOST,
    "everything": EVERYTHING,
}
#: Three steps of AdamW with a schedule, compared with the ordinary optimizer.
ADAMW_CASES = {
    "adamw": {},
    "adamw_on_host": ON_HOST,
    "adamw_on_host_cpu_shards": ON_HOST | {"fsdp_cpu_offload": True},
    "adamw_everything": EVERYTHING,
}
ADAMW = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "eps": 1e-3},
    "lr_scheduler": {
        "_component_": "torchtune_cp.training.lr_schedulers.get_linear_schedule_with_warmup",
        "num_warmup_steps": 0,
    },
}
MESHES = {
    1: {"one": {}},
    2: {"cp2": {"context_parallel_dim": 2}},
    4: {
        "dp2_cp2": {"data_parallel_shard_dim": 2, "context_parallel_dim": 2},
        "cp2_tp2": {"context_parallel_dim": 2, "tensor_parallel_dim": 2},
        "replicate2_cp2": {"data_parallel_replicate_dim": 2, "context_parallel_dim": 2},
    },
}


def _names(every):
    steps, adamw = list(STEP_CASES), list(ADAMW_CASES)
    if not every:
        return [n for n in steps if n in FEW], [n for n in adamw if n in FEW]
    return steps, adamw


def _meshes(world, every):
    return {name: mesh for name, mesh in MESHES[world].items() if every or name != "replicate2_cp2"}


def _cases(world, every):
    for mesh_name, mesh in _meshes(world, every).items():
        dp = mesh.get("data_parallel_shard_dim", 1) * mesh.get("data_parallel_replicate_dim", 1)
        steps, adamw = _names(every)
        for name in steps:
            overrides = STEP_CASES[name]
            accumulation = overrides.get("gradient_accumulation_steps", 1)
            shape = {"batch_size": 6 // dp // accumulation, "optimizer": {"lr": SGD_LR}}
            yield f"{mesh_name}_{name}", {"loss": LOSS} | mesh | shape | overrides
        for name in adamw:
            shape = {"batch_size": 6 // STEPS // dp}
            yield f"{mesh_name}_{name}", {"loss": LOSS} | mesh | shape | ADAMW | ADAMW_CASES[name]


def _run_and_watch(cfgs):
    """Run the recipe; return per run the tiles' lengths, offloaded bytes, and where steps were made."""
    from torchtune_cp.models.transformer import TransformerLayer
    from torchtune_cp.training import optim_in_bwd, optim_on_host, setup

    plain, offloading, step = (
        TransformerLayer.feed_forward,
        setup.apply_activation_offloading,
        optim_in_bwd.step_alone,
    )
    seen = {}

    def feed_forward(layer, x):
        seen["tokens"].add(x.size(1))
        return plain(layer, x)

    def offload(*args):
        seen["offload"] = offloading(*args)
        return seen["offload"]

    def step_alone(optimizer, index, parameter, *, key):
        step(optimizer, index, parameter, key=key)
        seen["threads"].append(threading.current_thread().name.partition("_")[0])

    TransformerLayer.feed_forward = feed_forward
    setup.apply_activation_offloading = offload
    optim_on_host.step_alone = step_alone
    watched = []
    for cfg in cfgs:
        seen |= {"tokens": set(), "threads": [], "offload": None}
        run_recipe([cfg])
        moved = seen["offload"].moved_bytes if seen["offload"] else 0
        watched.append((max(seen["tokens"]), moved, seen["threads"]))
    return watched


def _weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _assert_same_run(folder, expected):
    for ours, theirs in zip(_lines(folder), _lines(expected), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    # AdamW divides by the root of its second moment: where a gradient is all but rounding, so is the
    # step, and it differs with the order of sums (3e-6 on one processor, below 1e-6 on another).
    tolerance = 1e-5 if "adamw" in folder.name else 1e-6
    weights = _weights(folder)
    for key, theirs in _weights(expected).items():
        error = (weights[key] - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, (folder.name, key, error)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "every"),
    [(1, True), (2, True), (4, False), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_runs_equal_those_without_the_levers_and_each_lever_is_on(tmp_path, world, every):
    save_llama(tmp_path / "base")
    cases = dict(_cases(world, every))
    cfgs = [recipe_config(tmp_path / "base", tmp_path / name, **o) for name, o in cases.items()]
    watched = run_ranks(world, _run_and_watch, cfgs)

    reference = reference_step(tmp_path / "base", uneven_samples(), SGD_LR)
    parameters = len(reference["after"])
    for mesh in _meshes(world, every):
        after = _weights(tmp_path / f"{mesh}_plain")
        for key, expected in reference["after"].items():
            assert (after[key] - expected).abs().max() / expected.abs().max() < 1e-5, (mesh, key)
        steps, adamw = _names(every)
        for name in steps:
            _assert_same_run(tmp_path / f"{mesh}_{name}", tmp_path / f"{mesh}_plain")
        for name in adamw:
            _assert_same_run(tmp_path / f"{mesh}_{name}", tmp_path / f"{mesh}_adamw")

    for rank in watched:
        for cfg, (tokens, moved, threads) in zip(cfgs, rank, strict=True):
            assert (tokens <= TILE) == ("mlp_tile_tokens" in cfg)
            assert (moved > 0) == cfg.get("enable_activation_offloading", False)
            steps = STEPS if "lr_scheduler" in cfg else 1
            on_host = cfg.get("optimizer_on_host", False)
            assert threads == ["optimizer"] * (parameters * steps * on_host)


@pytest.mark.distributed
def test_state_on_the_host_is_saved_and_resumed_with_the_lever_and_without(tmp_path):
    def config(name, **overrides):
        overrides = {"clip_grad_norm": None, **overrides}
        return adamw_config(tmp_path / name, "cp2", **overrides)

    def resumed(name, source, **overrides):
        point = str(tmp_path / source / "checkpoints" / "step_3")
        return config(name, resume_from_checkpoint=point, **overrides)

    cfgs = [
        config("ordinary", save_every_n_steps=3),
        config("on_host", save_every_n_steps=3, **ON_HOST),
        resumed("on_host_from_on_host", "on_host", **ON_HOST),
        resumed("on_host_from_ordinary", "ordinary", **ON_HOST),
        resumed("ordinary_from_on_host", "on_host"),
    ]
    run_ranks(2, run_all, cfgs)
    assert lines(tmp_path / "on_host") == lines(tmp_path / "ordinary")
    expected = lines(tmp_path / "ordinary", after=3)
    assert len({line["loss"] for line in expected}) == 5
    for name in ("on_host_from_on_host", "on_host_from_ordinary", "ordinary_from_on_host"):
        assert lines(tmp_path / name) == expected, name


@pytest.mark.slow
@pytest.mark.distributed
def test_replicas_with_shards_and_optimizer_on_the_host(tmp_path):
    """HSDP: gradients are added up over shards and replicas, come to the host and are stepped there."""
    save_llama(tmp_path / "base")
    mesh = MESHES[4]["replicate2_cp2"]
    both = ON_HOST | {"fsdp_cpu_offload": True}
    sgd = {"batch_size": 3, "optimizer": {"lr": SGD_LR}}
    adamw = {"batch_size": 1} | ADAMW
    cases = {
        "sgd": sgd,
        "sgd_both": sgd | both,
        "sgd_both_offloaded": sgd | both | OFFLOAD | TILED,
        "adamw": adamw,
        "adamw_both": adamw | both,
        "adamw_both_offloaded": adamw | both | OFFLOAD | TILED,
    }
    cfgs = [
        recipe_config(tmp_path / "base", tmp_path / name, **{"loss": LOSS} | mesh | overrides)
        for name, overrides in cases.items()
    ]
    watched = run_ranks(4, _run_and_watch, cfgs)
    reference = reference_step(tmp_path / "base", uneven_samples(), SGD_LR)
    after = _weights(tmp_path / "sgd")
    for key, expected in reference["after"].items():
        assert (after[key] - expected).abs().max() / expected.abs().max() < 1e-5, key
    assert len(_lines(tmp_path / "adamw")) == STEPS
    for name in cases:
        _assert_same_run(tmp_path / name, tmp_path / name.partition("_")[0])
    parameters = len(reference["after"])
    for rank in watched:
        for (name, overrides), (_, moved, threads) in zip(cases.items(), rank, strict=True):
            assert (moved > 0) == name.endswith("offloaded")
            steps = STEPS if "lr_scheduler" in overrides else 1
            assert threads == ["optimizer"] * (parameters * steps * ("both" in name))


@pytest.mark.slow
@pytest.mark.distributed
def test_tiles_with_compilation_and_with_float8(tmp_path):
    """Compiled: the same step. Float8: with one tile, and row by row with many, the same step too."""
    save_llama(tmp_path / "base")
    fp8 = {"enable_fp8_training": True}
    rowwise = fp8 | {"fp8_recipe_name": "rowwise"}
    one_tile = {"mlp_tile_tokens": 1000}
    compiled = TILED | {"compile": True}
    pairs = {
        "compiled": ({}, compiled),
        "compiled_full": ({}, compiled | FULL),
        "compiled_by_op": ({}, compiled | {"ac_mode": "selective", "ac_option": "op"}),
        "tensorwise": (fp8, fp8 | one_tile | FULL),
        "rowwise": (rowwise, rowwise | TILED | FULL),
    }
    shape = {"context_parallel_dim": 2, "batch_size": 6, "optimizer": {"lr": SGD_LR}}
    cfgs = [
        recipe_config(tmp_path / "base", tmp_path / f"{name}_{i}", **shape | overrides)
        for name, pair in pairs.items()
        for i, overrides in enumerate(pair)
    ]
    run_ranks(2, _run_and_watch, cfgs)
    for name in pairs:
        _assert_same_run(tmp_path / f"{name}_1", tmp_path / f"{name}_0")
