"""The policies for over-long and malformed rows (cases D30 and D32), and their counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_cp.data import build_dataloader, collate
from torchtune_cp.datasets import SFTDataset
from torchtune_cp.datasets.sft import EmptyRow
from torchtune_cp.errors import UserError


class CountReader:
    """A row {"n": 3} is the tokens 0, 1, 2; labels are ten times the tokens."""

    def __init__(self) -> None:
        self.tokenized = 0

    def check(self, row: Mapping[str, Any]) -> None:
        if row["n"] is None:
            raise UserError("column 'n' is null")
        if row["n"] == 0:
            raise EmptyRow

    def tokenize(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        self.tokenized += 1
        if row["n"] == 13:
            raise UserError("thirteen cannot be tokenised")
        tokens = list(range(row["n"]))
        return tokens, [10 * token for token in tokens]


def dataset(*lengths: int | None, **kwargs: Any) -> SFTDataset:
    return SFTDataset([{"n": n} for n in lengths], CountReader(), name="test.jsonl", **kwargs)


def joined(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def lengths(ds: SFTDataset) -> list[int]:
    return [len(ds[i]["tokens"]) for i in range(len(ds))]


class TestOverlong:
    def test_121_tokens_in_pieces_of_60_are_60_60_and_1(self) -> None:
        # D30
        ds = dataset(121, 5, max_seq_len=60, overlong="split")
        assert lengths(ds) == [60, 60, 1, 5]
        assert joined(ds[i]["tokens"] for i in range(3)) == list(range(121))
        assert joined(ds[i]["labels"] for i in range(3)) == list(range(0, 1210, 10))
        assert (ds.stats.split, ds.stats.samples, ds.stats.rows) == (1, 4, 2)
        batch = collate([ds[i] for i in range(3)])
        assert batch["tokens"].shape == (3, 60)
        assert (batch["labels"][2] == -100).all()

    def test_an_overlong_row_is_an_error_naming_it_when_asked_for(self) -> None:
        # D30, splitting off
        with pytest.raises(
            UserError, match=r"row 1 of test\.jsonl has 121 tokens, more than max_seq_len 60"
        ):
            dataset(60, 121, max_seq_len=60, overlong="error")
        assert lengths(dataset(60, 59, max_seq_len=60, overlong="error")) == [60, 59]

    def test_truncating_keeps_the_beginning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            ds = dataset(61, 60, 70, max_seq_len=60)
            assert lengths(ds) == ds.lengths.tolist() == [60, 60, 60]
        assert ds[0]["tokens"] == list(range(60))
        assert ds[0]["labels"] == list(range(0, 600, 10))
        assert ds.stats.truncated == 2
        assert caplog.messages == [
            "row 0 of test.jsonl has 61 tokens and is cut to max_seq_len 60, and 1 further rows are cut "
            "(overlong: split, drop or error handle them otherwise)"
        ]

    def test_dropping_leaves_overlong_rows_out(self) -> None:
        ds = dataset(61, 60, 61, max_seq_len=60, overlong="drop")
        assert lengths(ds) == [60]
        assert ds.stats.dropped == 2

    def test_without_a_limit_nothing_is_cut(self) -> None:
        for policy in ("truncate", "split", "drop", "error"):
            assert lengths(dataset(500, overlong=policy)) == [500]
        assert dataset(500).stats.truncated == 0

    def test_rows_are_tokenised_once_at_the_start(self) -> None:
        reader = CountReader()
        ds = SFTDataset([{"n": 5}, {"n": 6}], reader, max_seq_len=3)
        assert (lengths(ds), ds.token_count(1), reader.tokenized) == ([3, 3], 3, 2)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 12))
    def test_splitting_loses_and_repeats_nothing(self, rows: list[int], limit: int) -> None:
        ds = dataset(*rows, max_seq_len=limit, overlong="split")
        pieces = [ds[i] for i in range(len(ds))]
        assert joined(p["tokens"] for p in pieces) == joined(range(n) for n in rows)
        assert max(len(p["tokens"]) for p in pieces) <= limit
        assert ds.stats.split == sum(n > limit for n in rows)


class TestBadRows:
    def test_empty_rows_are_skipped_and_counted(self) -> None:
        ds = dataset(0, 3, 0, 4)
        assert lengths(ds) == [3, 4]
        assert ds.stats.empty_skipped == 2
        assert ds.describe_stats() == "4 rows, 2 samples, 2 empty rows skipped"

    def test_a_malformed_row_is_an_error_before_training(self) -> None:
        with pytest.raises(UserError, match=r"row 2 of test\.jsonl: column 'n' is null .*skip"):
            dataset(3, 0, None)

    def test_a_malformed_row_can_be_skipped_and_is_counted(self) -> None:
        ds = dataset(3, None, 4, 13, on_bad_row="skip")
        assert lengths(ds) == [3, 4]
        assert ds.stats.bad_skipped == 2

    def test_a_row_that_cannot_be_tokenised_is_named(self) -> None:
        with pytest.raises(UserError, match=r"row 1 of test\.jsonl: thirteen cannot"):
            dataset(3, 13)

    def test_the_first_row_that_is_refused_is_named_whatever_is_wrong_with_it(self) -> None:
        given = {"max_seq_len": 5, "overlong": "error"}
        with pytest.raises(UserError, match=r"row 1 of .* has 9 tokens"):
            dataset(3, 9, None, **given)
        with pytest.raises(UserError, match=r"row 1 of .* column 'n' is null"):
            dataset(3, None, 9, **given)
        assert lengths(dataset(3, 0, 4, None, 9, max_rows_used=2, **given)) == [3, 4]

    def test_no_more_rows_are_looked_at_than_it_takes(self) -> None:
        reader = CountReader()
        rows = [{"n": n} for n in (0, 0, 0, 5, 0, 6, 7, 8, 9)]
        ds = SFTDataset(rows, reader, max_rows_used=2)
        assert (lengths(ds), ds.stats.rows, ds.stats.empty_skipped) == ([5, 6], 6, 4)
        assert reader.tokenized == 4, "2 rows, then 2, then 4"

    def test_a_worker_reports_the_row_in_one_line(self) -> None:
        class Refusing:
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> dict[str, list[int]]:
                raise UserError("row 1 of test.jsonl: thirteen cannot be read")

        loader = build_dataloader(
            Refusing(),
            batch_size=1,
            dp_rank=0,
            dp_degree=1,
            shuffle=False,
            seed=0,
            drop_last=True,
            collate_fn=collate,
            num_workers=1,
        )
        with pytest.raises(UserError, match=r"^row 1 of test\.jsonl: thirteen [^\n]*$"):
            list(loader)

    def test_no_rows_left_is_an_error_with_the_counts_and_the_first_cause(self) -> None:
        with pytest.raises(
            UserError,
            match=r"no samples in test\.jsonl: 3 rows, 0 samples, 1 empty rows skipped, 2 malformed "
            r"rows skipped; the first malformed one: row 1 of test\.jsonl: column 'n' is null",
        ):
            dataset(0, None, None, on_bad_row="skip")
        with pytest.raises(UserError, match="0 rows, 0 samples"):
            dataset()

    def test_short_rows_can_be_left_out(self) -> None:
        ds = dataset(3, 10, 2, min_tokens=3)
        assert lengths(ds) == [3, 10]
        assert ds.stats.short_skipped == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"overlong": "cut"}, "overlong='cut' is not known; allowed: truncate, split, drop, error"),
        ({"on_bad_row": "warn"}, "on_bad_row='warn' is not known; allowed: error, skip"),
        ({"max_seq_len": 0}, "max_seq_len must be 1 or more, not 0"),
    ],
)
def test_unknown_policies_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataset(3, **kwargs)


def test_samples_are_the_readers_own_to_change() -> None:
    ds = dataset(3, max_seq_len=5, overlong="split")
    ds[0]["tokens"].append(99)
    ds[0]["labels"][0] = 99
    assert ds[0] == {"tokens": [0, 1, 2], "labels": [0, 10, 20]}
