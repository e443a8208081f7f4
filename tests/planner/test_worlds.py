"""Plans of what no test can run: a thousand ranks, shards on the host, configs of a Hugging Face folder."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner_cases import FULL, OFFLOAD, SEQ_LEN, small_config
from torchtune_cp.config import to_typed
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.simulate import rank_profile


def task(world, overrides, rank=0, gpu=True):
    return {
        "cfg": to_typed(small_config(**overrides), world_size=world),
        "rank": rank,
        "world_size": world,
        "seq_len": SEQ_LEN,
        "gpu": gpu,
    }


def sent(profile, kind, mesh):
    return sum(b for t, (b, _) in profile.transfers.items() if (t.kind, t.mesh) == (kind, mesh))


def test_shards_shrink_with_the_world_and_may_lie_on_the_host():
    many = {"context_parallel_dim": 8, "data_parallel_replicate_dim": 16} | FULL
    on_host = {"context_parallel_dim": 2, "fsdp_cpu_offload": True} | FULL | OFFLOAD
    thousand, two, host = run_apart(
        rank_profile,
        [
            task(1024, many, rank=1023),
            task(2, {"context_parallel_dim": 2} | FULL),
            task(2, on_host),
        ],
    )
    # 1,024 ranks: 16 replicas of 64 shards.
    shards = [p.moments[0].device["parameters"] for p in (two, thousand)]
    assert shards[0] / shards[1] == pytest.approx(32, rel=0.05)  # shards are padded to whole rows
    assert sent(thousand, "all_reduce", "dp_replicate") > 0
    assert sent(two, "all_reduce", "dp_replicate") == 0
    assert all(m.device["parameters"] == 0 for m in host.moments)
    assert all(m.device["optimizer"] == 0 for m in host.moments)
    # Weights, two moments, and the gradients before the update.
    assert host.host_peak >= 4 * shards[0]
    # Shards go to the device for forward and again for backward, gradients come back.
    assert host.copied >= 3 * shards[0]


@pytest.mark.slow
@pytest.mark.parametrize("world", [512, 1024])
def test_large_worlds_of_several_meshes(world):
    meshes = [
        {"context_parallel_dim": 1},
        {"context_parallel_dim": 64},
        {"context_parallel_dim": 16, "tensor_parallel_dim": 2},
        {"context_parallel_dim": 32, "data_parallel_replicate_dim": 4},
    ]
    profiles = run_apart(rank_profile, [task(world, mesh | FULL, world - 1) for mesh in meshes])
    assert all(profile.peak.total > 0 for profile in profiles)


@pytest.mark.slow
def test_the_model_of_a_hugging_face_folder_is_planned_as_the_same_model_by_name(tmp_path):
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "intermediate_size": 384,
        "max_position_embeddings": SEQ_LEN,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    cp2 = {"context_parallel_dim": 2} | FULL
    by_folder = to_typed(small_config(**cp2), world_size=2)
    by_folder.model.clear()
    by_folder.model.update(
        {"_component_": "torchtune_cp.models.auto_model", "checkpoint_dir": str(tmp_path)}
    )
    by_name = small_config(**cp2)
    by_name.model.num_layers = 7
    shared = {"rank": 0, "world_size": 2, "seq_len": SEQ_LEN, "gpu": True}
    folder, name = run_apart(
        rank_profile,
        [{"cfg": by_folder, **shared}, {"cfg": to_typed(by_name, world_size=2), **shared}],
    )
    assert folder.peak.total == name.peak.total
    assert folder.transfers == name.transfers
