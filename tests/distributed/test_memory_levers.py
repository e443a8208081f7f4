"""Checkpointing and offloading under context parallelism: the same step, and really less memory."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.live_storage import LiveStorage
from tests.distributed.dispatch_watchers import _BelowDTensor
from tests.distributed.fixtures import (
    recipe_config,
    reference_step,
    run_recipe,
    save_llama,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from tests.unit.training.small_llama import LAYERS, gradients, loss_of, small_llama
from torchtune_cp.distributed import context_parallel
from torchtune_cp.training.memory import (
    apply_activation_checkpointing,
    apply_activation_offloading,
    apply_selective_checkpointing,
)

LR = 2.0
TOLERANCE = 1e-5  # see test_sgd_parity

FULL = {"enable_activation_checkpointing": True}
BY_OP = {"ac_mode": "selective", "ac_option": "op"}
OFFLOAD = {"enable_activation_offloading": True}
MODES = {
    "by_op": BY_OP,
    "by_op_kv": BY_OP | {"ac_option": "op_kv"},
    "offload": OFFLOAD,
    "offload_full": OFFLOAD | FULL,
    "cpu_shards": {"fsdp_cpu_offload": True},
    "all_three": OFFLOAD | BY_OP | {"fsdp_cpu_offload": True, "clip_grad_norm": 1e6},
}


def _run_and_watch(cfgs):
    """Run the recipe; return per run what was offloaded and what FSDP was told of it."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    from torchtune_cp.distributed import fsdp
    from torchtune_cp.training import setup

    offloads, policies = [], []
    apply, shard = setup.apply_activation_offloading, fsdp.fully_shard

    def watched_apply(model, device):
        offloads[-1] = apply(model, device)
        return offloads[-1]

    def watched_shard(*args, **kwargs):
        policies[-1].add(isinstance(kwargs["offload_policy"], CPUOffloadPolicy))
        return shard(*args, **kwargs)

    setup.apply_activation_offloading, fsdp.fully_shard = watched_apply, watched_shard
    for cfg in cfgs:
        offloads.append(None)
        policies.append(set())
        run_recipe([cfg])
    return [
        (None if o is None else (o.moved_bytes, o.fetched_bytes, o.host_bytes), p)
        for o, p in zip(offloads, policies, strict=True)
    ]


def _cases(world):
    dp = world // 2
    for mode, overrides in MODES.items():
        for accumulation in (1, 3):
            yield (
                f"{mode}_acc{accumulation}",
                overrides
                | {
                    "data_parallel_shard_dim": dp,
                    "context_parallel_dim": 2,
                    "gradient_accumulation_steps": accumulation,
                    "batch_size": 6 // accumulation // dp,
                    "optimizer": {"lr": LR},
                },
            )


def _assert_step(folder, reference):
    (line,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    weights = load_file(folder / "final" / "model.safetensors")
    for key, after in reference["after"].items():
        error = (weights[key] - after).abs().max() / after.abs().max()
        assert error < TOLERANCE, (folder.name, key, error)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_the_step_equals_a_plain_loop_and_each_lever_is_on(tmp_path, world):
    save_llama(tmp_path / "base")
    reference = reference_step(tmp_path / "base", uneven_samples(), LR)
    cases = dict(_cases(world))
    cfgs = [recipe_config(tmp_path / "base", tmp_path / name, **o) for name, o in cases.items()]
    watched = run_ranks(world, _run_and_watch, cfgs)
    for name in cases:
        _assert_step(tmp_path / name, reference)
    for rank in watched:
        for cfg, (offload, on_cpu) in zip(cfgs, rank, strict=True):
            assert on_cpu == {cfg.get("fsdp_cpu_offload", False)}
            assert (offload is not None) == cfg.get("enable_activation_offloading", False)
            if offload is not None:
                moved, fetched, left = offload
                assert moved == fetched > 0
                assert left == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_layers_with_checkpointing_by_operator_and_offloading_give_the_same_step(tmp_path):
    save_llama(tmp_path / "base")
    reference = reference_step(tmp_path / "base", uneven_samples(), LR)
    modes = {
        "op": BY_OP,
        "offload": OFFLOAD,
        "offload_full": OFFLOAD | FULL,
        "both": OFFLOAD | BY_OP,
    }
    cfgs = [
        recipe_config(
            tmp_path / "base",
            tmp_path / name,
            context_parallel_dim=2,
            batch_size=2,
            gradient_accumulation_steps=3,
            compile=True,
            optimizer={"lr": LR},
            **mode,
        )
        for name, mode in modes.items()
    ]
    run_ranks(2, run_recipe, cfgs)
    for name in modes:
        _assert_step(tmp_path / name, reference)


# --- what runs and what is sent in backward ------------------------------------------------------


class Ran(_BelowDTensor):
    """Counts local attention kernels, and gathers of keys and values between the ranks."""

    def __init__(self):
        super().__init__()
        self.kernels = 0
        self.gathers = 0

    def saw(self, func, args, out):
        name = func._overloadpacket.__name__
        self.kernels += name == "_scaled_dot_product_flash_attention_for_cpu"
        self.gathers += name == "all_gather_into_tensor"


CHECKPOINTING = {
    "none": lambda model: None,
    "full": apply_activation_checkpointing,
    "op": apply_selective_checkpointing,
    "op_kv": partial(apply_selective_checkpointing, keep_kv=True),
}


def _settled(storage):
    """Bytes alive once gloo's threads have let go of what they sent."""
    lowest = storage.live
    for _ in range(20):
        torch.distributed.barrier()
        time.sleep(0.01)
        lowest = min(lowest, storage.live)
    return lowest


def _count_and_measure():
    from torchtune_cp.distributed.context_parallel import torch_private

    cp = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = {"tokens": torch.arange(2 * 256).view(2, 256) % 32}
    results, grads = {}, {}
    for mode, apply in CHECKPOINTING.items():
        for offloaded in (False, True):
            model = small_llama()
            apply(model)
            offload = apply_activation_offloading(model, torch.device("cpu")) if offloaded else None
            with context_parallel(mesh, batch) as local:
                with LiveStorage() as storage:
                    loss = loss_of(model, local["tokens"], input_pos=local["input_pos"])
                    alive = _settled(storage) - (offload.host_bytes if offload else 0)
                with Ran() as ran:
                    loss.backward()
            assert not torch_private._kept_kv.buffers, (
                "gathered keys and values outlive their backward"
            )
            moved = offload.moved_bytes if offload else 0
            assert not offload or (offload.fetched_bytes, offload.host_bytes) == (moved, 0)
            results[mode, offloaded] = (ran.kernels, ran.gathers, alive, moved)
            grads[mode, offloaded] = gradients(model)
    same = all(
        torch.equal(grad, grads["none", False][name])
        for run in grads.values()
        for name, grad in run.items()
    )
    return results, same


@pytest.mark.distributed
def test_what_backward_repeats_and_what_stays_on_the_device_by_mode():
    cp = 2
    for results, same in run_ranks(cp, _count_and_measure):
        assert same, "a gradient changed"
        for offloaded in (False, True):
            ran = {mode: results[mode, offloaded][:2] for mode in CHECKPOINTING}
            # A ring of two has two local kernels a layer. Backward itself gathers once a layer.
            assert ran == {
                "none": (0, LAYERS),
                "full": (cp * LAYERS, 2 * LAYERS),
                "op": (0, LAYERS),
                "op_kv": (0, 0),
            }
        for mode in CHECKPOINTING:
            (*_, without, _), (*_, device, moved) = results[mode, False], results[mode, True]
            assert moved > 0
            # What moved is gone from the device, to the byte.
            assert without - device == moved, mode
        layer_input = 2 * 256 // cp * 64 * 4
        assert results["full", True][3] == (LAYERS - 1) * layer_input


def _moved_when_compiled():
    from torchtune_cp.training.compile import compile_layers

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    batch = {"tokens": torch.arange(2 * 256).view(2, 256) % 32}
    moved, grads = {}, {}
    for mode in ("none", "full", "op"):
        torch.compiler.reset()
        model = small_llama()
        CHECKPOINTING[mode](model)
        if mode != "none":
            compile_layers(model)
        offload = apply_activation_offloading(model, torch.device("cpu"))
        with context_parallel(mesh, batch) as local:
            loss_of(model, local["tokens"], input_pos=local["input_pos"]).backward()
        moved[mode] = offload.moved_bytes // (LAYERS - 1)
        grads[mode] = gradients(model)
    error = max(
        ((grad - run[name]).abs().max() / grad.abs().max()).item()
        for name, grad in grads["none"].items()
        for run in grads.values()
    )
    return moved, error


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_layers_keep_no_more_than_checkpointing_says():
    # All that a compiled layer keeps goes through the hooks, so offloading can tell how much it is.
    layer_input, output, logsumexp = 2 * 128 * 64 * 4, 2 * 128 * 64 * 4, 2 * 128 * 4 * 4
    random_state = 2 * 5056  # of a CPU generator: torch's compiler keeps it for each ring step
    for moved, error in run_ranks(2, _moved_when_compiled):
        assert error < 1e-5
        assert layer_input <= moved["full"] <= layer_input + random_state
        assert moved["op"] == layer_input + output + logsumexp


# --- the mission's claim -------------------------------------------------------------------------


def _peak(mesh, seq_len):
    from torchtune_cp.models.init import init_tensor_
    from torchtune_cp.models.llama3 import llama3
    from torchtune_cp.training import LinearCrossEntropyLoss

    model = llama3(
        vocab_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        embed_dim=128,
        intermediate_dim=384,
        max_seq_len=seq_len,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            init_tensor_(name, parameter, generator, model.config)
        parameter.grad = torch.zeros_like(parameter)  # gradients are no activations
    apply_activation_checkpointing(model)
    tokens = torch.arange(seq_len)[None] % 251
    loss_fn = LinearCrossEntropyLoss()
    with context_parallel(mesh, {"tokens": tokens, "labels": tokens}) as local:
        head = partial(loss_fn, labels=local["labels"])
        with LiveStorage() as storage:
            model(local["tokens"], local.get("input_pos"), output_fn=head).backward()
    return storage.peak


def _peaks(seq_len):
    cp = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    alone = _peak(None, seq_len) if torch.distributed.get_rank() == 0 else None
    torch.distributed.barrier()
    return _peak(mesh, seq_len), alone


@pytest.mark.distributed
def test_with_checkpointing_a_rank_of_four_holds_at_most_0_30_of_the_activations_of_one():
    ranks = run_ranks(4, _peaks, 8192)
    alone = ranks[0][1]
    shares = [peak / alone for peak, _ in ranks]
    assert max(shares) <= 0.30, shares
