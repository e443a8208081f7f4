"""The longest sequence and the best mesh, on plans whose memory and time are made up."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest

from benchmarks.planner_cases import small_config
from torchtune_cp.config import to_typed
from torchtune_cp.errors import UserError
from torchtune_cp.planner import suggest as suggest_module
from torchtune_cp.planner.cluster import Cluster
from torchtune_cp.planner.devices import DEVICES, GIB
from torchtune_cp.planner.profile import Moment, Profile
from torchtune_cp.planner.search import longest
from torchtune_cp.planner.suggest import as_table, described, ladder, meshes, suggest
from torchtune_cp.planner.trace import CATEGORIES, Location

H100 = DEVICES["h100-80g"]


def plans(needed, memory=80 * GIB, host=lambda n: 0, host_memory=math.inf):
    """A stand-in for make_plan, and the lengths it was asked for."""
    asked = []

    def plan_at(length):
        asked.append(length)
        load = max(needed(length) / memory, host(length) / host_memory)
        return SimpleNamespace(
            needed=needed(length),
            host_node=host(length),
            load=load,
            fits=load <= 1,
            seq_len=length,
            cluster=SimpleNamespace(device=SimpleNamespace(memory=memory), host_memory=host_memory),
        )

    return plan_at, asked


@pytest.mark.parametrize(
    "needed",
    [
        lambda n: 20 * GIB + n * 60_000,
        lambda n: max(30 * GIB + n * 1_000, n * 77_000),  # the peak moves to another place
        lambda n: max(78 * GIB, n * 400_000),  # no slope at the start
    ],
)
@pytest.mark.parametrize("multiple", [1, 16, 48])
def test_the_longest_sequence_fits_and_little_more_does_not(needed, multiple):
    plan_at, asked = plans(needed)
    found = longest(plan_at, multiple, start=8192)
    assert found.fits
    assert found.seq_len % multiple == 0
    assert found.seq_len in asked, "simulated at its own length"
    assert needed(int(found.seq_len * 1.01)) > 80 * GIB
    assert len(asked) <= 14
    assert len(set(asked)) == len(asked)


def test_a_node_that_is_full_ends_the_search_as_a_full_device_does():
    said = []
    plan_at, asked = plans(
        lambda n: n * 10_000, host=lambda n: 30 * GIB + n * 262_144, host_memory=1397 * GIB
    )
    found = longest(plan_at, 16, start=8192, notify=said.append)
    limit = (1397 - 30) * GIB / 262_144
    assert limit * 0.99 < found.seq_len <= limit
    assert len(asked) <= 14
    assert any("host 1397" in line or "host 139" in line for line in said), said
    # Without the node's limit the device's own is far beyond.
    assert longest(plans(lambda n: n * 10_000)[0], 16, start=8192).seq_len > 1.4 * limit


def test_what_never_fits_and_what_always_does_are_said():
    with pytest.raises(UserError, match="not even 256 tokens fit"):
        longest(plans(lambda n: 90 * GIB + n)[0], 8, start=8192)
    with pytest.raises(UserError, match="no limit"):
        longest(plans(lambda n: n, memory=float("inf"))[0], 8, start=8192)


SIZES = {"num_heads": 32, "num_kv_heads": 8, "intermediate_dim": 14336, "vocab_size": 128256}


def test_meshes_fill_the_world_and_tensor_parallelism_stays_in_a_node():
    cluster = Cluster(size=16, per_node=8, device=H100)
    found = list(meshes(cluster, SIZES))
    assert len(found) == len({tuple(m.values()) for m in found})
    for mesh in found:
        product = 1
        for degree in mesh.values():
            product *= degree
        assert product == 16, mesh
    assert {m["tensor_parallel_dim"] for m in found} == {1, 2, 4, 8}
    assert {m["context_parallel_dim"] for m in found} == {1, 2, 4, 8, 16}
    replicated = [m for m in found if m["data_parallel_replicate_dim"] > 1]
    assert replicated, "sharding within the node is tried"
    for mesh in replicated:
        assert mesh["data_parallel_replicate_dim"] == 2
        assert mesh["context_parallel_dim"] * mesh["tensor_parallel_dim"] <= 8
    uneven = {m["tensor_parallel_dim"] for m in meshes(cluster, SIZES | {"num_kv_heads": 2})}
    assert uneven == {1, 2}


def made_up(memory_of, seconds_of):
    """Profiles whose memory and time follow from the config, in place of simulations."""

    def run_apart(_function, tasks, keep_refusals=False):
        assert keep_refusals
        profiles = []
        for task in tasks:
            cfg = task["cfg"]
            device = dict.fromkeys(CATEGORIES, 0) | {"working": round(memory_of(cfg) * GIB)}
            moment = Moment(Location("forward", 0, "", ""), device, 0)
            flops = {("matmul", False): seconds_of(cfg) * H100.flops}
            profiles.append(Profile([moment], flops=flops))
        return profiles

    return run_apart


def test_the_fastest_lever_that_fits_comes_first_on_each_mesh(monkeypatch):
    def memory_of(cfg):
        kept = 20 if cfg.enable_activation_checkpointing else 90
        kept = 50 if cfg.ac_option == "op" else kept
        kept = 5 if cfg.enable_activation_offloading else kept
        return 30 + kept * 4 / cfg.context_parallel_dim

    def seconds_of(cfg):
        slow = 1.3 if cfg.enable_activation_checkpointing else 1.0
        # A step of more samples takes as much longer: only levers make a difference.
        return slow * 8 / cfg.context_parallel_dim

    monkeypatch.setattr(suggest_module, "run_apart", made_up(memory_of, seconds_of))
    cfg = to_typed(small_config(), world_size=None)
    cluster = Cluster(size=8, per_node=8, device=H100)
    sizes = {"num_heads": 1}  # no tensor parallelism
    said = []
    found = suggest(cfg, cluster, 65536, sizes, notify=said.append)
    best = {}
    for suggestion in found:
        assert suggestion.plan.fits
        best.setdefault(suggestion.overrides["context_parallel_dim"], suggestion.overrides)
    assert set(best) == {1, 2, 4, 8}
    assert best[1]["enable_activation_offloading"]
    assert best[2]["enable_activation_checkpointing"]
    assert not best[2]["enable_activation_offloading"]
    assert best[8]["enable_activation_checkpointing"] is False
    speeds = [s.plan.tokens_per_second for s in found]
    assert all(a > b * 0.95 for a, b in pairwise(speeds))
    assert any("does not fit" in line for line in said)
    text = as_table(found)
    assert described(found[0].overrides) in text.splitlines()[1]


def test_of_equally_fast_meshes_the_one_with_less_memory_comes_first(monkeypatch):
    monkeypatch.setattr(
        suggest_module,
        "run_apart",
        made_up(
            lambda cfg: 10 + 8 / cfg.context_parallel_dim,
            lambda cfg: 8 / cfg.context_parallel_dim * (1 + cfg.context_parallel_dim / 4000),
        ),
    )
    cfg = to_typed(small_config(), world_size=None)
    found = suggest(cfg, Cluster(4, 4, H100), 8192, {"num_heads": 1})
    assert found[0].overrides["context_parallel_dim"] == 4


def test_a_lever_that_the_config_does_not_go_with_is_passed_over(monkeypatch):
    tried = []

    def memory_of(cfg):
        tried.append((cfg.optimizer_in_bwd, cfg.enable_activation_offloading))
        return 50 if cfg.enable_activation_offloading else 100

    monkeypatch.setattr(suggest_module, "run_apart", made_up(memory_of, lambda cfg: 1.0))
    cfg = to_typed(small_config(clip_grad_norm=1.0), world_size=None)
    found = suggest(cfg, Cluster(1, 1, H100), 8192, {"num_heads": 1})
    assert (True, False) not in tried
    assert found
    assert all(s.overrides["enable_activation_offloading"] for s in found)
    tried.clear()
    suggest(to_typed(small_config(), world_size=None), Cluster(1, 1, H100), 8192, {"num_heads": 1})
    assert (True, False) in tried


@pytest.mark.parametrize(
    ("overrides", "kv_heads", "chunks"),
    [
        ({}, 8, 8),
        ({}, 2, 8),
        ({"context_parallel_dim": 8}, 8, 8),
        ({"context_parallel_dim": 8, "context_parallel_method": "ulysses"}, 8, 4),
        ({"context_parallel_dim": 4, "context_parallel_method": "ulysses"}, 8, 8),
        ({"context_parallel_dim": 32, "context_parallel_method": "ulysses"}, 8, 4),
        ({"context_parallel_dim": 64, "context_parallel_method": "ring"}, 32, 8),
        ({"tensor_parallel_dim": 2}, 8, None),
    ],
)
def test_heads_are_done_in_as_many_chunks_as_model_and_method_allow(overrides, kv_heads, chunks):
    cfg = to_typed(small_config(), world_size=None)
    cluster = math.prod(v for v in overrides.values() if isinstance(v, int))
    sizes = {"num_heads": 32, "num_kv_heads": kv_heads}
    rungs = ladder(cfg, overrides, cluster, sizes)
    assert rungs
    assert rungs[-1][1].attention_head_chunks == chunks
    # What saves more comes on top of what saves less, and costs nothing where it is off.
    assert rungs[0][1].attention_head_chunks is None


def test_a_single_head_is_not_done_in_chunks():
    cfg = to_typed(small_config(), world_size=None)
    rungs = ladder(cfg, {}, 1, {"num_heads": 1})
    assert all(config.attention_head_chunks is None for _, config in rungs)
