"""Llama 3 (https://arxiv.org/abs/2407.21783)."""

from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["llama3", "llama3_8b", "llama3_70b"]


def llama3(
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
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """Build a Llama 3 of any size; see `build_decoder` for the arguments."""
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
        intermediate_dim=intermediate_dim,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
    )


def llama3_8b() -> TransformerDecoder:
    """Build Llama 3 8B."""
    return llama3(128_256, 32, 32, 8, embed_dim=4096, max_seq_len=8192, intermediate_dim=14_336)


def llama3_70b() -> TransformerDecoder:
    """Build Llama 3 70B."""
    return llama3(128_256, 80, 64, 8, embed_dim=8192, max_seq_len=8192, intermediate_dim=28_672)
