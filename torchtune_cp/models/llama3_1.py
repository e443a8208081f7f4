"""Llama 3.1 (https://arxiv.org/abs/2407.21783): Llama 3 with scaled rotary frequencies."""

from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.config import RopeScaling
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["llama3_1", "llama3_1_8b", "llama3_1_70b", "llama3_1_405b"]


def llama3_1(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    rope_base: float = 500_000,
    intermediate_dim: int | None = None,
    norm_eps: float = 1e-5,
    scale_factor: float = 8,
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """Build a Llama 3.1 of any size; see `build_decoder` for the arguments.

    `scale_factor` is the stretch of the long rotary wavelengths against the 8,192 tokens of
    pretraining.
    """
    return build_decoder(
        "llama",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        max_seq_len=max_seq_len,
        attn_dropout=attn_dropout,
        rope_base=rope_base,
        rope_scaling=RopeScaling("llama3", factor=float(scale_factor)),
        intermediate_dim=intermediate_dim,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
    )


def llama3_1_8b() -> TransformerDecoder:
    """Build Llama 3.1 8B."""
    return llama3_1(
        128_256, 32, 32, 8, embed_dim=4096, max_seq_len=131_072, intermediate_dim=14_336
    )


def llama3_1_70b() -> TransformerDecoder:
    """Build Llama 3.1 70B."""
    return llama3_1(
        128_256, 80, 64, 8, embed_dim=8192, max_seq_len=131_072, intermediate_dim=28_672
    )


def llama3_1_405b() -> TransformerDecoder:
    """Build Llama 3.1 405B."""
    return llama3_1(
        128_256, 126, 128, 8, embed_dim=16_384, max_seq_len=131_072, intermediate_dim=53_248
    )
