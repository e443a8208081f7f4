"""Llama 3.2 text models: Llama 3.1 with a larger rope factor and tied embeddings."""

from torchtune_cp.models.llama3_1 import llama3_1
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["llama3_2", "llama3_2_1b", "llama3_2_3b"]


def llama3_2(
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
    scale_factor: float = 32,
    tie_word_embeddings: bool = True,
) -> TransformerDecoder:
    """Build a Llama 3.2 of any size; see `llama3_1` for the arguments."""
    return llama3_1(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        max_seq_len=max_seq_len,
        attn_dropout=attn_dropout,
        rope_base=rope_base,
        intermediate_dim=intermediate_dim,
        norm_eps=norm_eps,
        scale_factor=scale_factor,
        tie_word_embeddings=tie_word_embeddings,
    )


def llama3_2_1b(tie_word_embeddings: bool = True) -> TransformerDecoder:
    """Build Llama 3.2 1B."""
    return llama3_2(
        128_256,
        16,
        32,
        8,
        embed_dim=2048,
        max_seq_len=131_072,
        intermediate_dim=8192,
        tie_word_embeddings=tie_word_embeddings,
    )


def llama3_2_3b(tie_word_embeddings: bool = True) -> TransformerDecoder:
    """Build Llama 3.2 3B."""
    return llama3_2(
        128_256,
        28,
        24,
        8,
        embed_dim=3072,
        max_seq_len=131_072,
        intermediate_dim=8192,
        tie_word_embeddings=tie_word_embeddings,
    )
