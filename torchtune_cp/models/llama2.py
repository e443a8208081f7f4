"""Llama 2 (https://arxiv.org/abs/2307.09288)."""

from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["llama2", "llama2_7b", "llama2_13b", "llama2_70b"]


def llama2(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    intermediate_dim: int | None = None,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000.0,
) -> TransformerDecoder:
    """Build a Llama 2 of any size; see `build_decoder` for the arguments."""
    return build_decoder(
        "llama",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        max_seq_len=max_seq_len,
        attn_dropout=attn_dropout,
        intermediate_dim=intermediate_dim,
        norm_eps=norm_eps,
        rope_base=rope_base,
    )


def llama2_7b() -> TransformerDecoder:
    """Build Llama 2 7B."""
    return llama2(32_000, 32, 32, 32, embed_dim=4096, max_seq_len=4096, intermediate_dim=11_008)


def llama2_13b() -> TransformerDecoder:
    """Build Llama 2 13B."""
    return llama2(32_000, 40, 40, 40, embed_dim=5120, max_seq_len=4096, intermediate_dim=13_824)


def llama2_70b() -> TransformerDecoder:
    """Build Llama 2 70B."""
    return llama2(32_000, 80, 64, 8, embed_dim=8192, max_seq_len=4096, intermediate_dim=28_672)
