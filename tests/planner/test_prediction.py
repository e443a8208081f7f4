"""What a plan says against what really run steps take, byte by byte."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_ranks
from tests.planner.configs import BY_OP, FULL, OFFLOAD, SEQ_LEN, small_config
from tests.planner.measured import measured_steps
from torchtune_cp.config import to_typed
from torchtune_cp.planner.plan import planned_ranks
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.simulate import rank_profile

TOLERANCE = 0.001  # the aim is 0.05

TWO = {
    "cp2_full_offload": {"context_parallel_dim": 2} | FULL | OFFLOAD,
    "cp2_op_accumulate": {"context_parallel_dim": 2, "gradient_accumulation_steps": 2} | BY_OP,
    "cp2_in_backward_fp32": {"context_parallel_dim": 2, "optimizer_in_bwd": True, "dtype": "fp32"},
}
FOUR = {
    "cp4_full": {"context_parallel_dim": 4} | FULL,
    "hsdp_cp2_clip": {
        "context_parallel_dim": 2,
        "data_parallel_replicate_dim": 2,
        "clip_grad_norm": 1.0,
    },
    "tp2_cp2": {"context_parallel_dim": 2, "tensor_parallel_dim": 2},
}
MORE_OF_TWO = {
    "cp1": {"context_parallel_dim": 1},
    "cp2": {"context_parallel_dim": 2},
    "cp2_full": {"context_parallel_dim": 2} | FULL,
    "cp2_every_second": {"context_parallel_dim": 2, "ac_mode": "selective", "ac_option": "2"},
    "cp2_op_kv": {"context_parallel_dim": 2, "ac_mode": "selective", "ac_option": "op_kv"},
    "cp2_offload_alltoall": {
        "context_parallel_dim": 2,
        "context_parallel_rotate_method": "alltoall",
    }
    | OFFLOAD,
    "cp2_own_groups": {
        "context_parallel_dim": 2,
        "custom_sharded_layers": ["tok_embeddings", "output", "layers.1.mlp"],
    }
    | FULL,
    "cp2_kept_gathered": {"context_parallel_dim": 2, "fsdp_reshard_after_forward": False} | FULL,
    "cp2_float8": {
        "context_parallel_dim": 2,
        "enable_fp8_training": True,
        "fp8_emulate": True,
    }
    | FULL,
    "cp2_plain_adamw": {"context_parallel_dim": 2, "optimizer": {"fused": False}} | FULL,
}
MORE_OF_FOUR = {
    "dp2_cp2": {"context_parallel_dim": 2},
    "dp2_cp2_full_offload": {"context_parallel_dim": 2, "batch_size": 2} | FULL | OFFLOAD,
    "hsdp_cp2_in_backward": {
        "context_parallel_dim": 2,
        "data_parallel_replicate_dim": 2,
        "optimizer_in_bwd": True,
    },
}


def compare(world, cases):
    """Rows of (case, rank, predicted peak, measured peak, predicted sent, measured sent)."""
    trees = {name: small_config(**overrides) for name, overrides in cases.items()}
    measured = run_ranks(world, measured_steps, list(trees.values()), SEQ_LEN)
    rows, tasks = [], []
    for i, (name, tree) in enumerate(trees.items()):
        cfg = to_typed(tree, world_size=world)
        degrees = {"cp": cfg.context_parallel_dim, "tp": cfg.tensor_parallel_dim}
        for rank in planned_ranks(degrees):
            tasks.append(
                {
                    "cfg": cfg,
                    "rank": rank,
                    "world_size": world,
                    "seq_len": SEQ_LEN,
                    "gpu": False,
                    "separate_host": True,
                }
            )
            rows.append((name, rank, measured[rank][i]))
    predicted = run_apart(rank_profile, tasks)
    return [(*row, profile) for row, profile in zip(rows, predicted, strict=True)]


def sent_by_kind(profile):
    total = {}
    for transfer, (sent, _) in profile.transfers.items():
        total[transfer.kind] = total.get(transfer.kind, 0) + sent
    return total


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(4, FOUR, id="four"),
        pytest.param(2, MORE_OF_TWO, id="more_of_two", marks=pytest.mark.slow),
        pytest.param(4, MORE_OF_FOUR, id="more_of_four", marks=pytest.mark.slow),
    ],
)
def test_peak_and_bytes_sent_are_those_of_a_real_step(world, cases):
    for name, rank, measured, profile in compare(world, cases):
        predicted = profile.peak.total
        assert abs(predicted - measured["peak"]) <= TOLERANCE * measured["peak"], (name, rank)
        assert profile.host_peak == measured["host"], (name, rank)
        assert sent_by_kind(profile) == measured["sent"], (name, rank)
