"""The quickstart's GGUF file becomes a Hugging Face folder that computes the same."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.quickstart.tiny_gguf import byte_symbols, reference_model, write_gguf
from torchtune_cp.checkpointing import check_folder
from torchtune_cp.quickstart.model import convert


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_converted_model_computes_what_the_original_does(tmp_path, tied):
    reference = reference_model(tied=tied)
    write_gguf(tmp_path / "model.gguf", reference)
    convert(tmp_path / "model.gguf", tmp_path / "hf")
    check_folder(tmp_path / "hf")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.tie_word_embeddings == tied
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-5, atol=1e-6)


def test_quantised_weights_come_out_within_their_rounding(tmp_path):
    reference = reference_model(tied=True)
    write_gguf(tmp_path / "model.gguf", reference, quantise=True)
    convert(tmp_path / "model.gguf", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, weight in reference.named_parameters():
        got = dict(model.named_parameters())[name]
        assert (got - weight).abs().max() <= weight.abs().max() / 127
    assert not torch.equal(_logits(model), _logits(reference))


def test_the_tokenizer_has_the_files_tokens_merges_and_special_roles(tmp_path):
    write_gguf(tmp_path / "model.gguf", reference_model(tied=True))
    convert(tmp_path / "model.gguf", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
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
