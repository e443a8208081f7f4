from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtune_cp.data import HFTokenizer, esm_tokenizer
from torchtune_cp.datasets import protein_dataset
from torchtune_cp.datasets.fasta import FastaRows, read_fasta
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


def test_a_plain_file_is_read_record_by_record_and_gives_what_a_gzipped_one_gives(
    tmp_path: Path,
) -> None:
    text = " >a first protein\r\nMKv\r\n lt \r\n\n>b\nGG*\n>empty\n>\nA\n"
    (tmp_path / "x.fasta").write_bytes(text.encode())
    (tmp_path / "x.fasta.gz").write_bytes(gzip.compress(text.encode()))
    expected = [("a", "MKVLT"), ("b", "GG"), ("empty", ""), ("", "A")]
    for file in ("x.fasta", "x.fasta.gz"):
        rows = pickle.loads(pickle.dumps(FastaRows(tmp_path / file)))
        assert [(rows.name_of(i), rows[i]["sequence"]) for i in range(len(rows))] == expected
        assert [row["sequence"] for row in rows] == [sequence for _, sequence in expected]


def test_any_data_set_with_a_sequence_column_reads_like_the_fasta_file(
    jsonl: Callable[..., str], tmp_path: Path
) -> None:
    tokenizer = esm_tokenizer()
    records = list(read_fasta(PROTEINS))
    rows = [{"id": name, "seq": sequence.lower() + "*"} for name, sequence in records]
    by_column = protein_dataset(tokenizer, source="json", data_files=jsonl(*rows), column="seq")
    by_path = protein_dataset(tokenizer, str(PROTEINS))
    assert list(by_column) == list(by_path)
    assert by_path[0]["tokens"] == tokenizer.encode(records[0][1])
    with pytest.raises(UserError, match=r"row 0 of .*no column 'sequence'; columns: id, seq"):
        protein_dataset(tokenizer, source="json", data_files=jsonl(*rows))


def test_residues_outside_the_alphabet_go_by_config_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text(">a\nMKJJV*L\n>b\nBZUOX-.\n>c\nMK1\n>d\nML\n")
    tokenizer = esm_tokenizer()
    ds = protein_dataset(tokenizer, str(tmp_path / "x.fasta"))
    assert ds[0]["tokens"] == [0, 20, 15, 3, 3, 7, 3, 4, 2]  # one <unk> for each
    assert 3 not in ds[1]["tokens"]
    assert ds.describe_stats() == (
        "4 rows, 4 samples, 4 residues outside the alphabet in 2 rows (J 2, * 1, 1 1)"
    )
    dropped = protein_dataset(tokenizer, str(tmp_path / "x.fasta"), unknown="drop")
    assert [tokenizer.decode(s["tokens"]) for s in dropped] == ["BZUOX-.", "ML"]
    assert dropped.stats.unknown_skipped == 2
    assert "2 rows with unknown characters left out" in dropped.describe_stats()
    with pytest.raises(UserError, match=r"protein a: .*outside the alphabet: '\*' at 6, 'J' at 3"):
        protein_dataset(tokenizer, str(tmp_path / "x.fasta"), unknown="error")
    skipped = protein_dataset(
        tokenizer, str(tmp_path / "x.fasta"), unknown="error", on_bad_row="skip"
    )
    assert skipped.stats.bad_skipped == 2


def test_overlong_proteins_are_cut_split_or_dropped_and_counted() -> None:
    tokenizer = esm_tokenizer(max_seq_len=100)
    whole = [tokenizer.encode(sequence) for _, sequence in read_fasta(PROTEINS)]
    long = [tokens for tokens in whole if len(tokens) > 100]
    assert 0 < len(long) < len(whole)
    cut = protein_dataset(tokenizer, str(PROTEINS))
    assert [s["tokens"] for s in cut] == [tokens[:100] for tokens in whole]
    assert cut.stats.truncated == len(long)
    split = protein_dataset(tokenizer, str(PROTEINS), overlong="split")
    pieces = [tokens[i : i + 100] for tokens in whole for i in range(0, len(tokens), 100)]
    assert [s["tokens"] for s in split] == pieces
    assert split.stats.split == len(long)
    dropped = protein_dataset(tokenizer, str(PROTEINS), overlong="drop")
    assert [s["tokens"] for s in dropped] == [t for t in whole if len(t) <= 100]
    assert dropped.stats.dropped == len(long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either dataset.path .* or dataset.source"),
        ({"path": "x", "source": "json"}, "either dataset.path .* or dataset.source"),
        ({"path": "x", "data_files": "y"}, "takes no data_files"),
        ({"path": "x", "unknown": "ignore"}, "unknown='ignore' is not known; allowed: unk, error"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(
    arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        protein_dataset(esm_tokenizer(), **arguments)


def test_a_tokenizer_that_reads_everything_has_no_unknown_residues(tokenizer: HFTokenizer) -> None:
    with pytest.raises(UserError, match=r"needs torchtune_cp\.data\.esm_tokenizer"):
        protein_dataset(tokenizer, str(PROTEINS), unknown="drop")
