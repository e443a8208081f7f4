"""optimizer_in_bwd: the same run, to the bit, as stepping after backward, and as a plain loop.

The plain loop is a single process with transformers' model. SGD shows a wrong scale of the gradient
(cp, dp, replicas), which Adam would divide away; three AdamW steps with a schedule show state and rates.
"""

from __future__ import annotations

import os
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.fixtures import (
    VOCAB,
    recipe_config,
    reference_step,
    run_recipe,
    save_llama,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from torchtune_cp.metrics import read_metrics

SGD_LR = 2.0
STEPS = 3
# A large eps: with a tiny one, gradients that are 0 but for rounding would move weights by a whole lr.
ADAMW = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}
TOLERANCE = 1e-5

_DP, _CP, _REPLICATE = (
    "data_parallel_shard_dim",
    "context_parallel_dim",
    "data_parallel_replicate_dim",
)
MESHES = {
    1: {"dp1_cp1": {}},
    2: {"dp1_cp2": {_CP: 2}},
    4: {
        "dp2_cp2": {_DP: 2, _CP: 2},
        "dp1_cp4": {_CP: 4},
        "replicate2_cp2": {_REPLICATE: 2, _CP: 2},
    },
}


def _configs(folder, out, world):
    for name, mesh in MESHES[world].items():
        dp = mesh.get(_DP, 1) * mesh.get(_REPLICATE, 1)
        yield recipe_config(
            folder,
            out / f"{name}_sgd",
            batch_size=6 // dp,
            optimizer_in_bwd=True,
            optimizer={"lr": SGD_LR},
            **mesh,
        )
        for inside in (True, False):
            yield recipe_config(
                folder,
                out / f"{name}_adamw_{inside}",
                batch_size=6 // STEPS // dp,
                optimizer_in_bwd=inside,
                optimizer={"_component_": "torch.optim.AdamW", **ADAMW},
                lr_scheduler={
                    "_component_": "torchtune_cp.training.lr_schedulers"
                    ".get_linear_schedule_with_warmup",
                    "num_warmup_steps": 0,
                },
                **mesh,
            )


def _plain_adamw(folder):
    """Three AdamW steps of two samples each, the rate falling linearly to 0."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    samples = uneven_samples().samples
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = ADAMW["lr"] * (1 - step / STEPS)
        batch = samples[2 * step : 2 * step + 2]
        count = sum(label != -100 for s in batch for label in s["labels"][1:])
        losses.append(0.0)
        for s in batch:
            logits = model(torch.tensor([s["tokens"]])).logits[0, :-1]
            labels = torch.tensor(s["labels"][1:], dtype=torch.int64)
            loss = F.cross_entropy(logits, labels, reduction="sum") / count
            loss.backward()
            losses[-1] += loss.item()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": losses, "grad_norm": norms, "after": dict(model.named_parameters())}


def _assert_weights(folder, expected):
    weights = load_file(folder / "final" / "model.safetensors")
    for key, after in expected.items():
        error = (weights[key] - after).abs().max() / after.abs().max()
        assert error < TOLERANCE, (folder.name, key, error)


def _gradients_alive(cfg):
    """Watch one backward pass of a run's model and optimizer.

    Returns:
        The most gradients that were alive at once, the most buffers of gradients, how many parameters
        were stepped when backward had ended, how many gradients were left, how many parameters there are.
    """
    from torchtune_cp.config import instantiate, to_typed
    from torchtune_cp.distributed import Meshes, context_parallel
    from torchtune_cp.training.setup import build_model, build_optimizer, parallel_dims

    typed = to_typed(cfg)
    meshes = Meshes.build(parallel_dims(typed), "cpu")
    model = build_model(typed, instantiate(typed.checkpointer), meshes, torch.device("cpu"), 0)
    parameters = dict(model.named_parameters())
    before = {name: p.to_local().detach().clone() for name, p in parameters.items()}
    storages, alive = [], []

    def watch(parameter):
        storages.append(weakref.ref(parameter.grad.to_local().untyped_storage()))
        alive.append(
            (
                sum(p.grad is not None for p in parameters.values()),
                len({id(s()) for s in storages if s() is not None and s().nbytes()}),
            )
        )

    for p in parameters.values():
        p.register_post_accumulate_grad_hook(watch)
    build_optimizer(typed, model, 1)
    tokens = torch.arange(VOCAB).unsqueeze(0)
    with context_parallel(meshes.cp, {"tokens": tokens}) as local:
        model(local["tokens"], local.get("input_pos")).square().mean().backward()
    moved = sum(not torch.equal(p.to_local(), before[name]) for name, p in parameters.items())
    left = sum(p.grad is not None for p in parameters.values())
    return *(max(numbers) for numbers in zip(*alive, strict=True)), moved, left, len(parameters)


def _norms_of_placements():
    """GradientNorm of DTensors that are sharded and replicated in every way, and the true norm."""
    from torchtune_cp.training.optim_in_bwd import GradientNorm

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
    layouts = [
        (mesh, (Replicate(), Shard(0))),
        (mesh, (Shard(1), Replicate())),
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Replicate(), Replicate())),
        (flat, (Shard(0),)),
    ]
    torch.manual_seed(0)
    grads = [torch.randn(6, 5) for _ in range(len(layouts) + 1)]
    norm = GradientNorm()
    norm.add(grads[-1])
    for grad, (where, placements) in zip(grads[:-1], layouts, strict=True):
        norm.add(distribute_tensor(grad, where, placements))
    return norm.total(), torch.cat(grads).norm()


def _watch_then_run(cfgs):
    os.environ["TUNE_ALLOW_COMPONENTS"] = "tests"
    norms = [_norms_of_placements()] if torch.distributed.get_world_size() == 4 else []
    alive = [_gradients_alive(cfg) for cfg in cfgs]
    run_recipe(cfgs)
    return norms, alive


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_equals_a_plain_loop_and_the_ordinary_optimizer_and_frees_gradients_at_once(
    tmp_path, world
):
    save_llama(tmp_path / "base")
    one = reference_step(tmp_path / "base", uneven_samples(), SGD_LR)
    three = _plain_adamw(tmp_path / "base")
    cfgs = list(_configs(tmp_path / "base", tmp_path, world))
    watched = run_ranks(world, _watch_then_run, cfgs)
    for norms, alive in watched:
        for norm, expected in norms:
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for cfg, (gradients, buffers, moved, left, count) in zip(cfgs, alive, strict=True):
            if cfg.optimizer_in_bwd:
                # FSDP reduces a group's gradients in one buffer and hands them out one by one. With
                # replicas it would keep all buffers: the last group's goes when the next one comes.
                assert gradients == 1
                assert buffers == (2 if _REPLICATE in cfg else 1)
                assert (moved, left) == (count, 0)
            else:
                assert gradients == count
                assert buffers == 4  # head, two layers, embedding
                assert (moved, left) == (0, count)
    for name in MESHES[world]:
        sgd = tmp_path / f"{name}_sgd"
        (line,) = read_metrics(sgd / "metrics.jsonl")
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-6)
        _assert_weights(sgd, one["after"])

        inside, after = tmp_path / f"{name}_adamw_True", tmp_path / f"{name}_adamw_False"
        lines = [read_metrics(folder / "metrics.jsonl") for folder in (inside, after)]
        assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
        assert [line["loss"] for line in lines[0]] == pytest.approx(three["loss"], rel=1e-5)
        for key, expected in (
            ("grad_norm", three["grad_norm"]),
            ("lr", [ADAMW["lr"] * (1 - step / STEPS) for step in range(STEPS)]),
        ):
            for run in lines:
                assert [line[key] for line in run] == pytest.approx(expected, rel=1e-5), key
        _assert_weights(inside, three["after"])
        same = [load_file(folder / "final" / "model.safetensors") for folder in (inside, after)]
        for key, weight in same[0].items():
            assert torch.equal(weight, same[1][key]), (name, key)
