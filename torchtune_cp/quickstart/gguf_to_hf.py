"""Converts a GGUF file of the llama architecture to a Hugging Face folder.

GGUF is llama.cpp's format: one file with metadata, tokenizer and (often quantised) weights
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The weights are dequantised, so the
model can be fine-tuned; the tokenizer is rebuilt as a ``tokenizer.json``.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtune_cp.checkpointing.hf_safetensors import save_hf_folder
from torchtune_cp.errors import UserError

# llama.cpp's name of a tensor: Hugging Face's. "{}" is the layer.
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# How the text is cut before byte-pair merging, by llama.cpp's name: whether every digit stands
# alone.
_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False, "default": False}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched as a whole


def _metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _need(metadata: Mapping[str, Any], key: str, source: Path) -> Any:
    if key not in metadata:
        raise UserError(f"{source} has no {key}: it is not a complete model")
    return metadata[key]


def hf_name(gguf_name: str) -> str:
    """Give Hugging Face's name for llama.cpp's name of a llama model's tensor.

    Raises:
        UserError: There is no such tensor in a plain llama model.
    """
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    parts = gguf_name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
    raise UserError(
        f"tensor {gguf_name} does not belong to a plain llama model: cannot be converted"
    )


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the rows of a query or key projection.

    Rotary embeddings turn pairs of features. llama.cpp keeps the two of a pair next to each other
    (0, 1, 2, 3 ...); Hugging Face keeps the first halves of all pairs before the second halves.

    Args:
        weight: ``[num_heads * head_dim, dim]`` in llama.cpp's order.
        num_heads: Heads of this projection (key heads for the key projection).

    Returns:
        The same rows in Hugging Face's order.
    """
    rows, dim = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, dim)
    return pairs.transpose(1, 2).reshape(rows, dim).contiguous()


def model_config(metadata: Mapping[str, Any], source: Path, *, tied: bool) -> dict[str, Any]:
    """Build ``config.json`` from a GGUF file's metadata.

    Args:
        metadata: Key to value.
        source: The file, for messages.
        tied: Whether the output projection is the embedding.

    Raises:
        UserError: The model is not a plain llama model.
    """
    architecture = _need(metadata, "general.architecture", source)
    if architecture != "llama":
        raise UserError(f"{source} holds a {architecture!r} model; only llama can be converted")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"{source} uses rope scaling {scaling!r}, which cannot be converted")
    dim = _need(metadata, "llama.embedding_length", source)
    heads = _need(metadata, "llama.attention.head_count", source)
    head_dim = metadata.get("llama.attention.key_length", dim // heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{source} rotates only a part of each head, which cannot be converted")
    # GGUF keeps a 32-bit float: 1e-5 reads 9.9999997e-06.
    eps = float(f"{_need(metadata, 'llama.attention.layer_norm_rms_epsilon', source):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_need(metadata, "tokenizer.ggml.tokens", source)),
        "hidden_size": dim,
        "intermediate_size": _need(metadata, "llama.feed_forward_length", source),
        "num_hidden_layers": _need(metadata, "llama.block_count", source),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _need(metadata, "llama.context_length", source),
        "rms_norm_eps": eps,
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def write_tokenizer(metadata: Mapping[str, Any], source: Path, folder: Path) -> list[Path]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for a byte-level BPE tokenizer.

    Args:
        metadata: The GGUF file's metadata.
        source: The file, for messages.
        folder: Where to write.

    Returns:
        The files written.

    Raises:
        UserError: The tokenizer is of another kind.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = _need(metadata, "tokenizer.ggml.model", source)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{source} has a tokenizer of kind {kind!r}/{pre!r}; only gpt2 with "
            f"{', '.join(_PRE_TOKENIZERS)} can be converted"
        )
    tokens = _need(metadata, "tokenizer.ggml.tokens", source)
    types = _need(metadata, "tokenizer.ggml.token_type", source)
    pairs = (merge.split(" ") for merge in _need(metadata, "tokenizer.ggml.merges", source))
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[(left, right) for left, right in pairs],
    )
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if _PRE_TOKENIZERS[pre]
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = {
        index: AddedToken(tokens[index], special=kind == _CONTROL, normalized=False)
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    }
    for token in added.values():
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer_json = folder / "tokenizer.json"
    tokenizer.save(str(tokenizer_json))

    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; the model-specific ones rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _need(metadata, "llama.context_length", source),
        "added_tokens_decoder": {
            str(index): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for index, token in added.items()
        },
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config.write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return [tokenizer_json, tokenizer_config]


def convert(source: str | Path, folder: str | Path) -> Path:
    """Convert a GGUF file to a Hugging Face folder with fp32 weights.

    Tensors are dequantised one after another. The folder appears under its name only when complete.

    Args:
        source: The ``.gguf`` file.
        folder: The folder to write.

    Returns:
        The folder.

    Raises:
        UserError: The file is damaged, or its model or tokenizer is of another kind.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise UserError(
            "converting a GGUF file needs the package gguf: pip install 'torchtune_cp[quickstart]'"
        ) from error

    source = Path(source)
    try:
        reader = GGUFReader(source)
        metadata = _metadata(reader)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"{source} is not a readable GGUF file ({error})") from error
    tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
    config = model_config(metadata, source, tied="lm_head.weight" not in tensors)
    heads = {
        "q_proj": int(config["num_attention_heads"]),
        "k_proj": int(config["num_key_value_heads"]),
    }

    def get_full(name: str) -> torch.Tensor:
        tensor = tensors[name]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        projection = name.split(".")[-2]
        return unpermute(weight, heads[projection]) if projection in heads else weight

    # GGUF gives the innermost dimension first.
    shapes = {name: tuple(map(int, reversed(t.shape))) for name, t in tensors.items()}
    with tempfile.TemporaryDirectory() as scratch:
        save_hf_folder(
            shapes,
            get_full,
            folder,
            config={key: value for key, value in config.items() if value is not None},
            dtype=torch.float32,
            extra_files=write_tokenizer(metadata, source, Path(scratch)),
        )
    return Path(folder)
