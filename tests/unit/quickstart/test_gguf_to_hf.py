"""A GGUF file becomes a Hugging Face folder that computes the same."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.quickstart.tiny_gguf import byte_symbols, reference_model, write_gguf
from torchtune_cp.checkpointing import check_folder
from torchtune_cp.errors import UserError
from torchtune_cp.quickstart.gguf_to_hf import convert, unpermute


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_converted_model_computes_what_the_original_does(tmp_path, tied):
    reference = reference_model(tied=tied)
    write_gguf(tmp_path / "model.gguf", reference)
    folder = convert(tmp_path / "model.gguf", tmp_path / "hf")
    check_folder(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.tie_word_embeddings == tied
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-5, atol=1e-6)


def test_quantised_weights_come_out_within_their_rounding(tmp_path):
    reference = reference_model(tied=True)
    write_gguf(tmp_path / "model.gguf", reference, quantise=True)
    folder = convert(tmp_path / "model.gguf", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in reference.named_parameters():
        got = dict(model.named_parameters())[name]
        assert (got - weight).abs().max() <= weight.abs().max() / 127
    assert not torch.equal(_logits(model), _logits(reference))


def test_unpermuting_puts_the_halves_of_each_heads_pairs_one_after_the_other():
    # Two heads of 4: llama.cpp's rows are pairs (a0 b0 a1 b1), Hugging Face's halves (a0 a1 b0 b1).
    rows = torch.arange(8.0)[:, None]
    assert unpermute(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_tokenizer_has_the_files_tokens_merges_and_special_roles(tmp_path):
    write_gguf(tmp_path / "model.gguf", reference_model(tied=True))
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "model.gguf", tmp_path / "hf"))
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert len(tokenizer) == 3 + len(byte_symbols()) + 3
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.tokenize(" the 42<|im_end|>") == ["Ġthe", "Ġ", "4", "2", "<|im_end|>"]
    text = "naïve 東京 🎉\n\t the  end 3.14"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "the"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "the"


def test_digits_stay_together_where_the_file_says_gpt2(tmp_path):
    write_gguf(tmp_path / "model.gguf", reference_model(tied=True), pre="gpt-2")
    convert(tmp_path / "model.gguf", tmp_path / "hf")
    tokenizer = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    assert tokenizer["pre_tokenizer"]["type"] == "ByteLevel"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "gemma"}, "'gemma'"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_left(tmp_path, changes, says):
    write_gguf(tmp_path / "model.gguf", reference_model(tied=True), **changes)
    with pytest.raises(UserError, match=says):
        convert(tmp_path / "model.gguf", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_damaged_file_is_named(tmp_path):
    write_gguf(tmp_path / "model.gguf", reference_model(tied=True))
    data = (tmp_path / "model.gguf").read_bytes()
    for kept in (data[: len(data) // 2], data[:100], b"nonsense"):
        (tmp_path / "damaged.gguf").write_bytes(kept)
        with pytest.raises(UserError, match=r"damaged\.gguf"):
            convert(tmp_path / "damaged.gguf", tmp_path / "hf")
