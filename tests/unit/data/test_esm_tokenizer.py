"""The ESM alphabet against transformers' EsmTokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers
from transformers.models.esm.configuration_esm import get_default_vocab_list

from torchtune_cp.data import esm_tokenizer
from torchtune_cp.data.esm_tokenizer import ESM_ALPHABET
from torchtune_cp.datasets.example_proteins import EXAMPLE_PROTEINS
from torchtune_cp.datasets.fasta import read_fasta
from torchtune_cp.errors import UserError

PROTEINS = Path(__file__).parents[2] / "assets" / "proteins.fasta"
TEXTS = [
    *("MKV", "mkv", "MK V", " MK\nV ", "MK*V", "MKJ", "MKJJV", "M1K", "MkV", "", "X"),
    *("MK<mask>V", "<mask>", "<mask><mask>K", "<cls>MK<eos>", "M<pad><pad>", "<unk>M", "<null_1>M"),
    *("M-K.B", "UZOX", "M K <mask> V", "BZUOX.-", "<", "M<mas", "é"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> transformers.EsmTokenizer:
    vocab = tmp_path_factory.mktemp("esm") / "vocab.txt"
    vocab.write_text("\n".join(get_default_vocab_list()))
    return transformers.EsmTokenizer(str(vocab))


def test_ids_are_those_of_transformers(reference: transformers.EsmTokenizer) -> None:
    tokenizer = esm_tokenizer()
    proteins = [sequence for _, sequence in read_fasta(PROTEINS)]
    assert len(proteins) > 5
    for text in [*proteins, *TEXTS]:
        expected = reference(text)["input_ids"]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.encode(text, add_bos=False, add_eos=False) == expected[1:-1]
    for protein in proteins:
        assert tokenizer.decode(tokenizer.encode(protein)) == protein
    assert tokenizer.decode([0, 20, 32, 2], skip_special_tokens=False) == "<cls>M<mask><eos>"


def test_ids_of_random_strings_are_those_of_transformers(
    reference: transformers.EsmTokenizer,
) -> None:
    """Residues, lower case, characters outside the alphabet, blanks, and tokens written out."""
    tokenizer = esm_tokenizer()
    pieces = [*"ACDEFGHIKLMNPQRSTVWY", *"BZXUOJ.-*", *"acxj", *"1_é蛋<> \t\n"]
    pieces += ["<mask>", "<cls>", "<pad>", "<eos>", "<unk>", "<null_1>", "mask>", "<MASK>"]
    draw = random.Random(0)
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 30))) for _ in range(3000)]
    proteins = [sequence for _, sequence in read_fasta(EXAMPLE_PROTEINS)]
    assert len(proteins) == 128
    for text in [*texts, *proteins, *(p.lower() for p in proteins[:5])]:
        assert tokenizer.encode(text) == reference(text)["input_ids"], repr(text)


def test_special_ids_are_those_of_the_published_models(
    reference: transformers.EsmTokenizer,
) -> None:
    tokenizer = esm_tokenizer(max_seq_len=1024)
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id) == (0, 1, 2)
    assert (tokenizer.unk_id, tokenizer.mask_id, tokenizer.vocab_size) == (3, 32, 33)
    assert tokenizer.encode("L") == [0, 4, 2]
    assert tokenizer.max_seq_len == 1024
    assert tokenizer.special_ids == set(reference.all_special_ids)
    assert list(tokenizer.standard_ids) == list(range(4, 24))
    assert tuple(get_default_vocab_list()) == ESM_ALPHABET


def test_saved_files_load_in_transformers_and_here(
    reference: transformers.EsmTokenizer, tmp_path: Path
) -> None:
    esm_tokenizer().save(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, transformers.EsmTokenizer)
    ours = esm_tokenizer(tmp_path)
    for text in TEXTS:
        assert again(text)["input_ids"] == ours.encode(text) == reference(text)["input_ids"]
    assert again.all_special_tokens == reference.all_special_tokens
    assert again.mask_token_id == 32
    assert esm_tokenizer(tmp_path / "vocab.txt").encode("MK") == [0, 20, 15, 2]


def test_a_folder_of_transformers_is_read_with_its_own_ids(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(reversed(ESM_ALPHABET)) + "\n")
    tokenizer = esm_tokenizer(tmp_path)
    assert tokenizer.encode("M") == [32, 12, 30]
    assert (tokenizer.mask_id, tokenizer.pad_id) == (0, 31)
    assert (
        tokenizer.encode("M")
        == transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))("M")["input_ids"]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*vocab.txt"),
        ("<cls>\n<pad>\nA", "lacks <eos>, <unk>, <mask>, L"),
        ("\n".join([*ESM_ALPHABET, "A"]), "holds a token twice"),
    ],
)
def test_what_is_no_esm_alphabet_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "vocab.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        esm_tokenizer(tmp_path)
