"""Batches of masked samples, and the exact slices of them that each rank gets."""

from __future__ import annotations

import pytest
import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.data import (
    MaskedDataset,
    MaskedLMCollator,
    TokenBudgetDataset,
    collate,
    cut_for_ranks,
    esm_tokenizer,
    mlm_masking,
)
from torchtune_cp.distributed.context_parallel.cut import balanced_slices
from torchtune_cp.errors import UserError

PAD, MASK = 99, 32


def _sample(*tokens: int, number: int = 0) -> dict:
    return {"tokens": list(tokens), "labels": list(tokens), "sample_id": number}


TWO = [_sample(1, 2, 3), _sample(5, 6, number=1)]


def test_packed_slices_are_those_of_the_worked_example() -> None:
    whole = MaskedLMCollator("thd", PAD, divisor=4)(TWO)
    assert whole["tokens"].tolist() == [[1, 2, 3, PAD, 5, 6, PAD, PAD]]
    first, second = cut_for_ranks(whole, 2)
    assert first["tokens"].tolist() == [[1, PAD, 5, PAD]]
    assert second["tokens"].tolist() == [[2, 3, 6, PAD]]
    assert first["labels"].tolist() == [[1, -100, 5, -100]]
    assert second["labels"].tolist() == [[2, 3, 6, -100]]
    assert first["input_pos"].tolist() == [[0, 3, 0, 3]]
    assert second["input_pos"].tolist() == [[1, 2, 1, 2]]
    for own in (first, second):
        assert own["cu_seqlens"].tolist() == [0, 3, 5]
        assert own["cu_seqlens_padded"].tolist() == [0, 4, 8]
        assert own["sample_ids"].tolist() == [0, 1]


def test_padded_slices_are_rows_of_the_longest() -> None:
    whole = MaskedLMCollator("bshd", PAD, divisor=4)([_sample(*range(1, 6)), TWO[1]])
    assert whole["tokens"].tolist() == [[1, 2, 3, 4, 5, PAD, PAD, PAD], [5, 6] + [PAD] * 6]
    first, second = cut_for_ranks(whole, 2)
    assert first["tokens"].tolist() == [[1, 2, PAD, PAD], [5, 6, PAD, PAD]]
    assert second["tokens"].tolist() == [[3, 4, 5, PAD], [PAD] * 4]
    assert first["input_pos"].tolist() == [[0, 1, 6, 7]] * 2
    assert first["cu_seqlens"].tolist() == [0, 5, 7]
    assert first["cu_seqlens_padded"].tolist() == [0, 8, 16]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_all_slices_together_are_the_batch(cp: int, sequence_format: str) -> None:
    lengths = (1, 7, 8, 8081)
    divisor = 2 * cp if cp > 1 else 1
    samples = [_sample(*range(100, 100 + n), number=i) for i, n in enumerate(lengths)]
    whole = MaskedLMCollator(sequence_format, PAD, divisor)(samples)
    padded = [-(-n // divisor) * divisor for n in lengths]
    if sequence_format == "bshd":
        padded = [max(padded)] * len(lengths)
    assert whole["cu_seqlens_padded"].diff().tolist() == padded
    assert whole["cu_seqlens"].diff().tolist() == list(lengths)
    slices = cut_for_ranks(whole, cp)
    for rank, own in enumerate(slices):
        assert own["tokens"].numel() == sum(padded) // cp
        at, mine = 0, own["tokens"].flatten().tolist()
        for n, size in zip(lengths, padded, strict=True):
            padded_tokens = [*range(100, 100 + n), *[PAD] * (size - n)]
            chunk = size // divisor
            tail = (2 * cp - 1 - rank) * chunk
            expected = padded_tokens[rank * chunk : (rank + 1) * chunk]
            expected += padded_tokens[tail : tail + chunk]
            if cp == 1:
                expected = padded_tokens
            assert mine[at : at + size // cp] == expected, (rank, n)
            at += size // cp


def test_the_mask_ratio_is_of_the_whole_sample_on_every_rank() -> None:
    samples = [_sample(0, MASK, 5, 6, 7, 8, 9, 2), _sample(0, 4, 2, number=1), _sample(MASK)]
    whole = MaskedLMCollator("thd", PAD, divisor=4, mask_id=MASK)(samples)
    for own in cut_for_ranks(whole, 2):
        scale = own["token_dropout_scale"][0]
        assert scale[:4].tolist() == pytest.approx([0.88 / (1 - 1 / 8)] * 4)
        assert scale[4:6].tolist() == pytest.approx([0.88] * 2)
        assert scale[6:].tolist() == [1.0] * 2  # nothing but mask tokens


def test_empty_samples_leave_a_batch_that_a_model_can_take() -> None:
    empty = {"tokens": [], "labels": [], "sample_id": -1}
    for sequence_format, shape in (("thd", [1, 4]), ("bshd", [2, 4])):
        whole = MaskedLMCollator(sequence_format, PAD, divisor=4)([empty, empty])
        assert list(whole["tokens"].shape) == shape
        assert (whole["labels"] == -100).all()
        assert all(own["tokens"].shape[1] == 2 for own in cut_for_ranks(whole, 2))


def test_a_row_of_one_length_has_its_padding_behind_all_samples() -> None:
    whole = MaskedLMCollator("thd", PAD, divisor=4, length=16)(TWO)
    assert whole["tokens"].shape == (1, 16)
    first, second = cut_for_ranks(whole, 2)
    assert first["tokens"].tolist() == [[1, PAD, 5, PAD] + [PAD] * 4]
    assert second["tokens"].shape == (1, 8)
    with pytest.raises(UserError, match="8 tokens with their padding, more than the length of 4"):
        MaskedLMCollator("thd", PAD, divisor=4, length=4)(TWO)


def test_batches_of_any_collate_function_are_cut_row_by_row() -> None:
    first, second = cut_for_ranks(collate([_sample(1, 2, 3, 4, 5)]), 2)
    assert first["tokens"].tolist() == [[1, 2, 0, 0]]
    assert second["tokens"].tolist() == [[3, 4, 5, 0]]
    assert second["labels"].tolist() == [[4, 5, -100, -100]]
    assert first["cu_seqlens"].tolist() == [0, 5]
    packed = collate([{**_sample(1, 2, 3), "seq_lens": [2, 1]}])
    with pytest.raises(UserError, match="in place of seq_lens"):
        cut_for_ranks(packed, 2)


def test_mistakes_are_told_in_words() -> None:
    with pytest.raises(UserError, match="sequence_format='sbhd' is not known; allowed: thd, bshd"):
        MaskedLMCollator("sbhd", PAD)
    with pytest.raises(UserError, match="sample 7 has 2 tokens but 1 labels"):
        MaskedLMCollator("thd", PAD)([{"tokens": [1, 2], "labels": [1], "sample_id": 7}])
    whole = MaskedLMCollator("thd", PAD, divisor=2)(TWO)
    with pytest.raises(UserError, match="cannot be cut over 2 ranks: each must be a multiple of 4"):
        cut_for_ranks(whole, 2)


class _Samples:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict:
        return {
            "tokens": [4 + index] * self.lengths[index],
            "labels": [index] * self.lengths[index],
        }


def _packs(dataset: TokenBudgetDataset) -> list[list[tuple[int, int]]]:
    return [
        [(s["sample_id"], len(s["tokens"])) for s in dataset[i]["samples"]]
        for i in range(len(dataset))
    ]


def test_a_token_budget_takes_whole_samples_while_they_fit() -> None:
    dataset = TokenBudgetDataset(_Samples([3, 4, 5, 2, 8]), 8)
    assert _packs(dataset) == [[(0, 3), (1, 4)], [(2, 5), (3, 2)], [(4, 8)]]
    best = TokenBudgetDataset(_Samples([3, 4, 5, 2, 8]), 8, strategy="best_fit")
    assert sorted(map(sum, ([n for _, n in pack] for pack in _packs(best)))) == [6, 8, 8]


def test_an_oversize_sample_is_split_dropped_or_refused() -> None:
    samples = _Samples([3, 11, 2])
    split = TokenBudgetDataset(samples, 5, oversize="split")
    assert _packs(split) == [[(0, 3)], [(1, 5)], [(1, 5)], [(1, 1), (2, 2)]]
    assert (split.split, split.dropped) == (1, 0)
    drop = TokenBudgetDataset(samples, 5, oversize="drop")
    assert _packs(drop) == [[(0, 3), (2, 2)]]
    assert (drop.split, drop.dropped) == (0, 1)
    with pytest.raises(
        UserError, match="sample 1 has 11 tokens, more than token_micro_batch_size=5"
    ):
        TokenBudgetDataset(samples, 5)
    with pytest.raises(UserError, match="no samples"):
        TokenBudgetDataset(_Samples([9, 9]), 5, oversize="drop")
    with pytest.raises(UserError, match="oversize='cut' is not known"):
        TokenBudgetDataset(samples, 5, oversize="cut")


def test_masks_are_drawn_from_sample_and_epoch_alone() -> None:
    tokenizer = esm_tokenizer()
    samples = _Samples([40, 60])
    masked = MaskedDataset(samples, mlm_masking(tokenizer, seed=3))
    first = [masked[1]["tokens"].tolist() for _ in range(2)]
    assert first[0] == first[1]
    budget = TokenBudgetDataset(masked, 100)
    assert budget[0]["samples"][1]["tokens"].tolist() == first[0]
    budget.set_epoch(1)
    assert masked[1]["tokens"].tolist() != first[0]
    budget.set_epoch(0)
    assert masked[1]["tokens"].tolist() == first[0]
    batch = MaskedLMCollator("thd", tokenizer.pad_id)([budget[0]])
    assert torch.equal(batch["cu_seqlens"], torch.tensor([0, 40, 100]))


def _held(slices: list[dict], samples: list[dict]) -> list[tuple[int, int]]:
    """Where each token of each sample is, found in the slices by their positions alone: rank and document."""
    found = []
    for rank, own in enumerate(slices):
        tokens, labels = own["tokens"][0].tolist(), own["labels"][0].tolist()
        for holder, number, start, stop, at in own["slice_layout"].tolist()[1:]:
            if holder == rank:
                here = slice(at, at + stop - start)
                assert tokens[here] == samples[number]["tokens"][start:stop]
                assert labels[here] == samples[number]["labels"][start:stop]
                assert own["input_pos"][0, here].tolist() == list(range(start, stop))
                found += [(rank, number)] * (stop - start)
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_balanced_slices_hold_every_token_once_and_short_samples_whole(
    cp: int, sequence_format: str
) -> None:
    lengths = [7, 1, 40, 33, 0, 25, 700, 38, 12, 19]
    samples = [_sample(*range(100, 100 + n), number=i) for i, n in enumerate(lengths)]
    whole = MaskedLMCollator(sequence_format, PAD)(samples)
    slices = balanced_slices(whole, cp, AttentionMask(is_causal=False))
    samples = samples if sequence_format == "bshd" else [s for s in samples if s["tokens"]]
    held = _held(slices, samples)
    by_number = {number: [r for r, n in held if n == number] for _, number in held}
    assert {n: len(r) for n, r in by_number.items()} == {
        n: len(s["tokens"]) for n, s in enumerate(samples) if s["tokens"]
    }
    longest = max(by_number.values(), key=len)
    assert len(set(longest)) == cp
    # What balances by a handful of tokens is cut; most samples are not.
    assert sum(len(set(ranks)) == 1 for ranks in by_number.values()) >= len(by_number) / 2
    # No padding but that of the ranks that have less than the others.
    assert slices[0]["tokens"].shape == (1, max(sum(r == k for r, _ in held) for k in range(cp)))
    assert sum(int((own["labels"] != -100).sum()) for own in slices) == sum(lengths)


def test_eight_equal_samples_stay_whole_and_one_is_shared() -> None:
    for lengths, shared in (([30] * 8, False), ([240], True)):
        samples = [_sample(*range(100, 100 + n), number=i) for i, n in enumerate(lengths)]
        slices = balanced_slices(MaskedLMCollator("thd", PAD)(samples), 4, AttentionMask(False))
        ranks_of = {
            n: {r for r, k in _held(slices, samples) if k == n} for n in range(len(samples))
        }
        assert all((len(ranks) == 4) == shared for ranks in ranks_of.values())
        assert all(own["tokens"].shape == (1, 60) for own in slices)


def test_packed_rows_with_seq_lens_are_cut_without_padding_them_one_by_one() -> None:
    packed = collate([{**_sample(1, 2, 3), "seq_lens": [2, 1]}, {**_sample(4, 5), "seq_lens": [2]}])
    first, second = balanced_slices(packed, 2, AttentionMask())
    assert first["cu_seqlens"].tolist() == [0, 2, 3, 5]
    assert first["cu_seqlens_padded"].tolist() == [0, 2, 3, 6]
    real = [t for own in (first, second) for t in own["tokens"][0].tolist() if t]
    assert sorted(real) == [1, 2, 3, 4, 5]
    assert "seq_lens" not in first


def test_a_batch_without_a_token_leaves_slices_that_a_model_can_take() -> None:
    empty = {"tokens": [], "labels": [], "sample_id": -1}
    for sequence_format in ("thd", "bshd"):
        whole = MaskedLMCollator(sequence_format, PAD)([empty, empty])
        for own in balanced_slices(whole, 2, AttentionMask(is_causal=False)):
            assert own["tokens"].numel() == 1
            assert own["labels"].tolist() == [[-100]]


def test_padding_to_one_length_gives_slices_of_one_length() -> None:
    shapes = set()
    for n in (30, 31, 40, 41):
        whole = MaskedLMCollator("thd", PAD, length=64)([_sample(*range(100, 100 + n)), TWO[1]])
        slices = balanced_slices(whole, 2, AttentionMask(is_causal=False))
        shapes |= {tuple(own["tokens"].shape) for own in slices}
    assert shapes == {(1, 32)}
