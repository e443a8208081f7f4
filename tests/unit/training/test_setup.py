import logging

import pytest
import torch

from torchtune_cp.data import collate
from torchtune_cp.errors import UserError
from torchtune_cp.training.setup import _collate_at_most, setup_logging


def test_a_sequence_beyond_the_sliding_window_is_refused_whole_not_by_slice():
    def sample(length):
        return {"tokens": [1] * length, "labels": [1] * length}

    batch = _collate_at_most(collate, 8, [sample(8), sample(3)])
    assert batch["tokens"].shape == torch.Size([2, 8])
    with pytest.raises(UserError, match=r"9 tokens.*sliding_window of 8.*tokenizer\.max_seq_len"):
        _collate_at_most(collate, 8, [sample(9)])


def test_packed_documents_are_held_against_the_limit_one_by_one() -> None:
    packed = {"tokens": [1] * 12, "labels": [1] * 12, "seq_lens": [4, 8]}
    assert _collate_at_most(collate, 8, [packed])["tokens"].shape == (1, 12)
    with pytest.raises(UserError, match="sequence of 8 tokens"):
        _collate_at_most(collate, 7, [packed])


def test_only_rank_zero_speaks_below_errors(monkeypatch):
    assert setup_logging("INFO").isEnabledFor(logging.INFO)
    monkeypatch.setattr("torchtune_cp.training.setup.is_rank_zero", lambda: False)
    assert not setup_logging("INFO").isEnabledFor(logging.WARNING)
    assert setup_logging("DEBUG").isEnabledFor(logging.DEBUG)
