"""One turn of a loop over tiles stands for all equal ones: the trace is that of every turn."""

from __future__ import annotations

import pytest

from benchmarks.planner_cases import small_config
from torchtune_cp.config import to_typed
from torchtune_cp.planner.simulate import simulate

LEVERS = {
    "mlp_tile_tokens": 16,
    "enable_activation_checkpointing": True,
    "loss": {
        "_component_": "torchtune_cp.training.loss.LinearCrossEntropyLoss",
        "max_chunk_tokens": 24,
        "reuse_hidden": True,
    },
}
CASES = {
    "one rank, head chunks, a GPU": (1, True, {"attention_head_chunks": 2}),
    "ulysses, head chunks": (
        2,
        False,
        {
            "context_parallel_dim": 2,
            "context_parallel_method": "ulysses",
            "attention_head_chunks": 2,
        },
    ),
    # Each tile is gathered and reduced: what is sent counts as often.
    "tensor parallelism": (2, False, {"tensor_parallel_dim": 2}),
}


@pytest.mark.parametrize("case", CASES)
# With and without a shorter last tile.
@pytest.mark.parametrize("seq_len", [500, pytest.param(512, marks=pytest.mark.slow)])
def test_a_few_tiles_are_as_good_as_all(case, seq_len):
    world, gpu, overrides = CASES[case]
    cfg = to_typed(small_config(**LEVERS, **overrides), world_size=world)
    few, every = (
        simulate(
            cfg, rank=0, world_size=world, seq_len=seq_len, gpu=gpu, num_layers=2, every_tile=every
        )
        for every in (False, True)
    )
    assert len(few.location) < len(every.location) / 2, "otherwise nothing was left out"
    assert few.device.sum(1).max() == every.device.sum(1).max()
    at = few.locations[few.location[few.device.sum(1).argmax()]]
    assert at == every.locations[every.location[every.device.sum(1).argmax()]]
    assert few.device.max(0).tolist() == every.device.max(0).tolist()
    assert few.flops == every.flops
    assert few.transfers == every.transfers
    assert (few.moved, few.host_moved, few.copied) == (every.moved, every.host_moved, every.copied)
    assert few.host.max() == every.host.max()
