from __future__ import annotations

import gzip
import json
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtune_cp.data import HFTokenizer, byte_tokenizer
from torchtune_cp.datasets import SFTDataset, text_completion_dataset
from torchtune_cp.datasets.source import load_rows
from torchtune_cp.errors import UserError

Write = Callable[..., str]
BOS, EOS = 256, 257


def texts(ds: SFTDataset, tokenizer: HFTokenizer) -> list[str]:
    return [tokenizer.decode(ds[i]["tokens"]) for i in range(len(ds))]


def test_every_token_is_trained_on_between_bos_and_eos(
    tokenizer: HFTokenizer, jsonl: Write
) -> None:
    ds = text_completion_dataset(tokenizer, "json", data_files=jsonl({"text": "hi"}, {"text": "é"}))
    assert ds[0] == {"tokens": [BOS, 104, 105, EOS], "labels": [BOS, 104, 105, EOS]}
    assert ds[1]["tokens"] == [BOS, 0xC3, 0xA9, EOS]
    assert len(ds) == 2


def test_add_eos_column_and_max_rows(tokenizer: HFTokenizer, jsonl: Write) -> None:
    files = jsonl({"body": "a", "text": None}, {"body": "b", "text": None})
    ds = text_completion_dataset(
        tokenizer, source="json", column="body", add_eos=False, data_files=files, max_rows=1
    )
    assert len(ds) == 1
    assert ds[0]["tokens"] == [BOS, ord("a")]


def test_the_split_chooses_rows(tokenizer: HFTokenizer, jsonl: Write) -> None:
    files = jsonl(*({"text": str(i)} for i in range(10)))
    ds = text_completion_dataset(tokenizer, "json", data_files=files, split="train[80%:]")
    assert texts(ds, tokenizer) == ["8", "9"]


def test_text_csv_parquet_and_several_files_are_read(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one\n\n   \ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    ds = text_completion_dataset(
        tokenizer, "text", data_files=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    )
    assert texts(ds, tokenizer) == ["one", "two", "three"]
    assert (ds.stats.rows, ds.stats.empty_skipped) == (5, 2)

    (tmp_path / "c.csv").write_text('id,text\n1,"x, y"\n2,z\n')
    ds = text_completion_dataset(tokenizer, "csv", data_files=str(tmp_path / "c.csv"))
    assert texts(ds, tokenizer) == ["x, y", "z"]

    import datasets

    datasets.Dataset.from_dict({"text": ["p"]}).to_parquet(str(tmp_path / "d.parquet"))
    ds = text_completion_dataset(tokenizer, "parquet", data_files=str(tmp_path / "d.parquet"))
    assert texts(ds, tokenizer) == ["p"]

    with gzip.open(tmp_path / "e.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "g"}) + "\n")
    ds = text_completion_dataset(tokenizer, "json", data_files=str(tmp_path / "*.jsonl.gz"))
    assert texts(ds, tokenizer) == ["g"]


def test_a_json_array_is_read_and_its_line_breaks_are_not_rows(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n\n{"text": "one"},\n\n{"text": "two"}]\n')
    ds = text_completion_dataset(tokenizer, "json", data_files=str(path))
    assert texts(ds, tokenizer) == ["one", "two"]
    assert ds.stats.blank_lines == 0


def test_the_tokenizers_limit_holds_unless_the_dataset_has_its_own(jsonl: Write) -> None:
    files = jsonl({"text": "x" * 118})  # 120 tokens with bos and eos
    short = byte_tokenizer(max_seq_len=50)
    assert len(text_completion_dataset(short, "json", data_files=files)[0]["tokens"]) == 50
    ds = text_completion_dataset(short, "json", data_files=files, max_seq_len=60, overlong="split")
    assert [len(ds[i]["tokens"]) for i in range(len(ds))] == [60, 60]


class TestMalformedRows:
    """D32"""

    def test_empty_and_blank_rows_and_blank_lines_are_skipped_and_counted(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        files = jsonl({"text": "a"}, "", {"text": ""}, "   ", {"text": " \n"}, {"text": "b"})
        ds = text_completion_dataset(tokenizer, "json", data_files=files)
        assert texts(ds, tokenizer) == ["a", "b"]
        assert (ds.stats.rows, ds.stats.empty_skipped, ds.stats.blank_lines) == (4, 2, 2)

    @pytest.mark.parametrize("row", [{"text": None}, {"other": 1}])
    def test_a_null_or_missing_field_names_row_and_column(
        self, tokenizer: HFTokenizer, jsonl: Write, row: dict
    ) -> None:
        files = jsonl({"text": "a"}, {"text": "b"}, row)
        with pytest.raises(UserError, match=r"row 2 of .*data\.jsonl: column 'text' is null"):
            text_completion_dataset(tokenizer, "json", data_files=files)
        ds = text_completion_dataset(tokenizer, "json", data_files=files, on_bad_row="skip")
        assert texts(ds, tokenizer) == ["a", "b"]
        assert ds.stats.bad_skipped == 1

    def test_a_missing_column_names_row_and_columns(
        self, tokenizer: HFTokenizer, jsonl: Write
    ) -> None:
        files = jsonl({"body": "a", "id": 1})
        with pytest.raises(
            UserError,
            match=r"row 0 of .*: no column 'text'; columns: body, id \(choose with dataset\.column\)",
        ):
            text_completion_dataset(tokenizer, "json", data_files=files)

    def test_a_wrong_type_is_named(self, tokenizer: HFTokenizer, jsonl: Write) -> None:
        with pytest.raises(
            UserError, match=r"row 0 of .*: column 'text' is list, it must be a string"
        ):
            text_completion_dataset(tokenizer, "json", data_files=jsonl({"text": ["a"]}))


class TestUnreadableData:
    def test_a_missing_file_is_named(self, tokenizer: HFTokenizer) -> None:
        with pytest.raises(UserError, match=r"data_files: '/no/such\.jsonl' does not exist"):
            text_completion_dataset(tokenizer, "json", data_files="/no/such.jsonl")

    def test_data_files_are_required_for_local_sources(self, tokenizer: HFTokenizer) -> None:
        with pytest.raises(UserError, match=r"source='text' needs dataset\.data_files"):
            text_completion_dataset(tokenizer, "text")

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("pandas", "files are read as json, text, csv, parquet, arrow"),
            ("webdataset", "files are read as json"),
            ("sql", "files are read as json"),
            ("./rows.py", "is a script"),
            ("https://host/rows.jsonl", "is a URL; give it as data_files"),
        ],
    )
    def test_a_source_that_unpickles_or_runs_what_it_reads_is_refused(
        self, tokenizer: HFTokenizer, tmp_path: Path, source: str, said: str
    ) -> None:
        (tmp_path / "rows.pkl").write_bytes(pickle.dumps({"text": "a"}))
        with pytest.raises(UserError, match=said):
            text_completion_dataset(tokenizer, source, data_files=str(tmp_path / "rows.pkl"))

    def test_broken_json_says_where(
        self, tokenizer: HFTokenizer, jsonl: Write, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(
            UserError, match=r"row 1 of .*data\.jsonl: JSON parse error in line 2, column 12"
        ):
            text_completion_dataset(
                tokenizer, "json", data_files=jsonl({"text": "a"}, '{"text": "b')
            )
        assert capfd.readouterr().err == ""

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"split": "test"}, r"split 'test'.*Unknown split"),
            ({"split": None}, r"dataset\.split must be a string such as 'train', not None"),
            ({"max_rows": 0}, r"dataset\.max_rows must be 1 or more"),
            ({"streaming": True}, r"dataset\.streaming=true is for protein_dataset"),
            ({"colum": "x"}, r"cannot read dataset.*colum"),
            ({"packed": True}, r"dataset\.packed=true needs the length of a pack.*max_seq_len"),
        ],
    )
    def test_wrong_arguments_are_one_line(
        self, tokenizer: HFTokenizer, jsonl: Write, kwargs: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UserError, match=message) as caught:
            text_completion_dataset(tokenizer, "json", data_files=jsonl({"text": "a"}), **kwargs)
        assert "\n" not in str(caught.value)

    def test_a_hub_failure_is_one_line_naming_the_source(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import datasets

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ConnectionError("Couldn't reach 'some/data' on the Hub\n(MaxRetryError)")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(
            UserError, match=r"cannot read dataset 'some/data', split 'train': Couldn't.*no network"
        ) as caught:
            load_rows("some/data")
        assert "\n" not in str(caught.value)


def test_local_files_need_no_network_and_show_no_bars(
    tokenizer: HFTokenizer,
    jsonl: Write,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    text_completion_dataset(tokenizer, "json", data_files=jsonl({"text": "a"}))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_progress_bars_are_left_as_the_user_had_them(jsonl: Write) -> None:
    import datasets

    datasets.enable_progress_bars()
    load_rows("json", data_files=jsonl({"text": "a"}))
    assert not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    load_rows("json", data_files=jsonl({"text": "b"}))
    assert datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
