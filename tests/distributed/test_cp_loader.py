"""The context-parallel data loader on four ranks: who gets what, and how everybody ends."""

from __future__ import annotations

import functools
import itertools
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.harness import run_ranks
from torchtune_cp.attention import AttentionMask
from torchtune_cp.data import (
    MaskedDataset,
    MaskedLMCollator,
    TokenBudgetDataset,
    collate,
    create_cp_dataloader,
    esm_tokenizer,
    mlm_masking,
)
from torchtune_cp.datasets import StreamedBatches, protein_dataset
from torchtune_cp.datasets.example_proteins import EXAMPLE_PROTEINS
from torchtune_cp.distributed.context_parallel.cut import balanced_slices
from torchtune_cp.errors import UserError

LENGTHS = (3, 2, 9, 1, 16, 5, 8)
PAD = 1


class Numbered:
    """Samples made of their own number; may fail on one of them."""

    def __init__(self, lengths=LENGTHS, fails_at=None, error=None):
        self.lengths, self.fails_at, self.error = lengths, fails_at, error

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        if index == self.fails_at:
            raise self.error
        tokens = [4 + index % 20] * self.lengths[index]
        return {"tokens": tokens, "labels": tokens}


def _mesh(dp, cp, tp=1):
    return init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))


def _plain(batch):
    return {key: value.tolist() for key, value in batch.items()}


def _all(loader):
    return [_plain(batch) for batch in loader]


def _thd(cp):
    return MaskedLMCollator("thd", PAD, 2 * cp if cp > 1 else 1)


def _cut(batch, cp):
    return balanced_slices(batch, cp, AttentionMask(is_causal=False))


def _slices_and_order():
    """Every mesh: the batches of an epoch, by mesh."""
    found = {}
    for dp, cp, tp in ((1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2)):
        loader, sampler = create_cp_dataloader(
            Numbered,
            _mesh(dp, cp, tp),
            collate_fn=_thd(cp),
            batch_size=4 // dp,
            shuffle=True,
            seed=5,
            drop_last=False,
        )
        sampler.set_epoch(2)
        found[dp, cp, tp] = _all(loader)
        assert len(found[dp, cp, tp]) == len(loader) == 2
        loader.close()
    return found


def _resume():
    """The rest of an epoch, uninterrupted and after a resume; masks are part of it."""

    def make():
        masked = MaskedDataset(Numbered(), mlm_masking(esm_tokenizer(), seed=1, probability=0.5))
        return TokenBudgetDataset(masked, 16)

    def loader(dp, cp):
        return create_cp_dataloader(
            make, _mesh(dp, cp), collate_fn=_thd(cp), shuffle=True, seed=1, drop_last=False
        )[0]

    whole = loader(2, 2)
    whole.set_epoch(1)
    batches = iter(whole)
    next(batches)
    state = whole.state_dict()
    rest = [_plain(b) for b in batches]
    rest_of_other_epoch = _all(whole)  # the same epoch from its start
    whole.set_epoch(2)
    next_epoch = _all(whole)
    whole.close()
    again = loader(2, 2)
    again.load_state_dict(state)
    resumed = _all(again)
    again.set_epoch(2)
    resumed_next = _all(again)
    again.close()
    again.close()  # a second time does nothing
    with pytest.raises(RuntimeError, match="closed"):
        iter(again)
    other = loader(1, 4)
    other.load_state_dict(state)
    on_other_mesh = [i for b in other for i in b["sample_ids"].tolist()]
    other.close()
    assert rest
    assert rest != rest_of_other_epoch
    return rest, resumed, next_epoch, resumed_next, on_other_mesh


def _batches_of_buffer(samples, place):
    masking = mlm_masking(esm_tokenizer(), seed=1, probability=0.5)
    masked = MaskedDataset(samples, masking, first_id=place.samples)
    masked.set_epoch(place.epoch)
    return TokenBudgetDataset(masked, 600, first_id=place.samples, partial=True)


def _streamed():
    """Two epochs of three steps of a stream on every mesh, and the second step on after a resume."""

    def loader(dp, cp, buffer=8):
        def make():
            path = str(EXAMPLE_PROTEINS)
            stream = protein_dataset(
                esm_tokenizer(max_seq_len=600), path, streaming=True, shuffle_buffer_size=buffer
            )
            return StreamedBatches(stream, _batches_of_buffer, shuffle=True, seed=1)

        return create_cp_dataloader(
            make, _mesh(dp, cp), collate_fn=_thd(cp), batch_size=4 // dp, seed=1
        )[0]

    found = {}
    for dp, cp in ((4, 1), (2, 2), (1, 4)):
        whole = loader(dp, cp)
        found[dp, cp] = []
        for epoch in (0, 1):
            whole.set_epoch(epoch)
            for batch in itertools.islice(whole, 3):
                found[dp, cp].append(_plain(batch))
                if len(found[dp, cp]) == 2:
                    states = [whole.state_dict()]
        whole.close()
        dist.broadcast_object_list(states, src=0)  # rank 0 writes the checkpoint
    again = {}
    for dp, cp in ((2, 2), (1, 4)):
        resumed = loader(dp, cp)
        resumed.load_state_dict(states[0])
        resumed.set_epoch(0)
        again[dp, cp] = [_plain(next(iter(resumed)))]
        resumed.set_epoch(1)
        again[dp, cp] += [_plain(b) for b in itertools.islice(resumed, 3)]
        with pytest.raises(UserError) as caught:
            loader(dp, cp, buffer=9).load_state_dict(states[0])
        resumed.close()
    return found, again, str(caught.value), states[0]


def _given_up():
    """An iteration that is given up leaves nothing behind for the next."""
    loader, _ = create_cp_dataloader(
        Numbered(), _mesh(2, 2), collate_fn=_thd(2), batch_size=1, shuffle=False, drop_last=False
    )
    first = next(iter(loader))
    batches = iter(loader)
    next(batches), next(batches)
    again = _all(loader)
    loader.close()
    return _plain(first) == again[0] and len(again) == 4


def _group_call():
    """The form without a mesh, with another collate function and the default one."""
    group = None
    for first in (0, 2):
        pair = dist.new_group([first, first + 1])
        group = pair if dist.get_rank() in (first, first + 1) else group
    place = dist.get_rank() // 2
    loader, _ = create_cp_dataloader(
        Numbered(),
        cp_group=group,
        cp_world_size=2,
        cp_rank=dist.get_rank() % 2,
        dp_rank=place,
        dp_degree=2,
        batch_size=2,
        shuffle=False,
    )
    got = _all(loader)
    loader.close()
    words = []
    for wrong in ({"cp_world_size": 3}, {"cp_rank": 5}):
        with pytest.raises(UserError) as caught:
            create_cp_dataloader(Numbered(), cp_group=group, **wrong)
        words.append(str(caught.value))
    expected = [
        _cut(collate([{**Numbered()[i], "sample_id": i} for i in ids]), 2)
        for ids in ([2 * place, 2 * place + 1],)
    ]
    return got == [_plain(e[dist.get_rank() % 2]) for e in expected], words


class Unequal(Numbered):
    """Another number of samples on the ranks of the second data-parallel group."""

    def __len__(self):
        return 7 if dist.get_rank() < 2 else 6


def _fails(make, collate_fn, here_only):
    """Batches before the failure, what was raised, and whether it says that it began elsewhere."""
    count, caught = 0, None
    if here_only and dist.get_rank() != 2:
        make = Numbered  # the second group's reader alone fails
    try:
        loader, _ = create_cp_dataloader(
            make, _mesh(2, 2), collate_fn=collate_fn, batch_size=1, shuffle=False
        )
        for _ in loader:
            count += 1
    except Exception as error:  # noqa: BLE001
        caught = error
    else:
        loader.close()
    return count, type(caught).__name__, str(caught), getattr(caught, "from_another_rank", False)


def _cannot_open():
    raise UserError("there is no such file")


def _not_tensors(samples):
    return {**_thd(2)(samples), "names": ["a"]}


def _failures():
    value_error = functools.partial(Numbered, fails_at=3, error=ValueError("row 3 is odd"))
    user_error = functools.partial(Numbered, fails_at=3, error=UserError("row 3 is malformed"))
    return {
        "value_error": _fails(value_error, _thd(2), True),
        "user_error": _fails(user_error, _thd(2), True),
        "cannot_open": _fails(_cannot_open, _thd(2), True),
        "not_tensors": _fails(Numbered, _not_tensors, False),
        "unequal": _fails(Unequal, _thd(2), False),
    }


class Waiting(Numbered):
    """Reads its later samples only when the main thread has trained on the earlier ones."""

    trained = threading.Event()

    def __getitem__(self, index):
        if index >= 2:
            assert self.trained.wait(60), "nothing was trained on while this was read"
        return super().__getitem__(index)


def _read_ahead():
    """Training collectives go on while the next batch is being read, and nothing is pickled."""

    def refuse(*args, **kwargs):
        raise AssertionError("something was pickled")

    original = distributed_c10d._object_to_tensor
    distributed_c10d._object_to_tensor = refuse
    try:
        loader, _ = create_cp_dataloader(
            Waiting, _mesh(2, 2), collate_fn=_thd(2), batch_size=1, shuffle=False, drop_last=False
        )
        total = torch.zeros(1)
        for batch in loader:
            total += batch["tokens"].sum()
            for _ in range(5):
                dist.all_reduce(torch.ones(1))
            Waiting.trained.set()
        loader.close()
    finally:
        distributed_c10d._object_to_tensor = original
    return total.item()


def _everything():
    os.environ.setdefault("TUNE_TRACEBACK", "1")
    return {
        "slices": _slices_and_order(),
        "resume": _resume(),
        "streamed": _streamed(),
        "given_up": _given_up(),
        "group": _group_call(),
        "read_ahead": _read_ahead(),
        "failures": _failures(),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(4, _everything)


@pytest.mark.distributed
def test_every_rank_gets_its_slice_of_its_groups_batches(ranks):
    order = [i for b in ranks[0]["slices"][1, 4, 1] for i in b["sample_ids"]]
    assert sorted(order) == list(range(len(LENGTHS)))
    for (dp, cp, tp), _ in ranks[0]["slices"].items():
        per_group = 4 // dp
        for rank in range(4):
            group, cp_rank = rank // (cp * tp), rank % (cp * tp) // tp
            batches = ranks[rank]["slices"][dp, cp, tp]
            for step, got in enumerate(batches):
                first = step * 4 + group * per_group
                ids = order[first : first + per_group]
                samples = [{**Numbered()[i], "sample_id": i} for i in ids]
                expected = _cut(_thd(cp)(samples), cp)[cp_rank]
                assert got == {**_plain(expected), "sample_ids": ids}, (dp, cp, tp, rank, step)


@pytest.mark.distributed
def test_a_resumed_loader_goes_on_bit_for_bit_masks_included(ranks):
    for rank in ranks:
        rest, resumed, following, resumed_following, _ = rank["resume"]
        assert resumed == rest
        assert resumed_following == following
    assert any(label != -100 for b in ranks[0]["resume"][0] for label in b["labels"][0])
    left = [i for r in (0, 2) for batch in ranks[r]["resume"][0] for i in batch["sample_ids"]]
    assert sorted(ranks[0]["resume"][4]) == sorted(left)


@pytest.mark.distributed
def test_a_stream_is_the_same_on_every_mesh_goes_on_in_the_next_epoch_and_resumes(ranks):
    def micro_batches(place, dp, cp):
        """Those of all groups in their order: sample ids, and labels of the whole documents."""
        steps = [ranks[group * cp]["streamed"][place][dp, cp] for group in range(dp)]
        return [i for step in zip(*steps, strict=True) for b in step for i in b["sample_ids"]]

    order = micro_batches(0, 4, 1)
    assert order == micro_batches(0, 2, 2) == micro_batches(0, 1, 4)
    assert len(order) == len(set(order))  # one epoch goes on where the other ended
    labels = {}
    for dp, cp in ((4, 1), (2, 2), (1, 4)):
        rows = [b["labels"] for r in ranks for b in r["streamed"][0][dp, cp]]
        labels[dp, cp] = sorted(x for row in rows for part in row for x in part if x != -100)
    assert labels[4, 1] == labels[2, 2] == labels[1, 4] != []
    for rank in ranks:
        found, again, refused, state = rank["streamed"]
        for mesh in again:
            assert again[mesh] == found[mesh][2:]
        assert (
            "the checkpoint has order shuffle_buffer_size 8, this run has shuffle_buffer" in refused
        )
        assert state["stream"]["rows"] > 0  # what came before is not read again


@pytest.mark.distributed
def test_an_iteration_that_is_given_up_leaves_nothing_behind(ranks):
    assert all(rank["given_up"] for rank in ranks)


@pytest.mark.distributed
def test_it_takes_a_process_group_in_place_of_a_mesh(ranks):
    for place, rank in enumerate(ranks):
        same, words = rank["group"]
        assert same, place
        assert "cp_world_size=3, but cp_group has 2" in words[0]
        assert "cp_rank=5, but cp_group has" in words[1]


@pytest.mark.distributed
def test_the_next_batch_is_read_while_training_goes_on(ranks):
    total = sum((4 + i) * n for i, n in enumerate(LENGTHS))
    # Padding of slices is 0. The last of the second group's batches is a filler without a document.
    assert sum(rank["read_ahead"] for rank in ranks) == total


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "count", "kind", "others", "text"),
    [
        ("value_error", 1, "ValueError", "RuntimeError", "row 3 is odd"),
        ("user_error", 1, "UserError", "UserError", "row 3 is malformed"),
        ("cannot_open", 0, "UserError", "UserError", "there is no such file"),
        ("not_tensors", 0, "UserError", "UserError", "batch entry 'names' is a list"),
        ("unequal", 0, "UserError", "UserError", "they count [7, 6] samples"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(ranks, case, count, kind, others, text):
    first_cause = [rank["failures"][case][3] for rank in ranks].count(False)
    assert first_cause >= 1
    for place, rank in enumerate(ranks):
        batches, name, message, elsewhere = rank["failures"][case]
        assert text in message, place
        assert name == (others if elsewhere else kind), place
        assert batches == count, place
