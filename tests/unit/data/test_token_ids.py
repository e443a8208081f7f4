"""Token ids that the model does not have are named before a device is given them."""

from __future__ import annotations

import pickle

import pytest

from torchtune_cp.data import MaskedLMCollator, collate
from torchtune_cp.data.token_ids import CheckedIds
from torchtune_cp.errors import UserError


def _samples(*tokens: int) -> list[dict]:
    return [
        {"tokens": [1, 2], "labels": [1, 2], "sample_id": 3},
        {"tokens": list(tokens), "labels": list(tokens), "sample_id": 8},
    ]


def test_ids_within_the_vocabulary_pass_and_others_are_named_with_their_samples() -> None:
    for collate_fn in (collate, MaskedLMCollator("thd", pad_id=0)):
        checked = pickle.loads(pickle.dumps(CheckedIds(collate_fn, vocab_size=10)))
        assert (checked(_samples(9, 0))["tokens"] == collate_fn(_samples(9, 0))["tokens"]).all()
        for wrong in (10, -1):
            with pytest.raises(
                UserError, match=rf"token id {wrong} \(samples \[3, 8\]\).*size is 10"
            ):
                checked(_samples(4, wrong))


def test_labels_are_looked_at_too_but_for_the_ignored_ones() -> None:
    checked = CheckedIds(collate, vocab_size=10)
    checked([{"tokens": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(UserError, match="labels hold the token id 12"):
        checked([{"tokens": [1, 2], "labels": [-100, 12]}])
