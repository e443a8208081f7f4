"""Packed training through the recipe against a plain loop over the documents, one by one.

Every method, mesh and memory option; weights after one SGD step, as in test_sgd_parity.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.fixtures import recipe_config, reference_step, run_recipe, save_llama
from tests.distributed.harness import run_ranks
from tests.distributed.packs import documents, packs, packs_as_documents
from torchtune_cp.data import collate
from torchtune_cp.distributed import ContextParallelOptions, context_parallel, unshard
from torchtune_cp.models.llama3 import llama3

LR, TOLERANCE = 2.0, 1e-5
METHODS = {
    "ring": {},
    "alltoall": {"context_parallel_rotate_method": "alltoall"},
    "allgather": {"context_parallel_method": "allgather"},
    "ulysses": {"context_parallel_method": "ulysses"},
}
#: At cp 4 with 2 KV heads "ulysses" is Ulysses over 2 ranks and rings over 2; this one repeats KV heads.
ALL_HEADS = {"context_parallel_method": "ulysses", "context_parallel_ulysses_dim": 4}
LEVERS = {
    "checkpointing": {"enable_activation_checkpointing": True},
    "op": {"ac_mode": "selective", "ac_option": "op"},
    "op_kv": {"ac_mode": "selective", "ac_option": "op_kv"},
    "offloading": {"enable_activation_offloading": True},
    "cpu_offload": {"fsdp_cpu_offload": True},
    "accumulation": {"gradient_accumulation_steps": 4, "batch_size": 1},
    "optimizer_in_bwd": {"optimizer_in_bwd": True},
}


#: Refused.
NO_PAIR = ("alltoall", "op_kv")
#: What the default tests run, all others are slow.
PAIRS = [
    *(("ring", lever) for lever in ("checkpointing", "op_kv", "accumulation")),
    *(("allgather", lever) for lever in ("op_kv", "offloading", "optimizer_in_bwd")),
    *(("ulysses", lever) for lever in ("op", "op_kv", "cpu_offload")),
]


def _layouts(world):
    """(name, overrides) of every run on so many ranks; four packs in one optimizer step."""
    all_packs = {"batch_size": 4}
    cp = {"context_parallel_dim": world, **all_packs}
    if world == 2:
        yield "dp2_cp1", {"data_parallel_shard_dim": 2, "batch_size": 2}
        yield "tp2_cp1", {"tensor_parallel_dim": 2, **all_packs}
    for method, overrides in METHODS.items():
        yield f"cp{world}_{method}", cp | overrides
    if world == 2:
        for method, lever in PAIRS:
            yield f"{method}_{lever}", cp | METHODS[method] | LEVERS[lever]
        return
    yield "cp4_all_heads", cp | ALL_HEADS
    for method, overrides in METHODS.items():
        mesh = {"context_parallel_dim": 2, **overrides}
        yield f"dp2_cp2_{method}", mesh | {"data_parallel_shard_dim": 2, "batch_size": 2}
        yield f"tp2_cp2_{method}", mesh | {"tensor_parallel_dim": 2, **all_packs}


def _config(base, folder, **overrides):
    packed = {"_component_": "tests.distributed.packs.packs"}
    data = {"dataset": packed, "dataset_val": packed}
    return recipe_config(base, folder, **{**data, "optimizer": {"lr": LR}, **overrides})


def _errors(weights, reference):
    """Largest difference of each weight, in parts of its largest."""
    assert set(weights) == set(reference["after"])
    return {
        key: ((weights[key] - after).abs().max() / after.abs().max()).item()
        for key, after in reference["after"].items()
    }


def check_step(folder, reference):
    """Hold a run's files against the reference; returns its ``attention_imbalance``."""
    before, line, _ = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert before["val_tokens"] == line["tokens"] == reference["tokens"]
    # The validation before the step is on the same packs.
    assert before["val_loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert line["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    errors = _errors(load_file(folder / "final" / "model.safetensors"), reference)
    assert {key: e for key, e in errors.items() if not e < TOLERANCE} == {}
    return line["attention_imbalance"]


def _logits_of_documents():
    """With each method: the logits of all packs, then with one token of one document changed."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = llama3(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=128
    )
    batch = collate([packs()[i] for i in range(4)])
    # The second of the first pack with three or more documents.
    row = int((batch["seq_lens"] > 0).sum(1).ge(3).int().argmax())
    first = int(batch["seq_lens"][row, 0])
    end = first + int(batch["seq_lens"][row, 1])
    results = {}
    methods = {
        "ring": {"method": "ring"},
        "alltoall": {"method": "ring", "rotate_method": "alltoall"},
        "allgather": {"method": "allgather"},
        "ulysses": {"method": "ulysses"},
        "ulysses_and_ring": {
            "method": "ulysses",
            "options": ContextParallelOptions(ulysses_dim=2),
        },
    }
    for name, options in methods.items():
        logits = []
        for changed in (False, True):
            given = {key: value.clone() for key, value in batch.items()}
            if changed:
                given["tokens"][row, first] = (given["tokens"][row, first] + 1) % 64
            with torch.no_grad(), context_parallel(mesh, given, **options) as local:
                out = model(local["tokens"], local["input_pos"])
            logits.append(unshard(out, mesh, layout=local.layout))
        differs = (logits[0] != logits[1]).any(-1)
        inside = differs[row, first:end].clone()
        differs[row, first:end] = False
        results[name] = (bool(inside.all()), int(differs.sum()))
    return results


def _both(cfgs):
    logits = _logits_of_documents()
    run_recipe(cfgs)
    return logits


def _run(tmp_path, world, layouts):
    save_llama(tmp_path / "base")
    cfgs = [_config(tmp_path / "base", tmp_path / name, **overrides) for name, overrides in layouts]
    for logits in run_ranks(world, _both, cfgs):
        # Case N5: the changed document from its changed token on, and not one logit elsewhere.
        assert set(logits.values()) == {(True, 0)}, logits


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_packed_training_equals_a_plain_loop_over_the_documents(tmp_path, world):
    layouts = dict(_layouts(world))
    _run(tmp_path, world, layouts.items())
    reference = reference_step(tmp_path / "base", documents(), LR)
    imbalance = {name: check_step(tmp_path / name, reference) for name in layouts}
    # One pack is one long document, another many short ones: ranks that share no packs differ.
    assert all(1.0 <= value < 2.0 for value in imbalance.values()), imbalance
    # The same comparison sees a mask that leaks.
    leaking = reference_step(tmp_path / "base", packs_as_documents(), LR)
    assert leaking["tokens"] == reference["tokens"]
    weights = load_file(tmp_path / f"cp{world}_ring" / "final" / "model.safetensors")
    assert min(_errors(weights, leaking).values()) > 100 * TOLERANCE


@pytest.mark.distributed
def test_one_process_keeps_the_documents_of_a_pack_apart(tmp_path):
    save_llama(tmp_path / "base")
    cfg = _config(tmp_path / "base", tmp_path / "cp1", batch_size=4)
    run_ranks(1, run_recipe, [cfg])
    reference = reference_step(tmp_path / "base", documents(), LR)
    assert check_step(tmp_path / "cp1", reference) == 1.0


@pytest.mark.slow
@pytest.mark.distributed
def test_every_memory_option_with_every_method(tmp_path):
    common = {"context_parallel_dim": 2, "batch_size": 4}
    layouts = {
        f"{method}_{lever}": common | overrides | LEVERS[lever]
        for method, overrides in METHODS.items()
        for lever in LEVERS
        if (method, lever) not in (NO_PAIR, *PAIRS)
    }
    _run(tmp_path, 2, layouts.items())
    reference = reference_step(tmp_path / "base", documents(), LR)
    for name in layouts:
        check_step(tmp_path / name, reference)


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_layers_make_the_same_packed_step(tmp_path):
    save_llama(tmp_path / "base")
    cfgs = {
        f"{method}_{checkpointed}": _config(
            tmp_path / "base",
            tmp_path / f"{method}_{checkpointed}",
            context_parallel_dim=2,
            batch_size=2,
            gradient_accumulation_steps=2,
            compile=True,
            enable_activation_checkpointing=checkpointed,
            **METHODS[method],
        )
        for method in METHODS
        for checkpointed in (False, True)
    }
    run_ranks(2, run_recipe, list(cfgs.values()))
    reference = reference_step(tmp_path / "base", documents(), LR)
    for name in cfgs:
        check_step(tmp_path / name, reference)
