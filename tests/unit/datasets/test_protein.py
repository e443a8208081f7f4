from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from torchtune_cp.data import HFTokenizer
from torchtune_cp.datasets import protein_dataset
from torchtune_cp.datasets.protein import read_fasta
from torchtune_cp.errors import UserError

PROTEINS = Path(__file__).parents[2] / "assets" / "proteins.fasta"


def test_every_protein_is_a_sample_with_all_its_residues(tokenizer: HFTokenizer) -> None:
    ds = protein_dataset(tokenizer, str(PROTEINS))
    lines = PROTEINS.read_text().splitlines()
    assert [tokenizer.decode(ds[i]["tokens"]) for i in range(len(ds))] == lines[1::2]
    assert all(ds[i]["labels"] == ds[i]["tokens"] for i in range(len(ds)))


def test_gzip_wrapped_lines_case_and_stops_read_alike(tmp_path: Path) -> None:
    text = ">a first protein\nMKv\n lt \n\n>b\nGG*\n>empty\n"
    plain, packed = tmp_path / "x.fasta", tmp_path / "x.fasta.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = [("a", "MKVLT"), ("b", "GG"), ("empty", "")]
    assert list(read_fasta(plain)) == list(read_fasta(packed)) == expected


def test_empty_records_are_skipped_and_counted(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">a\nMK\n>b\n>c\nVL\n")
    ds = protein_dataset(tokenizer, str(tmp_path / "x.fasta"))
    assert len(ds) == 2
    assert ds.stats.empty_skipped == 1


def test_overlong_proteins_are_cut_or_refused_by_name(tokenizer: HFTokenizer) -> None:
    ds = protein_dataset(tokenizer, str(PROTEINS), max_seq_len=10)
    assert {len(ds[i]["tokens"]) for i in range(len(ds))} == {10}
    name = PROTEINS.read_text().splitlines()[0][1:]
    with pytest.raises(UserError, match=f"{name}.*max_seq_len 10"):
        protein_dataset(tokenizer, str(PROTEINS), max_seq_len=10, overlong="error")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MKV\n>a\n", "line 1: text before the first"),
        (b"", "holds no FASTA record"),
        (b"\x1f\x8b\x08broken", "cannot read"),
    ],
)
def test_a_file_that_is_no_fasta_is_named(
    tokenizer: HFTokenizer, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / ("x.fasta.gz" if content.startswith(b"\x1f") else "x.fasta")
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as e:
        protein_dataset(tokenizer, str(path))
    assert "x.fasta" in str(e.value)


def test_a_missing_file_is_named(tokenizer: HFTokenizer) -> None:
    with pytest.raises(UserError, match=r"nowhere\.fasta"):
        protein_dataset(tokenizer, "nowhere.fasta")
