"""Lengths of a compiled run: few of them, close above the real ones, and nothing else changed."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtune_cp.data import CROSS_ENTROPY_IGNORE_IDX, bucket_length, bucketed, collate


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(1, 128), (128, 128), (129, 256), (1000, 1024), (1025, 1152), (2049, 2304), (60000, 61440)],
)
def test_lengths_go_up_to_the_next_bucket(length, bucket):
    assert bucket_length(length) == bucket


@given(st.integers(1, 1 << 24))
def test_a_bucket_is_a_fixed_point_less_than_an_eighth_above_or_128_and_a_multiple_of_128(length):
    bucket = bucket_length(length)
    assert bucket == bucket_length(bucket)
    assert bucket % 128 == 0
    assert 0 <= bucket - length < max(128, length / 8)


def test_all_lengths_up_to_a_million_have_few_buckets():
    assert len({bucket_length(n) for n in range(1, 1 << 20)}) == 88


def test_a_limit_is_a_bucket_of_its_own_and_longer_sequences_go_on():
    assert bucket_length(45057, longest=50000) == 49152
    assert bucket_length(49153, longest=50000) == 50000
    assert bucket_length(50000, longest=50000) == 50000
    assert bucket_length(50001, longest=50000) == 53248


def test_a_bucketed_batch_is_the_batch_and_padding_without_labels():
    samples = [
        {"tokens": list(range(5)), "labels": list(range(5)), "sample_id": 7},
        {"tokens": [4] * 130, "labels": [4] * 130, "sample_id": 9},
    ]
    plain = collate(samples)
    padded = pickle.loads(pickle.dumps(bucketed(collate)))(samples)  # as loader workers get it
    assert padded.keys() == plain.keys()
    assert torch.equal(padded["sample_ids"], plain["sample_ids"])
    for name in ("tokens", "labels", "input_pos"):
        assert padded[name].shape == (2, 256)
        assert torch.equal(padded[name][:, :130], plain[name])
    assert (padded["labels"][:, 130:] == CROSS_ENTROPY_IGNORE_IDX).all()
    assert padded["input_pos"][0].tolist() == list(range(256))
