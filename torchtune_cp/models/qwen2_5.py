"""Qwen 2.5 (https://arxiv.org/abs/2412.15115): Qwen 2 in more sizes.

Base and instruct models differ in the context length and, from 14B up, in the norms' epsilon.
"""

from torchtune_cp.models.qwen2 import qwen2
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = [
    "qwen2_5_0_5b",
    "qwen2_5_1_5b_base",
    "qwen2_5_1_5b_instruct",
    "qwen2_5_3b",
    "qwen2_5_7b_base",
    "qwen2_5_7b_instruct",
    "qwen2_5_14b_base",
    "qwen2_5_14b_instruct",
    "qwen2_5_32b_base",
    "qwen2_5_32b_instruct",
    "qwen2_5_72b_base",
    "qwen2_5_72b_instruct",
]

# vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim
_SIZES = {
    "0.5B": (151_936, 24, 14, 2, 896, 4864),
    "1.5B": (151_936, 28, 12, 2, 1536, 8960),
    "3B": (151_936, 36, 16, 2, 2048, 11_008),
    "7B": (152_064, 28, 28, 4, 3584, 18_944),
    "14B": (152_064, 48, 40, 8, 5120, 13_824),
    "32B": (152_064, 64, 40, 8, 5120, 27_648),
    "72B": (152_064, 80, 64, 8, 8192, 29_568),
}
_TIED = ("0.5B", "1.5B", "3B")


def _build(size: str, max_seq_len: int = 32_768, norm_eps: float = 1e-6) -> TransformerDecoder:
    return qwen2(*_SIZES[size], max_seq_len, norm_eps=norm_eps, tie_word_embeddings=size in _TIED)


def qwen2_5_0_5b() -> TransformerDecoder:
    """Build Qwen 2.5 0.5B, base or instruct."""
    return _build("0.5B")


def qwen2_5_1_5b_base() -> TransformerDecoder:
    """Build Qwen 2.5 1.5B base."""
    return _build("1.5B", 131_072)


def qwen2_5_1_5b_instruct() -> TransformerDecoder:
    """Build Qwen 2.5 1.5B instruct."""
    return _build("1.5B")


def qwen2_5_3b() -> TransformerDecoder:
    """Build Qwen 2.5 3B, base or instruct."""
    return _build("3B")


def qwen2_5_7b_base() -> TransformerDecoder:
    """Build Qwen 2.5 7B base."""
    return _build("7B", 131_072)


def qwen2_5_7b_instruct() -> TransformerDecoder:
    """Build Qwen 2.5 7B instruct."""
    return _build("7B")


def qwen2_5_14b_base() -> TransformerDecoder:
    """Build Qwen 2.5 14B base."""
    return _build("14B", 131_072, norm_eps=1e-5)


def qwen2_5_14b_instruct() -> TransformerDecoder:
    """Build Qwen 2.5 14B instruct."""
    return _build("14B")


def qwen2_5_32b_base() -> TransformerDecoder:
    """Build Qwen 2.5 32B base."""
    return _build("32B", 131_072, norm_eps=1e-5)


def qwen2_5_32b_instruct() -> TransformerDecoder:
    """Build Qwen 2.5 32B instruct."""
    return _build("32B")


def qwen2_5_72b_base() -> TransformerDecoder:
    """Build Qwen 2.5 72B base."""
    return _build("72B", 131_072, norm_eps=1e-5)


def qwen2_5_72b_instruct() -> TransformerDecoder:
    """Build Qwen 2.5 72B instruct."""
    return _build("72B")
