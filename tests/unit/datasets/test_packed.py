"""Packed datasets: what is in a pack, what is made once and kept, and what makes it anew."""

from __future__ import annotations

import json
import logging
import multiprocessing
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_cp.data import HFTokenizer, build_dataloader, byte_tokenizer, collate
from torchtune_cp.datasets import (
    PackedDataset,
    alpaca_dataset,
    chat_dataset,
    instruct_dataset,
    protein_dataset,
    text_completion_dataset,
    text_folder_dataset,
)
from torchtune_cp.datasets.fingerprint import fingerprint
from torchtune_cp.datasets.token_store import TokenStore, cache_dir, stored_tokens
from torchtune_cp.errors import UserError

Write = Callable[..., str]
CHOICES = [("greedy", False), ("greedy", True), ("best_fit", False), ("best_fit", True)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    monkeypatch.setenv("TUNE_CACHE_DIR", str(folder))
    return folder / "tokens"


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


def folder_dataset(folder: Path, **kwargs: Any) -> PackedDataset:
    tokenizer = kwargs.pop("tokenizer", byte_tokenizer())
    ds = text_folder_dataset(tokenizer, str(folder), **{"max_seq_len": 20, **kwargs}, packed=True)
    assert isinstance(ds, PackedDataset)
    return ds


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in {"a.py": "a" * 30, "b.py": "bb", "c.py": "c" * 7}.items():
        (folder / name).write_text(text)
    return folder


def keys(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


class TestCache:
    def test_a_second_start_reads_no_document_and_gives_the_same_packs(
        self, texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = samples(folder_dataset(texts))
        assert len(keys(cache)) == 1

        def encode(*_: Any, **__: Any) -> None:
            raise AssertionError("tokenised again")

        monkeypatch.setattr(HFTokenizer, "encode", encode)
        assert samples(folder_dataset(texts)) == first
        # Nothing but the tokens is kept, so other packs come from the same files.
        assert samples(folder_dataset(texts, max_seq_len=15)) != first
        assert samples(folder_dataset(texts, packing_strategy="best_fit")) != first
        assert len(keys(cache)) == 1

    def test_whatever_changes_the_tokens_changes_the_key(self, texts: Path, cache: Path) -> None:
        tried = 0

        def check(**kwargs: Any) -> None:
            nonlocal tried
            tried += 1
            folder_dataset(texts, **kwargs).build()
            assert len(keys(cache)) == tried, kwargs

        check()
        check(add_eos=False)
        check(min_tokens=5)
        check(max_files=2)
        check(glob=["a.py", "b.py"])
        (texts / "b.py").write_text("bc")
        check()
        (texts / "b.py").rename(texts / "d.py")
        check()
        other = byte_tokenizer()
        other.eos_id = 3
        check(tokenizer=other)
        moved = texts.with_name("moved")
        shutil.copytree(texts, moved)
        folder_dataset(moved).build()
        assert len(keys(cache)) == tried, "the folder's own place does not matter"

    def test_every_part_of_a_tokenizer_and_of_a_conversation_counts(self, jsonl: Write) -> None:
        files = jsonl({"messages": [{"role": "assistant", "content": "x"}], "text": "x"})

        def key(tokenizer: HFTokenizer | None = None, **kwargs: Any) -> str | None:
            given = {
                "source": "json",
                "data_files": files,
                "conversation_column": "messages",
                "conversation_style": "openai",
                "max_seq_len": 9,
                **kwargs,
            }
            ds = chat_dataset(tokenizer or byte_tokenizer(), **given, packed=True)
            assert isinstance(ds, PackedDataset)
            return ds._cache_key

        template = byte_tokenizer()
        template.chat_template = str(template.chat_template) + " "
        variants = [
            key(),
            key(template),
            key(masking_strategy="train_on_last"),
            key(new_system_prompt="be brief"),
            key(on_bad_row="skip"),
            key(conversation_style="sharegpt"),
            key(conversation_column="text"),
        ]
        assert None not in variants
        assert len(set(variants)) == len(variants)
        same = [key(), key(max_seq_len=10), key(byte_tokenizer(7)), key(split_across_pack=True)]
        assert set(same) == {variants[0]}
        jsonl({"messages": [{"role": "assistant", "content": "y"}], "text": "x"})
        assert key() != variants[0], "the rows' content counts"

    @pytest.mark.parametrize("harm", ["flip", "cut", "no meta", "meta", "missing"])
    def test_a_damaged_folder_is_made_again_with_a_line(
        self, texts: Path, cache: Path, harm: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = samples(folder_dataset(texts))
        (folder,) = (p for p in cache.iterdir() if p.is_dir())
        file = folder / "tokens.i32"
        content = file.read_bytes()
        if harm == "flip":
            file.write_bytes(content[:8] + b"\x01" + content[9:])
        elif harm == "cut":
            file.write_bytes(content[:-4])
        elif harm == "no meta":
            (folder / "meta.json").unlink()
        elif harm == "meta":
            (folder / "meta.json").write_text('{"format": 1, "files": [')
        else:
            file.unlink()
        assert samples(folder_dataset(texts)) == first
        (line,) = [message for message in caplog.messages if "damaged" in message]
        assert str(folder) in line
        assert file.read_bytes() == content
        assert len(keys(cache)) == 1, "no scratch folder is left"

    def test_the_files_are_plain_numbers(self, texts: Path, cache: Path) -> None:
        folder_dataset(texts).build()
        (folder,) = (p for p in cache.iterdir() if p.is_dir())
        # Labels are the tokens, so they are not kept twice.
        assert sorted(p.name for p in folder.iterdir()) == [
            "lengths.i64",
            "meta.json",
            "tokens.i32",
        ]
        assert set(json.loads((folder / "meta.json").read_text())) == {"format", "files"}
        assert (folder / "tokens.i32").stat().st_size == 4 * folder_dataset(texts).stats.tokens

    def test_a_failed_start_leaves_nothing_behind(self, texts: Path, cache: Path) -> None:
        (texts / "d.py").write_bytes(b"\xff\xfe")
        with pytest.raises(UserError, match=r"file d\.py: not UTF-8"):
            folder_dataset(texts).build()
        assert keys(cache) == set()
        (texts / "d.py").write_text("d")
        ds = folder_dataset(texts)
        assert ds._cache_key is not None
        (cache / f"{ds._cache_key}.killed.scratch").mkdir()  # what a killed process leaves
        assert ds.stats.documents == 4
        assert keys(cache) == {ds._cache_key}

    def test_a_folder_that_cannot_be_written_costs_a_warning(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        first = samples(folder_dataset(texts))
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / "file"))
        assert samples(folder_dataset(texts)) == first
        assert "TUNE_CACHE_DIR chooses another folder" in caplog.text

    def test_the_folder_is_the_users_cache_unless_chosen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TUNE_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert cache_dir() == Path("/x/torchtune_cp")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_dir() == Path.home() / ".cache" / "torchtune_cp"

    def test_what_has_no_fingerprint_is_packed_without_a_cache(
        self, texts: Path, cache: Path
    ) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.fingerprint = None  # type: ignore[assignment,method-assign]
        tokenizer.own = lambda text: text  # type: ignore[attr-defined]
        assert samples(folder_dataset(texts, tokenizer=tokenizer)) == samples(folder_dataset(texts))
        assert len(keys(cache)) == 1


class _Noting(Numbered):
    """Writes a line into a file whenever all documents are read from the beginning."""

    def __init__(self, lengths: list[int], note: Path) -> None:
        super().__init__(lengths)
        self.note = note

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == 0:
            with self.note.open("a") as file:
                file.write("read\n")
        return super().__getitem__(index)


def _build(folder: Path, barrier: Any, results: Any) -> None:
    documents = _Noting([7, 5, 30, 12, 1] * 40, folder / "note")
    ds = PackedDataset(
        documents,
        max_seq_len=30,
        strategy="best_fit",
        cache_key="k",
        cache_folder=folder,
    )
    barrier.wait(60)
    results.put([sample["tokens"] for sample in samples(ds)])


def test_processes_that_start_together_tokenise_once_and_have_the_same_packs(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")  # spawned ones would import torch for seconds
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_build, args=(tmp_path, barrier, results)) for _ in "123"]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)
    assert found[0] == found[1] == found[2]
    assert (tmp_path / "note").read_text() == "read\n"


def loader_batches(ds: PackedDataset, **kwargs: Any) -> Iterator[dict[str, torch.Tensor]]:
    given = {"batch_size": 2, "dp_rank": 0, "dp_degree": 1, "shuffle": True, "seed": 3}
    return iter(build_dataloader(ds, **{**given, **kwargs}, drop_last=False, collate_fn=collate))


class TestLoader:
    def pack(self) -> PackedDataset:
        return PackedDataset(Numbered([7, 5, 30, 12, 1, 8]), max_seq_len=30, cache_key="k")

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

    def test_pickling_sends_the_place_not_the_tokens(self) -> None:
        big = PackedDataset(Numbered([900] * 50), max_seq_len=900, cache_key="big")
        sent = pickle.dumps(big._content()[0])
        assert len(sent) < 1000
        store = pickle.loads(sent)
        assert isinstance(store, TokenStore)
        assert store.read(3, 5, 2)[0].tolist() == [3005, 3006]


def test_a_dataset_without_a_token_or_with_missing_labels_is_refused() -> None:
    with pytest.raises(UserError, match="no samples in it: 2 documents without a token"):
        stored_tokens(lambda: Numbered([0, 0]), name="it", key=None)

    class Unequal(Numbered):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"tokens": [1, 2], "labels": [1]}

    with pytest.raises(UserError, match="sample 0 of it has 2 tokens but 1 labels"):
        stored_tokens(lambda: Unequal([2]), name="it", key=None)


def test_fingerprints_tell_values_apart_that_join_to_the_same_text() -> None:
    values: list[Any] = [
        *(None, 0, False, "", "0", b"", [], {}, [[]], [0], ["0"], {"a": "b"}, ["a", "b"]),
        *(["ab"], [["a"], "b"], [["a", "b"]], {"a": None}),
    ]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint((1, "x")) == fingerprint([1, "x"])
    with pytest.raises(TypeError, match="function cannot be told"):
        fingerprint([lambda: 1])
