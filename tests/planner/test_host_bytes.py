"""What a plan says of host memory, against sums written out by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner_cases import ALL_ON_HOST, FULL, OFFLOAD, small_config
from torchtune_cp.config import to_typed
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.simulate import rank_profile
from torchtune_cp.training.memory.host import piece_sizes

RANKS = 2
SEQ_LEN = 20_000

# The parameters of the config of benchmarks.planner_cases, in the order in which FSDP reduces a group's.
WIDTH, HIDDEN, VOCAB, LAYERS, KV_WIDTH = 128, 384, 512, 4, 32
LAYER = {
    "attn_norm": (WIDTH,),
    "q": (WIDTH, WIDTH),
    "k": (KV_WIDTH, WIDTH),
    "v": (KV_WIDTH, WIDTH),
    "o": (WIDTH, WIDTH),
    "mlp_norm": (WIDTH,),
    "gate": (HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
    "up": (HIDDEN, WIDTH),
}
OUTER = {"embedding": (VOCAB, WIDTH), "norm": (WIDTH,), "output": (VOCAB, WIDTH)}


def shard(shape):
    """Bytes of a rank's float32 shard; every first dimension is even."""
    return 4 * math.prod(shape) // RANKS


SHARDS = [shard(s) for s in (*OUTER.values(), *LAYERS * tuple(LAYER.values()))]
LARGEST = shard(OUTER["embedding"])
#: AdamW: two moments like the shard and a step count of four bytes.
STATES = sum(2 * size + 4 for size in SHARDS)
#: A layer's input, bfloat16. The last layer's stays on the device.
INPUT = SEQ_LEN // RANKS * WIDTH * 2
INPUTS = (LAYERS - 1) * INPUT


def rounded(size):
    """What torch takes for pinned memory."""
    return 1 << (size - 1).bit_length()


#: An input is pinned in two pieces, 2 MiB and the rest.
assert piece_sizes(INPUT) == [2**21, INPUT - 2**21]
PINNED_INPUTS = (LAYERS - 1) * (2**21 + rounded(INPUT - 2**21))
#: FSDP pins shards one by one.
PINNED_SHARDS = sum(map(rounded, SHARDS))


@pytest.fixture(scope="module")
def profiles():
    cases = {
        "optimizer": {"optimizer_on_host": True} | OFFLOAD,
        "shards": {"fsdp_cpu_offload": True} | OFFLOAD,
        "both": ALL_ON_HOST | OFFLOAD,
    }
    tasks = [
        {
            "cfg": to_typed(
                small_config(context_parallel_dim=RANKS, **FULL | overrides), world_size=RANKS
            ),
            "rank": 0,
            "world_size": RANKS,
            "seq_len": SEQ_LEN,
            "gpu": True,
        }
        for overrides in cases.values()
    ]
    return dict(zip(cases, run_apart(rank_profile, tasks), strict=True))


def test_optimizer_on_the_host(profiles):
    """States; a shard and its gradient at a time; the inputs of the layers whose backward is to come."""
    profile = profiles["optimizer"]
    # The output's come first, when all inputs are still there.
    assert profile.host_peak == STATES + INPUTS + 2 * LARGEST
    # Pinned: the inputs, and a shard and a gradient of each size; what was pinned once is kept.
    sizes = {rounded(size) for size in SHARDS}
    assert profile.host_needed == STATES + PINNED_INPUTS + 2 * sum(sizes)
    # All gradients and copies of shards may wait if the host is slower than backward.
    assert profile.backlog == 2 * PINNED_SHARDS


def test_shards_on_the_host(profiles):
    """Shards, states and, before the update, all gradients, which are pinned as the shards are."""
    profile = profiles["shards"]
    assert profile.host_peak == max(
        2 * sum(SHARDS) + STATES,
        # The last layer's are there when no input has come back.
        sum(SHARDS)
        + STATES
        + INPUTS
        + sum(map(shard, (OUTER["norm"], OUTER["output"], *LAYER.values()))),
    )
    # The norm of each gradient (float32), all of them in float64, and their squares.
    norms = (4 + 8 + 8) * len(SHARDS)
    assert profile.host_needed == STATES + PINNED_INPUTS + 2 * PINNED_SHARDS + norms
    assert profile.backlog == 0


def test_shards_and_optimizer_on_the_host(profiles):
    """Shards, states and two gradients: FSDP lets go of one when it has copied the next of its group."""
    profile = profiles["both"]
    two = shard(LAYER["gate"]) + shard(LAYER["down"])
    assert profile.host_peak == sum(SHARDS) + STATES + INPUTS + two
    # Gradients of parameters with a hook are not pinned.
    assert profile.host_needed == PINNED_SHARDS + STATES + PINNED_INPUTS + two
    assert profile.backlog == sum(SHARDS)
