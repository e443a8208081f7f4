"""Packed datasets: what is in a pack, and how loaders read packs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_cp.data import build_dataloader, byte_tokenizer, collate
from torchtune_cp.datasets import (
    PackedDataset,
    alpaca_dataset,
    chat_dataset,
    instruct_dataset,
    protein_dataset,
    text_completion_dataset,
    text_folder_dataset,
)
from torchtune_cp.errors import UserError

Write = Callable[..., str]
CHOICES = [("greedy", False), ("greedy", True), ("best_fit", False), ("best_fit", True)]


class Numbered:
    """Document d of n tokens is 1000 d, 1000 d + 1, ...; every third label is not trained on."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.reads += 1
        tokens = [1000 * index + i for i in range(self.lengths[index])]
        return {"tokens": tokens, "labels": [-100 if t % 3 == 0 else t for t in tokens]}


def samples(ds: PackedDataset) -> list[dict[str, list[int]]]:
    return [{k: v.tolist() for k, v in ds[i].items()} for i in range(len(ds))]


@pytest.mark.parametrize(("strategy", "split"), CHOICES)
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
def test_tokens_labels_and_positions_of_every_document_are_kept(
    strategy: str, split: bool, lengths: list[int]
) -> None:
    documents = Numbered(lengths)
    ds = PackedDataset(
        documents, max_seq_len=12, strategy=strategy, split_across_pack=split, overlong="split"
    )
    found: dict[int, list[int]] = {d: [] for d, n in enumerate(lengths) if n}
    for sample in samples(ds):
        assert sum(sample["seq_lens"]) == len(sample["tokens"]) <= 12
        begin = 0
        for length in sample["seq_lens"]:
            part = slice(begin, begin + length)
            begin += length
            tokens = sample["tokens"][part]
            assert len({t // 1000 for t in tokens}) == 1, "a document's end is told by seq_lens"
            assert sample["labels"][part] == [-100 if t % 3 == 0 else t for t in tokens]
            assert sample["input_pos"][part] == list(range(length))
            found[tokens[0] // 1000].append((tokens[0], tokens))  # type: ignore[arg-type]
    for d, pieces in found.items():
        joined = [t for _, tokens in sorted(pieces) for t in tokens]  # type: ignore[misc]
        assert joined == documents[d]["tokens"]
    assert ds.stats.tokens == sum(lengths)
    assert ds.stats.fill_rate == pytest.approx(sum(lengths) / (12 * len(ds)))


class TestOverlong:
    """D30: 121 tokens into packs of 60."""

    def pack(self, *lengths: int, **kwargs: Any) -> PackedDataset:
        return PackedDataset(Numbered(list(lengths)), max_seq_len=60, name="test.jsonl", **kwargs)

    def test_splitting_on_makes_60_60_and_1_padded(self) -> None:
        ds = self.pack(121, split_across_pack=True)
        assert [s["seq_lens"] for s in samples(ds)] == [[60], [60], [1]]
        assert ds.stats.split == 1
        batch = collate([ds[i] for i in range(3)])
        assert batch["tokens"].shape == (3, 60)
        assert batch["seq_lens"].tolist() == [[60], [60], [1]]
        assert (batch["labels"][2] == -100).all()

    def test_splitting_off_is_an_error_naming_sample_and_length(self) -> None:
        with pytest.raises(
            UserError, match=r"sample 1 of test\.jsonl has 121 tokens, more than a pack of 60"
        ):
            self.pack(60, 121).build()
        assert len(self.pack(60, 59)) == 2

    def test_rows_are_named_by_their_number_in_the_file(self, jsonl: Write) -> None:
        files = jsonl({"text": ""}, {"text": "a"}, {"text": "x" * 119})
        ds = text_completion_dataset(
            byte_tokenizer(60),
            "json",
            data_files=files,
            packed=True,
            split_across_pack=False,
        )
        with pytest.raises(UserError, match=r"row 2 of .*data\.jsonl has 121 tokens.*pack of 60"):
            len(ds)

    def test_dropping_and_truncating_by_choice_are_counted(self) -> None:
        dropped = self.pack(61, 20, 121, 30, overlong="drop")
        assert [s["seq_lens"] for s in samples(dropped)] == [[20, 30]]
        assert (dropped.stats.dropped, dropped.stats.documents) == (2, 2)
        cut = self.pack(61, 20, overlong="truncate")
        assert [s["seq_lens"] for s in samples(cut)] == [[60], [20]]
        assert cut.stats.truncated == 1
        with pytest.raises(UserError, match="all 1 documents are longer than a pack of 60"):
            self.pack(61, overlong="drop").build()

    def test_unknown_choices_are_named(self) -> None:
        with pytest.raises(UserError, match=r"overlong='cut' is not known.*truncate, split"):
            self.pack(1, overlong="cut")
        with pytest.raises(UserError, match=r"packing_strategy='x' is not known.*greedy, best_fit"):
            self.pack(1, strategy="x")
        with pytest.raises(UserError, match="max_seq_len must be 1 or more, not 0"):
            PackedDataset(Numbered([1]), max_seq_len=0)


def test_statistics_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ds = PackedDataset(
        Numbered([50, 30, 20, 70, 99]), max_seq_len=60, overlong="split", name="numbers"
    )
    with caplog.at_level(logging.INFO, logger="torchtune_cp"):
        samples(ds)
        len(ds)
    assert caplog.messages == [
        "packed numbers: 5 documents in 6 packs of 60 tokens (greedy), 74.7 % filled, 1.2 documents "
        "a pack (at most 2), the longest 60 tokens, 2 documents cut"
    ]


def test_every_factory_packs(tmp_path: Path, jsonl: Write) -> None:
    tokenizer = byte_tokenizer(max_seq_len=2000)
    rows = [
        {
            "text": f"text {i}",
            "instruction": f"say {i}",
            "output": "i" * (i + 1),
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": "i" * (i + 1)},
            ],
        }
        for i in range(5)
    ]
    files = {"source": "json", "data_files": jsonl(*rows)}
    (tmp_path / "x.fasta").write_text(">a\nMKV\n>b\nMKVL\n>c\nMK\n")
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.py").write_text("x" * (i + 1))
    columns = {"input": "instruction", "output": "output"}
    chat = {"conversation_column": "messages", "conversation_style": "openai"}
    for factory, kwargs in (
        (text_completion_dataset, files),
        (alpaca_dataset, files),
        (instruct_dataset, {**files, "column_map": columns}),
        (chat_dataset, {**files, **chat}),
        (protein_dataset, {"path": str(tmp_path / "x.fasta")}),
        (text_folder_dataset, {"path": str(folder)}),
    ):
        plain = factory(tokenizer, **kwargs)
        ds = factory(tokenizer, **kwargs, packed=True, packing_strategy="best_fit")
        assert isinstance(ds, PackedDataset)
        assert len(ds) == 1, "all of it fits into one pack"
        documents = [plain[i] for i in range(len(plain))]
        (sample,) = samples(ds)
        assert sample["seq_lens"] == [len(d["tokens"]) for d in documents]
        for key in ("tokens", "labels"):
            assert sample[key] == [t for d in documents for t in d[key]]
        with pytest.raises(UserError, match=r"packed=true needs .*tokenizer\.max_seq_len"):
            factory(byte_tokenizer(), **kwargs, packed=True)


def loader_batches(ds: PackedDataset, **kwargs: Any) -> Iterator[dict[str, torch.Tensor]]:
    given = {"batch_size": 2, "dp_rank": 0, "dp_degree": 1, "shuffle": True, "seed": 3}
    return iter(build_dataloader(ds, **{**given, **kwargs}, drop_last=False, collate_fn=collate))


class TestLoader:
    def pack(self) -> PackedDataset:
        return PackedDataset(Numbered([7, 5, 30, 12, 1, 8]), max_seq_len=30)

    def test_workers_give_the_same_batches(self) -> None:
        alone = list(loader_batches(self.pack()))
        with_workers = list(loader_batches(self.pack(), num_workers=2))
        assert len(alone) == len(with_workers) == 2
        for one, other in zip(alone, with_workers, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)

    def test_a_sample_is_a_pack_and_fillers_are_empty_rows(self) -> None:
        ds = self.pack()
        assert [s["seq_lens"] for s in samples(ds)] == [[7, 5], [30], [12, 1, 8]]
        first, last = loader_batches(ds, shuffle=False)
        assert first["sample_ids"].tolist() == [0, 1]
        assert last["sample_ids"].tolist() == [2, -1]
        assert last["seq_lens"].tolist() == [[12, 1, 8], [0, 0, 0]]
        assert (last["labels"][1] == -100).all()

    def test_data_parallel_ranks_share_the_packs_out(self) -> None:
        one = [b["sample_ids"].tolist() for b in loader_batches(self.pack())]
        two = [
            [b["sample_ids"].tolist() for b in loader_batches(self.pack(), **place)]
            for place in (
                {"dp_rank": 0, "dp_degree": 2, "batch_size": 1},
                {"dp_rank": 1, "dp_degree": 2, "batch_size": 1},
            )
        ]
        assert [a + b for a, b in zip(*two, strict=True)] == one


def test_a_dataset_without_a_token_or_with_missing_labels_is_refused() -> None:
    with pytest.raises(UserError, match="no samples in it: 2 documents without a token"):
        PackedDataset(Numbered([0, 0]), max_seq_len=3, name="it").build()

    class Unequal(Numbered):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"tokens": [1, 2], "labels": [1]}

    with pytest.raises(UserError, match="sample 0 of it: 2 tokens but 1 labels"):
        PackedDataset(Unequal([2]), max_seq_len=3, name="it").build()
