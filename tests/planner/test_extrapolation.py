"""Traces of few layers, extrapolated, give to the byte what all layers give."""

from __future__ import annotations

import pytest

from benchmarks.planner_cases import BY_OP, FULL, OFFLOAD, SEQ_LEN, small_config
from torchtune_cp.config import to_typed
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.profile import layers_to_trace
from torchtune_cp.planner.simulate import rank_profile

CP2 = {"context_parallel_dim": 2}
EVERY_SECOND = {"ac_mode": "selective", "ac_option": "2"}

#: name: (layers, ranks, on a GPU, overrides)
CASES = {
    "gpu_full": (7, 2, True, CP2 | FULL),
    "cpu_nothing_kept_back": (7, 2, False, CP2),
}
MORE = {
    "gpu_offload": (8, 2, True, CP2 | FULL | OFFLOAD),
    "gpu_by_operator": (7, 2, True, CP2 | BY_OP),
    "gpu_every_second": (11, 2, True, CP2 | EVERY_SECOND),
    "gpu_shards_on_host": (7, 2, True, CP2 | FULL | OFFLOAD | {"fsdp_cpu_offload": True}),
    "gpu_unfused": (7, 2, True, CP2 | FULL | {"optimizer": {"fused": None}}),
    "gpu_in_backward": (7, 4, True, CP2 | FULL | {"optimizer_in_bwd": True}),
    "cpu_every_second_even": (10, 2, False, CP2 | EVERY_SECOND),
    "cpu_tensor_parallel": (7, 4, False, CP2 | FULL | {"tensor_parallel_dim": 2}),
    "cpu_replicas_accumulate": (
        7,
        4,
        False,
        CP2 | {"data_parallel_replicate_dim": 2, "gradient_accumulation_steps": 2},
    ),
}


def tasks_of(cases):
    for layers, world, gpu, overrides in cases.values():
        tree = small_config(**overrides)
        tree.model.num_layers = layers
        for exact in (False, True):
            yield {
                "cfg": to_typed(tree, world_size=world),
                "rank": 0,
                "world_size": world,
                "seq_len": SEQ_LEN,
                "gpu": gpu,
                "exact": exact,
            }


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="two"),
        pytest.param(MORE, id="more", marks=pytest.mark.slow),
    ],
)
def test_extrapolated_is_exact(cases):
    profiles = run_apart(rank_profile, list(tasks_of(cases)))
    for name, guessed, true in zip(cases, profiles[::2], profiles[1::2], strict=True):
        assert guessed.peak.total == true.peak.total, name
        assert guessed.peak.location == true.peak.location, name
        assert guessed.peak.device == true.peak.device, name
        assert len(guessed.moments) == len(true.moments), name
        differing = [
            (g.location.describe(), t.location.describe(), g.total - t.total)
            for g, t in zip(guessed.moments, true.moments, strict=True)
            if g.total != t.total
        ]
        assert not differing, (name, differing[:5])
        assert guessed.host_peak == true.host_peak, name
        assert guessed.transfers == true.transfers, name
        assert guessed.flops == pytest.approx(true.flops), name
        assert guessed.moved == pytest.approx(true.moved), name
        assert guessed.copied == pytest.approx(true.copied), name


def test_a_model_hardly_deeper_than_the_traces_is_traced_whole():
    assert layers_to_trace(5) is None
    assert layers_to_trace(6) == (4, 5)
    assert layers_to_trace(11, period=2) == (7, 9)
