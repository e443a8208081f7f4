"""Streamed proteins are those of the whole data set, read a buffer at a time, and can be resumed anywhere."""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torchtune_cp.data import MaskedDataset, TokenBudgetDataset, esm_tokenizer, mlm_masking
from torchtune_cp.datasets import (
    SampleStream,
    SFTDataset,
    StreamedBatches,
    StreamPlace,
    protein_dataset,
    text_completion_dataset,
)
from torchtune_cp.datasets.example_proteins import EXAMPLE_PROTEINS
from torchtune_cp.datasets.fasta import read_fasta
from torchtune_cp.errors import UserError

PROTEINS = EXAMPLE_PROTEINS
COUNT = len(list(read_fasta(PROTEINS)))
TOKENIZER = esm_tokenizer()
BUDGET = 1500


def _samples(samples: SFTDataset, place: StreamPlace) -> SFTDataset:
    return samples


def _batches(samples: SFTDataset, place: StreamPlace, oversize: str = "split") -> Any:
    masked = MaskedDataset(samples, mlm_masking(TOKENIZER, seed=3), first_id=place.samples)
    masked.set_epoch(place.epoch)
    return TokenBudgetDataset(
        masked,
        BUDGET,
        oversize=oversize,
        strategy="best_fit",
        first_id=place.samples,
        partial=True,
    )


def _stream(path: Path = PROTEINS, **arguments: Any) -> SampleStream:
    stream = protein_dataset(TOKENIZER, str(path), streaming=True, **arguments)
    assert isinstance(stream, SampleStream)
    return stream


def _one_pass(
    stream: SampleStream, make: Callable[..., Any] = _samples, shuffle: bool = False
) -> list[Mapping[str, Any]]:
    batches = StreamedBatches(stream, make, shuffle=shuffle, seed=0)
    found: list[Mapping[str, Any]] = []
    while not found or batches.place_of(len(found)).get("epoch", 0) == 0:
        found.append(batches[len(found)])
        batches[len(found)]  # looks one ahead, as a loader does
    return found


def _plain(batch: Mapping[str, Any]) -> Any:
    return [(s["sample_id"], list(s["tokens"]), list(s["labels"])) for s in batch["samples"]]


@pytest.mark.parametrize("buffer", [1, 7, 10_000])
def test_a_pass_gives_the_samples_of_the_whole_data_set(tmp_path: Path, buffer: int) -> None:
    expected = list(protein_dataset(TOKENIZER, str(PROTEINS)))
    zipped = tmp_path / "x.fasta.gz"
    zipped.write_bytes(gzip.compress(PROTEINS.read_bytes()))
    table = tmp_path / "x.jsonl"
    table.write_text("".join(json.dumps({"seq": s}) + "\n" for _, s in read_fasta(PROTEINS)))
    by_column = protein_dataset(
        TOKENIZER,
        source="json",
        data_files=str(table),
        column="seq",
        streaming=True,
        shuffle_buffer_size=buffer,
    )
    assert isinstance(by_column, SampleStream)
    for stream in (
        _stream(shuffle_buffer_size=buffer),
        _stream(zipped, shuffle_buffer_size=buffer),
        by_column,
    ):
        assert _one_pass(stream) == expected, stream.name
    first = protein_dataset(TOKENIZER, str(PROTEINS), streaming=True, max_rows=9)
    assert isinstance(first, SampleStream)
    assert _one_pass(first) == expected[:9]


def test_with_all_rows_in_a_buffer_the_batches_and_masks_are_those_of_the_whole_data_set() -> None:
    whole = protein_dataset(TOKENIZER, str(PROTEINS))
    assert isinstance(whole, SFTDataset)
    for epoch in (0, 1):
        expected = _batches(whole, StreamPlace(epoch=epoch))
        batches = StreamedBatches(_stream(), _batches, shuffle=True, seed=0)
        first = epoch * len(expected)
        found = [_plain(batches[i]) for i in range(first, first + len(expected))]
        assert sorted(found) == sorted(_plain(expected[i]) for i in range(len(expected)))
        assert found != sorted(found)


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    def order(first: int, seed: int, shuffle: bool = True) -> list[Any]:
        batches = StreamedBatches(
            _stream(shuffle_buffer_size=40), _samples, shuffle=shuffle, seed=seed
        )
        return [batches[first + i]["tokens"] for i in range(COUNT)]

    assert order(0, 0) == order(0, 0)
    assert sorted(order(0, 0)) == sorted(order(COUNT, 0)) == sorted(order(0, 1))
    assert order(0, 0) != order(COUNT, 0) != order(0, 1)
    assert order(0, 0, shuffle=False) == order(COUNT, 1, shuffle=False)
    # Shuffled within a buffer of 40.
    assert sorted(order(0, 0)[:40]) == sorted(order(0, 0, shuffle=False)[:40])


class _Counted:
    """A stream of rows that counts those it gave out."""

    name = "counted"

    def __init__(self) -> None:
        self.read_rows = self.skipped = 0

    def read(self, skip: int = 0) -> Iterator[Mapping[str, Any]]:
        self.skipped += skip
        for _, sequence in read_fasta(PROTEINS, skip):
            self.read_rows += 1
            yield {"sequence": sequence}


def _counted(buffer: int) -> tuple[_Counted, StreamedBatches]:
    rows = _Counted()
    make = _stream()._make
    stream = SampleStream(rows, make, buffer_size=buffer)
    return rows, StreamedBatches(stream, _batches, shuffle=True, seed=2)


def test_no_more_is_read_than_a_buffer_at_a_time() -> None:
    rows, batches = _counted(16)
    batches[0]
    assert rows.read_rows == 16
    second = len(_batches(_stream(max_rows=16).buffers().__next__()[1], StreamPlace()))
    batches[second]
    assert rows.read_rows == 32
    batches[0], batches[second - 1]  # kept: nothing is read again
    assert rows.read_rows == 32


@pytest.mark.parametrize("buffer", [5, 30])
def test_every_place_can_be_resumed_without_reading_what_came_before(buffer: int) -> None:
    _, batches = _counted(buffer)
    count = 3 * len(_batches(protein_dataset(TOKENIZER, str(PROTEINS)), StreamPlace()))
    expected, places = [], []
    for index in range(count):
        places.append(json.loads(json.dumps(batches.place_of(index))))
        expected.append(_plain(batches[index]))
        assert batches.place_of(index)["first"] <= index
    assert {place["epoch"] for place in places if place} >= {0, 1}
    for index in range(0, count, 3):
        rows, resumed = _counted(buffer)
        resumed.start_at(places[index])
        found = [_plain(resumed[i]) for i in range(index, min(index + 4, count))]
        assert found == expected[index : index + 4], index
        assert rows.read_rows + rows.skipped <= COUNT + places[index].get("rows", 0)
    # And without a place, from the start.
    assert _plain(_counted(buffer)[1][count - 1]) == expected[-1]
    assert _plain(batches[0]) == expected[0]  # long gone: read again


def test_rows_are_left_out_cut_and_counted_as_in_the_whole_data_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(">a\nMKJJV*L\n>b\n>c\nMKVLAGVSERT\n>d\nML\n>e\nMKVJLAGVSERTGGG\n>f\nMKVL\n")
    for settings in (
        {"max_seq_len": 8},
        {"max_seq_len": 8, "overlong": "split"},
        {"max_seq_len": 8, "overlong": "drop", "min_tokens": 5},
        {"unknown": "drop"},
        {"unknown": "error", "on_bad_row": "skip"},
    ):
        whole = protein_dataset(TOKENIZER, str(path), **settings)
        assert isinstance(whole, SFTDataset)
        expected = list(whole)
        caplog.clear()
        with caplog.at_level(logging.INFO, "torchtune_cp"):
            assert _one_pass(_stream(path, shuffle_buffer_size=2, **settings)) == expected
        (told,) = [r.message for r in caplog.records if "was read once through" in r.message]
        assert told.endswith(f": {whole.describe_stats()}")
        warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == (settings == {"max_seq_len": 8})


def test_what_is_wrong_is_told_where_it_is_met(tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(">a\nMKV\n>b\nMKJ\n")
    batches = StreamedBatches(
        _stream(path, unknown="error", shuffle_buffer_size=1), _samples, shuffle=False, seed=0
    )
    assert batches[0]["tokens"]
    with pytest.raises(UserError, match=r"row 1 of .*x\.fasta: residues outside the alphabet: 'J'"):
        batches[1]
    path.write_bytes(b">a\nMKV\n" + b">b\nMKV\n" * 20_000 + b">c\nM\xffV\n")
    batches = StreamedBatches(
        _stream(path, shuffle_buffer_size=10), _samples, shuffle=False, seed=0
    )
    assert batches[0]["tokens"]
    with pytest.raises(UserError, match=r"row 20001 of .*x\.fasta: .*it has byte 0xFF"):
        batches[20_001]
    path.write_text(">a\nMKV\n>b\nMK\n")
    batches.start_at({"first": 9, "epoch": 0, "buffer": 1, "rows": 7, "samples": 7})
    with pytest.raises(UserError, match=r"x\.fasta has 2 records, fewer than the 7"):
        batches[9]


def test_data_that_give_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    path.write_text(">a\n>b\n>c\n")
    batches = StreamedBatches(_stream(path, shuffle_buffer_size=2), _samples, shuffle=True, seed=0)
    with pytest.raises(UserError, match=r"no samples in .*: 3 rows, 0 samples, 3 empty rows"):
        batches[0]
    path.write_text(f">a\n{'M' * (BUDGET + 1)}\n>b\n{'K' * 2 * BUDGET}\n")
    batches = StreamedBatches(
        _stream(path, shuffle_buffer_size=1),
        partial(_batches, oversize="drop"),
        shuffle=True,
        seed=0,
    )
    with pytest.raises(UserError, match=r"no batches in .*x\.fasta: all samples were left out"):
        batches[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "nowhere.fasta"}, r"cannot read nowhere\.fasta"),
        ({"path": str(PROTEINS), "packed": True}, r"dataset\.packed must be false with streaming"),
        ({"path": str(PROTEINS), "shuffle_buffer_size": 0}, "shuffle_buffer_size must be 1 or"),
        ({"source": "json", "data_files": "no.jsonl"}, r"data_files: 'no\.jsonl' does not exist"),
        (
            {"source": "json", "data_files": str(PROTEINS), "split": "train[:9]"},
            "must be a whole split with streaming=true: .*max_rows",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_it_begins(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        protein_dataset(TOKENIZER, streaming=True, **arguments)


def test_rows_that_cannot_be_read_any_further_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"sequence": "MKV"}\n' * 3 + "{broken\n")
    stream = protein_dataset(TOKENIZER, source="json", data_files=str(path), streaming=True)
    assert isinstance(stream, SampleStream)
    with pytest.raises(UserError, match=r"cannot read dataset .*x\.jsonl.* any further"):
        StreamedBatches(stream, _samples, shuffle=False, seed=0)[0]


def test_text_is_not_streamed() -> None:
    with pytest.raises(UserError, match=r"dataset\.streaming=true is for protein_dataset"):
        text_completion_dataset(TOKENIZER, source="json", data_files="x", streaming=True)


def test_tokens_are_counted_as_they_are_made(tmp_path: Path) -> None:
    rng = random.Random(0)
    characters = "LAGVSERTIDPKQNFYMHWCXBUZOJ*-.1<>lagk "
    path = tmp_path / "x.fasta"
    lines = ["".join(rng.choices(characters, k=rng.randint(1, 60))) for _ in range(400)]
    path.write_text("".join(f">{i}\nM{line}\n" for i, line in enumerate(lines)))
    for settings in ({}, {"add_eos": False}, {"max_seq_len": 20}, {"overlong": "split"}):
        tokenizer = esm_tokenizer(max_seq_len=15 if settings.get("overlong") else None)
        samples = protein_dataset(tokenizer, str(path), **settings)
        assert isinstance(samples, SFTDataset)
        counted = [samples.token_count(i) for i in range(len(samples))]
        assert counted == [len(s["tokens"]) for s in samples]
