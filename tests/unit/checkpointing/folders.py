"""Small Hugging Face folders, written by transformers, to read back."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save_llama(
    folder: Path,
    *,
    tied: bool = False,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A random two-layer llama, saved by transformers (two shards or more with "40KB")."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
