"""The loader's promises: same samples for every mesh (D15), same number of steps (D16), exact resume."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_cp.data import GlobalBatchSampler, TokenDataLoader, build_dataloader, collate
from torchtune_cp.errors import UserError


class Numbers:
    """Sample i is i + 1 tokens of value i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [index] * (index % 5 + 1)
        return {"tokens": tokens, "labels": tokens}


class RaisesAt(Numbers):
    """Row 3 is bad."""

    def __init__(self, size: int, error: Exception) -> None:
        super().__init__(size)
        self.error = error

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == 3:
            raise self.error
        return super().__getitem__(index)


def loader(size: int = 12, **kwargs: Any) -> TokenDataLoader:
    defaults: dict[str, Any] = {
        "batch_size": 2,
        "dp_rank": 0,
        "dp_degree": 1,
        "shuffle": True,
        "seed": 7,
        "drop_last": True,
        "collate_fn": collate,
    }
    dataset = kwargs.pop("dataset", Numbers(size))
    return build_dataloader(dataset, **{**defaults, **kwargs})


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def ids(batches: Any) -> list[list[int]]:
    return [batch["sample_ids"].tolist() for batch in batches]


def global_steps(dp_degree: int, **kwargs: Any) -> list[list[int]]:
    """The samples of each global step: the ranks' batches one after the other."""
    per_rank = [ids(loader(dp_rank=r, dp_degree=dp_degree, **kwargs)) for r in range(dp_degree)]
    assert len({len(batches) for batches in per_rank}) == 1
    return [flat(step) for step in zip(*per_rank, strict=True)]


def test_batches_hold_tensors_of_the_right_samples() -> None:
    batch = next(iter(loader(shuffle=False, batch_size=3)))
    assert batch["sample_ids"].tolist() == [0, 1, 2]
    assert batch["tokens"].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2]]
    assert all(isinstance(value, torch.Tensor) for value in batch.values())


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert ids(loader(6, shuffle=False)) == [[0, 1], [2, 3], [4, 5]]


def test_the_order_is_fixed_by_seed_and_epoch() -> None:
    first = loader()
    epoch0 = ids(first)
    assert ids(first) == epoch0
    assert ids(loader()) == epoch0
    first.set_epoch(1)
    epoch1 = ids(first)
    assert epoch1 != epoch0
    assert sorted(flat(epoch1)) == sorted(flat(epoch0)) == list(range(12))
    assert ids(loader(seed=8)) != epoch0


def test_the_order_does_not_depend_on_the_global_random_state() -> None:
    torch.manual_seed(1)
    before = ids(loader())
    torch.manual_seed(2)
    assert ids(loader()) == before
    state = torch.get_rng_state()
    GlobalBatchSampler(100, batch_size=2, seed=3).order(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_dp_ranks_read_disjoint_samples_and_equal_ranks_the_same() -> None:
    # D15: cp peers are built with the same dp_rank.
    rank0, peer0 = (ids(loader(dp_degree=2, dp_rank=0)) for _ in range(2))
    rank1 = ids(loader(dp_degree=2, dp_rank=1))
    assert rank0 == peer0
    assert not set(flat(rank0)) & set(flat(rank1))
    assert sorted(flat(rank0 + rank1)) == list(range(12))


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 3), (False, 4)])
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_seven_samples_on_two_ranks_make_the_same_number_of_steps(
    drop_last: bool, steps: int, dp_rank: int
) -> None:
    # D16
    made = loader(7, batch_size=1, dp_degree=2, dp_rank=dp_rank, drop_last=drop_last)
    assert len(made) == steps
    assert len(ids(made)) == steps


def test_fillers_have_no_label_and_no_sample_is_repeated() -> None:
    kwargs: dict[str, Any] = {"size": 5, "batch_size": 2, "shuffle": False, "drop_last": False}
    assert global_steps(2, **kwargs) == [[0, 1, 2, 3], [4, -1, -1, -1]]
    last = list(loader(dp_rank=1, dp_degree=2, **kwargs))[-1]
    assert last["tokens"].shape == (2, 1)
    assert (last["labels"] == -100).all()


def test_a_dataset_smaller_than_a_global_batch_is_refused_when_it_would_train_nothing() -> None:
    with pytest.raises(UserError, match=r"3 samples, fewer than one global batch of 4 .*drop_last"):
        loader(3, dp_degree=2)
    assert global_steps(2, size=3, shuffle=False, drop_last=False) == [[0, 1, 2, -1]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="no samples"):
        loader(dataset=Numbers(0), drop_last=False)
    with pytest.raises(UserError, match="batch_size must be a whole number of 1 or more, not 0"):
        loader(batch_size=0)
    with pytest.raises(UserError, match="dp_rank 2 is not one of the 2"):
        loader(dp_rank=2, dp_degree=2)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(8, 40),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_global_steps_do_not_depend_on_how_they_are_spread(
    size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    def steps(dp_degree: int, batch_size: int) -> list[list[int]]:
        samplers = [
            GlobalBatchSampler(
                size,
                batch_size=batch_size,
                dp_rank=rank,
                dp_degree=dp_degree,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
            )
            for rank in range(dp_degree)
        ]
        for sampler in samplers:
            sampler.epoch = epoch
        return [flat(step) for step in zip(*samplers, strict=True)]

    one = steps(1, 8)
    assert steps(2, 4) == one
    assert steps(8, 1) == one
    # With accumulation a global step is several batches in a row.
    halves = steps(2, 2)
    joined = [flat(halves[i : i + 2]) for i in range(0, len(halves), 2)]
    if drop_last:
        assert joined[: len(one)] == one
    else:
        assert [[i for i in step if i >= 0] for step in joined] == [
            [i for i in step if i >= 0] for step in one
        ]
        assert sorted(i for step in one for i in step if i >= 0) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(4, 40),
    stop=st.integers(0, 9),
    before=st.sampled_from([(1, 4), (2, 2), (4, 1), (2, 1)]),
    after=st.sampled_from([(1, 4), (2, 2), (4, 1), (1, 1), (1, 3)]),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_resuming_anywhere_on_another_mesh_goes_on_with_the_next_sample(
    size: int,
    stop: int,
    before: tuple[int, int],
    after: tuple[int, int],
    drop_last: bool,
    epoch: int,
) -> None:
    def build(mesh: tuple[int, int], rank: int) -> TokenDataLoader:
        return loader(
            size, dp_degree=mesh[0], batch_size=mesh[1], dp_rank=rank, drop_last=drop_last
        )

    states = []
    for rank in range(before[0]):
        first = build(before, rank)
        first.set_epoch(epoch)
        read = 0
        for _ in first:
            read += 1
            if read > stop:
                break
        states.append(first.state_dict())
    assert all(state == states[0] for state in states)

    order = first.global_sampler.order(epoch).tolist()
    position = min(read * before[0] * before[1], size)
    rest: list[list[list[int]]] = []
    for rank in range(after[0]):
        resumed = build(after, rank)
        resumed.load_state_dict(states[0])
        if resumed.epoch == epoch + 1:
            # Nothing was left of the epoch: on with the next one, from its beginning.
            left = size - position
            assert left < after[0] * after[1] if drop_last else left == 0
            order, position, epoch = resumed.global_sampler.order(epoch + 1).tolist(), 0, epoch + 1
        assert resumed.epoch == epoch
        resumed.set_epoch(epoch)
        assert resumed.steps_left == resumed.global_sampler.steps_after(position)
        rest.append(ids(resumed))
        assert len(rest[-1]) > 0
    following = [i for step in zip(*rest, strict=True) for batch in step for i in batch if i >= 0]
    expected = order[position:]
    if drop_last:
        expected = expected[: len(expected) // (after[0] * after[1]) * after[0] * after[1]]
    assert following == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_is_exact_whatever_workers_read_ahead(num_workers: int) -> None:
    whole = ids(loader(20))
    first = loader(20, num_workers=num_workers)
    batches = iter(first)
    seen = [next(batches)["sample_ids"].tolist() for _ in range(3)]
    assert seen == whole[:3]
    state = first.state_dict()
    assert state["samples_read"] == first.samples_read == 6
    del batches
    resumed = loader(20, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert ids(resumed) == whole[3:]


def test_a_state_taken_in_one_epoch_goes_on_into_the_next() -> None:
    uninterrupted = loader(10)
    expected = []
    for epoch in range(3):
        uninterrupted.set_epoch(epoch)
        expected += ids(uninterrupted)
    for stop in range(1, 15):
        first = loader(10)
        got: list[list[int]] = []
        for epoch in range(3):
            first.set_epoch(epoch)
            for batch in first:
                got.append(batch["sample_ids"].tolist())
                if len(got) == stop:
                    state = first.state_dict()
                    break
            if len(got) == stop:
                break
        resumed = loader(10)
        resumed.load_state_dict(state)
        for epoch in range(resumed.epoch, 3):
            resumed.set_epoch(epoch)
            got += ids(resumed)
        assert got == expected


def test_an_iteration_that_is_broken_off_starts_anew_the_next_time() -> None:
    made = loader(8, shuffle=False)
    next(iter(made))
    assert ids(made) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_set_epoch_forgets_a_place_in_another_epoch() -> None:
    made = loader(8)
    next(iter(made))
    state = made.state_dict()
    resumed = loader(8)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert resumed.samples_read == 0
    assert len(ids(resumed)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 9}, "num_samples 8, this run has 9"),
        ({"seed": 1}, "seed 7, this run has 1"),
        ({"shuffle": False}, "shuffle True, this run has False"),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(change: dict, message: str) -> None:
    state = loader(8).state_dict()
    with pytest.raises(UserError, match=message):
        loader(**{"size": 8, **change}).load_state_dict(state)


def test_the_state_survives_torch_save_and_json() -> None:
    import json

    made = loader(8)
    next(iter(made))
    assert json.loads(json.dumps(made.state_dict())) == made.state_dict()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_mistake_keeps_its_one_line_message(num_workers: int) -> None:
    bad = RaisesAt(6, UserError("row 3 of data.jsonl: column 'text' is null"))
    with pytest.raises(UserError) as caught:
        list(loader(dataset=bad, shuffle=False, num_workers=num_workers))
    assert str(caught.value) == "row 3 of data.jsonl: column 'text' is null"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_another_error_of_a_dataset_is_not_swallowed(num_workers: int) -> None:
    bad = RaisesAt(6, RuntimeError("broken disk"))
    made = iter(loader(dataset=bad, shuffle=False, num_workers=num_workers))
    next(made)
    with pytest.raises(RuntimeError, match="broken disk"):
        next(made)


def test_a_users_mistake_met_while_collating_is_reported() -> None:
    class Uneven(Numbers):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"tokens": [1, 2], "labels": [1]}

    with pytest.raises(UserError, match="sample 0 has 2 tokens but 1 labels"):
        next(iter(loader(dataset=Uneven(4), shuffle=False)))
