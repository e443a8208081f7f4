from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from torchtune_cp.data import HFTokenizer
from torchtune_cp.datasets import SFTDataset, text_folder_dataset
from torchtune_cp.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    for name, text in {
        "b.py": "bb",
        "a.py": "a" * 10,
        "c.txt": "ccc",
        "sub/a.py": "sub",
        "empty.py": "",
        "blank.py": "\n \n",
    }.items():
        (root / name).write_text(text)
    return root


def texts(ds: SFTDataset, tokenizer: HFTokenizer) -> list[str]:
    return [tokenizer.decode(ds[i]["tokens"]) for i in range(len(ds))]


def test_each_file_is_a_document_in_the_order_of_the_names(
    tokenizer: HFTokenizer, folder: Path
) -> None:
    ds = text_folder_dataset(tokenizer, str(folder))
    assert texts(ds, tokenizer) == ["a" * 10, "bb"]
    assert ds[1] == {"tokens": [256, 98, 98, 257], "labels": [256, 98, 98, 257]}
    assert ds.stats.empty_skipped == 2
    assert text_folder_dataset(tokenizer, str(folder), add_eos=False)[1]["tokens"] == [256, 98, 98]


def test_files_are_chosen_by_pattern_or_list(tokenizer: HFTokenizer, folder: Path) -> None:
    def chosen(glob: str | list[str]) -> list[str]:
        return texts(text_folder_dataset(tokenizer, str(folder), glob=glob), tokenizer)

    assert chosen("**/*.py") == ["a" * 10, "bb", "sub"]
    assert chosen(["c.txt", "b.py"]) == ["bb", "ccc"]
    assert chosen(["*.py", "b.*"]) == ["a" * 10, "bb"]


def test_long_files_are_split_by_default(tokenizer: HFTokenizer, folder: Path) -> None:
    ds = text_folder_dataset(tokenizer, str(folder), max_seq_len=5)
    assert [len(ds[i]["tokens"]) for i in range(len(ds))] == [5, 5, 2, 4]
    assert texts(ds, tokenizer) == ["aaaa", "aaaaa", "a", "bb"]
    assert ds.stats.split == 1
    ds = text_folder_dataset(tokenizer, str(folder), max_seq_len=5, overlong="truncate")
    assert texts(ds, tokenizer) == ["aaaa", "bb"]
    with pytest.raises(UserError, match=r"file a\.py has 12 tokens, more than max_seq_len 5"):
        text_folder_dataset(tokenizer, str(folder), max_seq_len=5, overlong="error")


def test_short_files_can_be_left_out_and_files_limited(
    tokenizer: HFTokenizer, folder: Path
) -> None:
    ds = text_folder_dataset(tokenizer, str(folder), "**/*.py", min_tokens=5)
    assert texts(ds, tokenizer) == ["a" * 10, "sub"]
    assert ds.stats.short_skipped == 1
    ds = text_folder_dataset(tokenizer, str(folder), "**/*.*", min_tokens=5, max_files=2)
    assert texts(ds, tokenizer) == ["a" * 10, "ccc"]


def test_parts_of_the_files_for_training_and_validation(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    for i in range(10):
        (tmp_path / f"{i}.py").write_text(f"file {i}")

    def part(split: str) -> list[str]:
        return texts(text_folder_dataset(tokenizer, str(tmp_path), split=split), tokenizer)

    assert part("train[:70%]") == [f"file {i}" for i in range(7)]
    assert part("train[70%:]") == ["file 7", "file 8", "file 9"]
    assert part("train[3:4]") == ["file 3"]
    for wrong in ("test", "train[", "validation[:10%]"):
        with pytest.raises(UserError, match=r"dataset\.split=.* cannot be used"):
            part(wrong)


def test_without_a_path_the_standard_library_is_read(tokenizer: HFTokenizer) -> None:
    ds = text_folder_dataset(tokenizer, None, glob=["typing.py", "abc.py"], max_seq_len=2048)
    root = Path(sysconfig.get_path("stdlib"))
    expected = [(root / name).read_bytes() for name in ("abc.py", "typing.py")]
    tokens = [token for i in range(len(ds)) for token in ds[i]["tokens"]]
    assert tokens == [256, *expected[0], 257, 256, *expected[1], 257]
    assert ds.stats.rows == 2


def test_a_file_that_is_not_text_is_named_or_skipped(tokenizer: HFTokenizer, folder: Path) -> None:
    (folder / "aa.py").write_bytes(b"ok\xff")
    with pytest.raises(
        UserError, match=r"file aa\.py: not UTF-8 text \(invalid start byte at byte 2\)"
    ):
        text_folder_dataset(tokenizer, str(folder))
    ds = text_folder_dataset(tokenizer, str(folder), on_bad_row="skip")
    assert texts(ds, tokenizer) == ["a" * 10, "bb"]
    assert ds.stats.bad_skipped == 1


def test_wrong_arguments_are_named(tokenizer: HFTokenizer, folder: Path) -> None:
    with pytest.raises(UserError, match=r"dataset.path: '/no/where' is not a folder"):
        text_folder_dataset(tokenizer, "/no/where")
    with pytest.raises(UserError, match=r"dataset\.glob: no file in .* matches '\*\.rs'"):
        text_folder_dataset(tokenizer, str(folder), ["*.py", "*.rs"])
    with pytest.raises(UserError, match=r"dataset\.max_files must be 1 or more, not 0"):
        text_folder_dataset(tokenizer, str(folder), max_files=0)
    with pytest.raises(UserError, match=r"packed=true needs .* tokenizer\.max_seq_len"):
        text_folder_dataset(tokenizer, str(folder), packed=True)
