"""Local files: any name, any line end, marks and bad bytes (F11), row by row."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtune_cp.data import HFTokenizer, esm_tokenizer
from torchtune_cp.datasets import (
    SFTDataset,
    chat_dataset,
    protein_dataset,
    text_completion_dataset,
    text_folder_dataset,
)
from torchtune_cp.datasets.source import load_rows
from torchtune_cp.errors import UserError

BOM = b"\xef\xbb\xbf"
NAMES = ("data[1].jsonl", "a*b.json", "x%20y.jsonl", "with space.jsonl", "a@b.jsonl", "a,b.jsonl")
NAMES += ("c#d.jsonl", "e::f.jsonl", "json", "?q.jsonl", "{a,b}.json", "~t.jsonl", "p=1.jsonl")


@pytest.fixture
def read(tokenizer: HFTokenizer, tmp_path: Path) -> Callable[..., SFTDataset]:
    def load(content: bytes, source: str = "json", name: str = "", **kwargs: Any) -> SFTDataset:
        path = tmp_path / (name or f"data.{source}")
        path.write_bytes(content)
        ds = text_completion_dataset(tokenizer, source, data_files=str(path), **kwargs)
        assert isinstance(ds, SFTDataset)
        return ds

    return load


def texts(ds: SFTDataset, tokenizer: HFTokenizer) -> list[str]:
    return [tokenizer.decode(ds[i]["tokens"]) for i in range(len(ds))]


def line(text: str) -> bytes:
    return json.dumps({"text": text}, ensure_ascii=False).encode()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_exists_is_that_file(
    tokenizer: HFTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    for other in ("data1.jsonl", "aXb.json", "Xq.jsonl", "a.json"):  # what patterns would find
        Path(other).write_bytes(line("other"))
    Path(name).write_bytes(line("this"))
    for given in (name, str(tmp_path / name)):
        assert texts(text_completion_dataset(tokenizer, "json", data_files=given), tokenizer) == [
            "this"
        ]
    assert len(text_folder_dataset(tokenizer, str(tmp_path), glob=name)) == 1
    with open(f"{name}.parquet", "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["this"]}), file)
    ds = text_completion_dataset(tokenizer, "parquet", data_files=f"{name}.parquet")
    assert texts(ds, tokenizer) == ["this"]


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("json", line("a") + b"\n" + line("b") + b"\n"),
        ("json", line("a") + b"\r\n\r\n" + line("b")),
        ("json", b"[" + line("a") + b",\n" + line("b") + b"]"),
        ("text", b"a\nb\n"),
        ("text", b"a\r\nb"),
        ("csv", b"text,n\na,1\nb,2"),
        ("csv", b"n,text\r\n1,a\r\n2,b\r\n"),
    ],
)
@pytest.mark.parametrize("packed", [None, "gz", "xz", "bz2"])
def test_marks_line_ends_and_compression_change_nothing(
    read: Callable[..., SFTDataset],
    tokenizer: HFTokenizer,
    source: str,
    content: bytes,
    packed: str | None,
) -> None:
    import bz2
    import lzma

    pack = {None: bytes, "gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[packed]
    for mark in (b"", BOM):
        ds = read(pack(mark + content), source)
        assert texts(ds, tokenizer) == ["a", "b"]


def test_what_a_text_may_hold_stays_in_its_row(
    read: Callable[..., SFTDataset], tokenizer: HFTokenizer
) -> None:
    odd = "one\u2028two\u0085three\x0bfour\x1c\ufeffé"
    assert texts(read(line(odd) + b"\n" + line("b")), tokenizer) == [odd, "b"]
    assert texts(read(f"{odd}\nb".encode(), "text"), tokenizer) == [odd, "b"]
    cells = read(b'text\n"two\nlines, ""quoted"""\n42\nNA\n', "csv")
    assert texts(cells, tokenizer) == ['two\nlines, "quoted"', "42", "NA"]


def test_rows_are_what_the_file_says(tmp_path: Path) -> None:
    rows = [
        {"x": {"b": 1, "a": None}, "y": []},
        {"x": {"a": "t"}, "y": [1, "z"]},
        {"x": 3, "y": {}},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    loaded = pickle.loads(pickle.dumps(load_rows("json", data_files=str(path))))
    assert [loaded[i] for i in range(3)] == rows
    assert list(loaded[0]["x"]) == ["b", "a"]
    part = load_rows(
        "json", data_files={"train": str(path), "test": str(path)}, split="train[1:]+test[:1]"
    )
    assert [part[i] for i in range(len(part))] == [rows[1], rows[2], rows[0]]


GOOD = [line(text) for text in "abcdef"]


@pytest.mark.parametrize(
    ("source", "bad", "message"),
    [
        (
            "json",
            b'{"text": "caf\xe9"}',
            r"line 4 is not UTF-8 text \(0xE9 at byte 14 of the line",
        ),
        ("json", b'{"text": "cut', "JSON parse error in line 4"),
        ("json", b'{"text": "a\x00"}', "line 4 has NUL bytes"),
        ("json", b"\x00" * 8, "line 4 has NUL bytes"),
        ("json", b'{"text": "\\ud83d"}', r"half a character, U\+D83D"),
        ("json", b"[1]", "the row is list, it must be a JSON object"),
        ("json", b"[" * 100_000, "JSON parse error in line 4"),
        ("text", b"caf\xe9", "line 4 is not UTF-8 text"),
        ("text", b"\x00\x00", "line 4 has NUL bytes"),
        ("csv", b"caf\xe9", "line 5 is not UTF-8 text"),
        ("csv", b"a,b", "line 5 has 2 fields, the header 1"),
    ],
)
def test_a_broken_record_names_file_and_row_or_is_skipped_and_counted(
    read: Callable[..., SFTDataset], tokenizer: HFTokenizer, source: str, bad: bytes, message: str
) -> None:
    good = GOOD if source == "json" else [b"a", b"b", b"c", b"d", b"e", b"f"]
    lines = [*good[:3], bad, *good[3:]]
    content = b"\n".join([b"text", *lines] if source == "csv" else lines)
    with pytest.raises(UserError, match=rf"row 3 of .*data\.{source}: .*{message}"):
        read(content, source)
    ds = read(content, source, on_bad_row="skip")
    assert texts(ds, tokenizer) == list("abcdef")
    assert ds.stats.bad_skipped == 1
    assert f"row 3 of {ds._rows._files[0].path}" in ds.data_line()  # type: ignore[attr-defined]


def test_a_bad_byte_in_an_array_names_its_row(
    read: Callable[..., SFTDataset], tokenizer: HFTokenizer
) -> None:
    content = b'[{"text": "a"}, {"text": "caf\xe9"}, {"text": "b"}]'
    with pytest.raises(UserError, match=r"row 1 of .*data\.json: not UTF-8 text: .*byte 0xE9"):
        read(content)
    assert texts(read(content, on_bad_row="skip"), tokenizer) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "source", "message"),
    [
        ("a".encode("utf-16"), "text", r"data\.text is UTF-16 text; convert it to UTF-8"),
        (b"", "json", r"no samples in .*data\.json: 0 rows"),
        (b"a,a\n1,2\n", "csv", "several columns named a"),
        (b'a\n"open\n', "csv", "CSV error in row 0"),
        (gzip.compress(b"a\n" * 99, mtime=0)[:-9], "text", "cannot unpack .*data"),
    ],
)
def test_a_file_that_is_none_is_one_line(
    read: Callable[..., SFTDataset], content: bytes, source: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(content, source)
    assert "\n" not in str(caught.value)


def test_patterns_find_files_in_order(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    ds = text_completion_dataset(tokenizer, "text", data_files=str(tmp_path / "*.txt"))
    assert texts(ds, tokenizer) == ["a", "b"]
    with pytest.raises(UserError, match=r"data_files: no file matches '.*\*\.csv'"):
        text_completion_dataset(tokenizer, "text", data_files=str(tmp_path / "*.csv"))


def test_nulls_that_a_table_fills_in_are_no_keys(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    import datasets

    turns = [
        {"role": "user", "content": "q", "weight": None},
        {"role": "assistant", "content": "a"},
    ]
    tools = [{"name": "f", "parameters": {"x": "int"}}, {"name": "g", "parameters": {"y": "int"}}]
    path = tmp_path / "x.parquet"
    with path.open("wb") as file:
        datasets.Dataset.from_list([{"messages": turns, "tools": tools}]).to_parquet(file)
    tokenizer.chat_template = "{{ tools }}" + (tokenizer.chat_template or "")
    ds = chat_dataset(
        tokenizer,
        source="parquet",
        data_files=str(path),
        conversation_column="messages",
        conversation_style="openai",
    )
    assert tokenizer.decode(ds[0]["tokens"]).startswith(str(tools))


def test_fasta_and_folder_files_likewise(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "x.fasta"
    for pack, name in ((bytes, "x.fasta"), (gzip.compress, "x.fasta.gz")):
        path = tmp_path / name
        path.write_bytes(pack(BOM + ">é a\r\nMKV\n>b\nM".encode() + b"\xe9V\n>c\nMK\n"))
        with pytest.raises(UserError, match=rf"protein b: .*{name} as FASTA: .*byte 0xE9"):
            protein_dataset(esm_tokenizer(), str(path))
        ds = protein_dataset(esm_tokenizer(), str(path), on_bad_row="skip")
        assert [len(ds[i]["tokens"]) for i in range(len(ds))] == [5, 4]
        assert ds.stats.bad_skipped == 1
    (tmp_path / "bom.py").write_bytes(BOM + b"x = 1")
    (tmp_path / "nul.py").write_bytes(b"x\x00")
    with pytest.raises(UserError, match=r"file nul\.py: has NUL bytes"):
        text_folder_dataset(tokenizer, str(tmp_path))
    ds = text_folder_dataset(tokenizer, str(tmp_path), on_bad_row="skip")
    assert texts(ds, tokenizer) == ["x = 1"]
