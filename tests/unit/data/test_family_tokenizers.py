from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data import folders
from torchtune_cp import data
from torchtune_cp.data import Message
from torchtune_cp.errors import UserError

CHAT = [
    Message("system", "S", True),
    Message("user", "Q", True),
    Message("assistant", "A"),
    Message("user", "R", True),
    Message("assistant", "B"),
]
RENDERED = {
    "llama3_tokenizer": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
    ),
    "qwen2_5_tokenizer": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nR<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n"
    ),
    "llama2_tokenizer": (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A </s><s>[INST] R [/INST] B </s>"
    ),
    "mistral_tokenizer": "<s>[INST] S\n\nQ [/INST] A</s>[INST] R [/INST] B</s>",
}
RENDERED["qwen3_tokenizer"] = RENDERED["qwen2_5_tokenizer"]


def folder_for(name: str, path: Path) -> Path:
    if name in ("llama2_tokenizer", "mistral_tokenizer"):
        return folders.metaspace_folder(path)
    return folders.byte_level_folder(path)


@pytest.mark.parametrize("name", list(RENDERED))
def test_a_base_checkpoint_gets_the_familys_template(name: str, tmp_path: Path) -> None:
    folder = folder_for(name, tmp_path)
    tokenizer = getattr(data, name)(path=str(folder), max_seq_len=77)
    assert tokenizer.render_messages(CHAT) == RENDERED[name]
    assert tokenizer.max_seq_len == 77
    ids, mask = tokenizer.tokenize_messages(CHAT)
    trained = [token for token, masked in zip(ids, mask, strict=True) if not masked]
    text = tokenizer.decode(trained, skip_special_tokens=True)
    assert text.replace(" ", "") == "AB"


@pytest.mark.parametrize("name", list(RENDERED))
def test_the_folders_own_template_comes_first(name: str, tmp_path: Path) -> None:
    folder = folders.set_template(folder_for(name, tmp_path), "{{ messages[0].content }}!")
    assert getattr(data, name)(str(folder)).render_messages(CHAT) == "S!"


@pytest.mark.parametrize("name", list(RENDERED))
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = str(folder_for(name, tmp_path))
    build = getattr(data, name)
    with pytest.raises(UserError, match=r"tokenizer\.prompt_template='x' is not supported"):
        build(folder, prompt_template="x")
    with pytest.raises(UserError, match=r"truncation_type='left' is not supported"):
        build(folder, truncation_type="left")
    if name not in ("llama2_tokenizer", "mistral_tokenizer"):
        with pytest.raises(UserError, match=r"special_tokens_path='x' is not supported"):
            build(folder, special_tokens_path="x")


def test_torchtunes_qwen_config_with_vocab_and_merges_works(tmp_path: Path) -> None:
    folder = folders.byte_level_folder(tmp_path)
    tokenizer = data.qwen2_5_tokenizer(
        path=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt"), max_seq_len=None
    )
    assert tokenizer.encode("fox") == data.hf_tokenizer(folder).encode("fox")
