from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_cp.data import CROSS_ENTROPY_IGNORE_IDX, collate, padded_collate_sft
from torchtune_cp.errors import UserError

IGN = CROSS_ENTROPY_IGNORE_IDX


def sample(tokens: list[int], labels: list[int] | None = None) -> dict:
    return {"tokens": tokens, "labels": list(tokens) if labels is None else labels}


def test_labels_are_shifted_padded_and_positions_added() -> None:
    batch = collate([sample([1, 2, 3], [IGN, 2, 3]), sample([4, 5])], padding_idx=9)
    assert list(batch) == ["tokens", "labels", "input_pos"]
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch["labels"].tolist() == [[2, 3, IGN], [5, IGN, IGN]]
    assert batch["input_pos"].tolist() == [[0, 1, 2], [0, 1, 2]]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_no_padding_is_added_when_lengths_agree() -> None:
    # N8: the length is left alone whatever it divides; the last real token keeps its label.
    batch = collate([sample(list(range(8))), sample(list(range(8, 16)))])
    assert batch["tokens"].shape == (2, 8)
    assert batch["labels"][:, -2].tolist() == [7, 15]


@pytest.mark.parametrize("length", [1, 7, 2999])
def test_any_length_keeps_every_label_but_the_first(length: int) -> None:
    tokens = list(range(1, length + 1))
    batch = collate([sample(tokens)])
    assert batch["tokens"].tolist() == [tokens]
    assert batch["labels"][0].tolist() == [*tokens[1:], IGN]


def test_labels_are_shifted_once_before_any_cut() -> None:
    # N7: only the labels at the borders of the two halves are valid.
    labels = [IGN] * 16
    labels[8], labels[15] = 108, 115
    batch = collate([sample(list(range(16)), labels)])
    assert (batch["labels"] != IGN).nonzero().tolist() == [[0, 7], [0, 14]]
    assert batch["labels"][0, 7] == 108


def test_an_empty_sample_is_padding_without_labels() -> None:
    batch = collate([sample([]), sample([1, 2])])
    assert batch["tokens"].tolist() == [[0, 0], [1, 2]]
    assert batch["labels"].tolist() == [[IGN, IGN], [2, IGN]]


def test_a_batch_of_empty_samples_has_length_one_and_no_label() -> None:
    batch = collate([sample([]), sample([])], padding_idx=3)
    assert batch["tokens"].tolist() == [[3], [3]]
    assert batch["labels"].tolist() == [[IGN], [IGN]]
    assert batch["input_pos"].tolist() == [[0], [0]]


def test_sample_ids_are_passed_on() -> None:
    samples = [{**sample([1]), "sample_id": 7}, {**sample([]), "sample_id": -1}]
    assert collate(samples)["sample_ids"].tolist() == [7, -1]


def test_tokens_and_labels_of_different_length_are_refused_naming_the_sample() -> None:
    with pytest.raises(UserError, match="sample 1 has 2 tokens but 1 labels"):
        collate([sample([1]), sample([1, 2], [1])])
    with pytest.raises(UserError, match="sample 42 has 0 tokens but 1 labels"):
        collate([{"tokens": [], "labels": [1], "sample_id": 42}])


def test_no_samples_are_refused() -> None:
    with pytest.raises(UserError, match="no samples"):
        collate([])


def test_tensors_and_arrays_are_taken_as_well_as_lists() -> None:
    expected = collate([sample([1, 2, 3])])
    for make in (torch.tensor, np.array):
        batch = collate([{"tokens": make([1, 2, 3]), "labels": make([1, 2, 3])}])
        assert all(torch.equal(batch[key], expected[key]) for key in expected)


def test_ignore_idx_can_be_chosen() -> None:
    assert collate([sample([1, 2])], ignore_idx=-1)["labels"].tolist() == [[2, -1]]


def test_torchtunes_name_is_the_same_function() -> None:
    assert padded_collate_sft is collate


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 500), max_size=20), min_size=1, max_size=5))
def test_every_label_stands_one_before_its_token(samples: list[list[int]]) -> None:
    batch = collate([sample(tokens) for tokens in samples])
    labels = batch["labels"]
    assert (labels != IGN).sum() == sum(max(0, len(tokens) - 1) for tokens in samples)
    rows, places = (labels != IGN).nonzero(as_tuple=True)
    assert torch.equal(labels[rows, places], batch["tokens"][rows, places + 1])
    assert all(batch["tokens"][i, : len(t)].tolist() == t for i, t in enumerate(samples))


class TestPacked:
    def test_labels_and_positions_stop_at_each_documents_end(self) -> None:
        packed = {**sample([1, 2, 3, 4, 5, 6]), "seq_lens": [3, 1, 2]}
        batch = collate([packed, {**sample([7, 8]), "seq_lens": [2]}], padding_idx=9)
        assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 9, 9, 9]]
        assert batch["labels"].tolist() == [
            [2, 3, IGN, IGN, 6, IGN],
            [8, IGN, IGN, IGN, IGN, IGN],
        ]
        assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
        assert batch["seq_lens"].tolist() == [[3, 1, 2], [2, 0, 0]]
        assert batch["seq_lens"].dtype == torch.int64

    def test_each_document_has_the_labels_it_has_alone(self) -> None:
        documents = [[5, 6, 7], [8], [9, 10]]
        whole = [token for document in documents for token in document]
        batch = collate([{**sample(whole), "seq_lens": [3, 1, 2]}])
        alone = [collate([sample(document)]) for document in documents]
        for key in ("tokens", "labels", "input_pos"):
            assert batch[key].tolist() == [[n for one in alone for n in one[key][0].tolist()]]

    def test_padding_goes_on_counting_after_the_last_document(self) -> None:
        batch = collate([{**sample([1, 2, 3]), "seq_lens": [2, 1]}, sample([1] * 5)])
        assert batch["input_pos"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]

    def test_a_plain_sample_among_packed_ones_is_one_document_and_an_empty_one_none(self) -> None:
        batch = collate([{**sample([1, 2, 3]), "seq_lens": [2, 1]}, sample([4, 5]), sample([])])
        assert batch["seq_lens"].tolist() == [[2, 1], [2, 0], [0, 0]]
        assert batch["labels"].tolist() == [[2, IGN, IGN], [5, IGN, IGN], [IGN] * 3]
        assert "seq_lens" not in collate([sample([4, 5]), sample([])])

    @pytest.mark.parametrize("seq_lens", [[2], [2, 2], [3, 0], []])
    def test_lengths_that_do_not_add_up_are_refused(self, seq_lens: list[int]) -> None:
        with pytest.raises(UserError, match="sample 4 has 3 tokens but seq_lens"):
            collate([{**sample([1, 2, 3]), "seq_lens": seq_lens, "sample_id": 4}])


def test_batches_can_be_padded_to_one_length() -> None:
    batch = collate([{**sample([1, 2, 3]), "seq_lens": [2, 1]}], pad_to=6, padding_idx=9)
    assert batch["tokens"].tolist() == [[1, 2, 3, 9, 9, 9]]
    assert batch["labels"].tolist() == [[2, IGN, IGN, IGN, IGN, IGN]]
    assert batch["seq_lens"].tolist() == [[2, 1]]
    with pytest.raises(UserError, match=r"sample 1 has 3 tokens, more than collate_fn\.pad_to=2"):
        collate([sample([1]), sample([1, 2, 3])], pad_to=2)
