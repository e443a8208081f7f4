import pytest

from torchtune_cp.distributed import ParallelDims
from torchtune_cp.distributed.context_parallel.layout import padded_length, ring_layout
from torchtune_cp.errors import UserError


def test_dp_shard_minus_one_takes_what_the_world_leaves():
    dims = ParallelDims(dp_replicate=2, dp_shard=-1, cp=2, tp=1, world_size=8)
    assert dims.dp_shard == 2
    assert dims.dp == 4


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate": 1, "dp_shard": 3, "cp": 2, "tp": 1},
        {"dp_replicate": 3, "dp_shard": -1, "cp": 1, "tp": 1},
    ],
)
def test_a_product_that_is_not_the_world_size_names_every_degree(degrees):
    with pytest.raises(UserError) as e:
        ParallelDims(**degrees, world_size=4)
    for part in (
        f"data_parallel_replicate_dim={degrees['dp_replicate']}",
        f"data_parallel_shard_dim={degrees['dp_shard']}",
        f"context_parallel_dim={degrees['cp']}",
        "tensor_parallel_dim=1",
        "4",
    ):
        assert part in str(e.value)


def test_a_degree_below_one_is_refused_by_its_key():
    with pytest.raises(UserError, match="context_parallel_dim=0"):
        ParallelDims(dp_replicate=1, dp_shard=-1, cp=0, tp=1, world_size=1)


def test_sequences_are_padded_to_two_chunks_a_rank_times_tp():
    def divisor(cp, tp):
        return ParallelDims(1, 1, cp, tp, cp * tp).min_seq_len_divisor

    assert divisor(1, 1) == 1
    assert divisor(4, 1) == 8
    assert divisor(2, 2) == 8
    assert divisor(1, 2) == 2
    assert [padded_length(n, 8) for n in (1, 8, 2999)] == [8, 8, 3000]


def test_head_tail_gives_every_rank_the_same_causal_work():
    indices = ring_layout((1, 48), 48, 4, is_causal=True).indices
    assert indices[0].tolist() == [0, 1, 2, 3, 4, 5, 42, 43, 44, 45, 46, 47]
    assert sorted(indices.flatten().tolist()) == list(range(48))
    work = (indices + 1).sum(dim=1)  # a token at position p attends to p + 1 tokens
    assert len(set(work.tolist())) == 1


def test_a_length_that_does_not_divide_is_never_cut():
    with pytest.raises(ValueError, match="not multiples of 8"):
        ring_layout((1, 12), 12, 4, is_causal=True)
