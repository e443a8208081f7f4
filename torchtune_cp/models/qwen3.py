"""Qwen 3 (https://arxiv.org/abs/2505.09388): norms over query and key heads, an independent head_dim.

Base and instruct models differ in the context length only.
"""

from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = [
    "qwen3",
    "qwen3_0_6b_base",
    "qwen3_0_6b_instruct",
    "qwen3_1_7b_base",
    "qwen3_1_7b_instruct",
    "qwen3_4b_base",
    "qwen3_4b_instruct",
    "qwen3_8b_base",
    "qwen3_8b_instruct",
    "qwen3_14b_base",
    "qwen3_14b_instruct",
    "qwen3_32b",
]

# num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim
_SIZES = {
    "0.6B": (28, 16, 8, 1024, 3072),
    "1.7B": (28, 16, 8, 2048, 6144),
    "4B": (36, 32, 8, 2560, 9728),
    "8B": (36, 32, 8, 4096, 12_288),
    "14B": (40, 40, 8, 5120, 17_408),
    "32B": (64, 64, 8, 5120, 25_600),
}
_TIED = ("0.6B", "1.7B", "4B")
_VOCAB_SIZE = 151_936
_BASE_CONTEXT = 32_768
_INSTRUCT_CONTEXT = 40_960


def qwen3(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
    head_dim: int | None = None,
    attention_bias: bool = False,
) -> TransformerDecoder:
    """Build a dense Qwen 3 of any size; see `build_decoder` for the arguments.

    `attention_bias` puts biases on all four projections of the attention.
    """
    return build_decoder(
        "qwen3",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        attn_dropout=attn_dropout,
        norm_eps=norm_eps,
        rope_base=rope_base,
        tie_word_embeddings=tie_word_embeddings,
        head_dim=head_dim,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )


def _build(size: str, max_seq_len: int) -> TransformerDecoder:
    return qwen3(
        _VOCAB_SIZE, *_SIZES[size], max_seq_len, head_dim=128, tie_word_embeddings=size in _TIED
    )


def qwen3_0_6b_base() -> TransformerDecoder:
    """Build Qwen 3 0.6B base."""
    return _build("0.6B", _BASE_CONTEXT)


def qwen3_0_6b_instruct() -> TransformerDecoder:
    """Build Qwen 3 0.6B instruct."""
    return _build("0.6B", _INSTRUCT_CONTEXT)


def qwen3_1_7b_base() -> TransformerDecoder:
    """Build Qwen 3 1.7B base."""
    return _build("1.7B", _BASE_CONTEXT)


def qwen3_1_7b_instruct() -> TransformerDecoder:
    """Build Qwen 3 1.7B instruct."""
    return _build("1.7B", _INSTRUCT_CONTEXT)


def qwen3_4b_base() -> TransformerDecoder:
    """Build Qwen 3 4B base."""
    return _build("4B", _BASE_CONTEXT)


def qwen3_4b_instruct() -> TransformerDecoder:
    """Build Qwen 3 4B instruct."""
    return _build("4B", _INSTRUCT_CONTEXT)


def qwen3_8b_base() -> TransformerDecoder:
    """Build Qwen 3 8B base."""
    return _build("8B", _BASE_CONTEXT)


def qwen3_8b_instruct() -> TransformerDecoder:
    """Build Qwen 3 8B instruct."""
    return _build("8B", _INSTRUCT_CONTEXT)


def qwen3_14b_base() -> TransformerDecoder:
    """Build Qwen 3 14B base."""
    return _build("14B", _BASE_CONTEXT)


def qwen3_14b_instruct() -> TransformerDecoder:
    """Build Qwen 3 14B instruct."""
    return _build("14B", _INSTRUCT_CONTEXT)


def qwen3_32b() -> TransformerDecoder:
    """Build Qwen 3 32B, which has no base version."""
    return _build("32B", _INSTRUCT_CONTEXT)
