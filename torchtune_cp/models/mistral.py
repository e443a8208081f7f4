"""Mistral 7B (https://arxiv.org/abs/2310.06825)."""

from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["mistral", "mistral_7b"]


def mistral(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000,
    head_dim: int | None = None,
    sliding_window: int | None = None,
) -> TransformerDecoder:
    """Build a Mistral of any size; see `build_decoder` for the arguments."""
    return build_decoder(
        "mistral",
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
        head_dim=head_dim,
        sliding_window=sliding_window,
    )


def mistral_7b() -> TransformerDecoder:
    """Build Mistral 7B v0.1 with full attention, as torchtune does.

    Its pretraining saw windows of 4,096 tokens: up to that length this is the pretrained model,
    beyond it training teaches the weights full attention. `auto_model` keeps the window. Versions
    0.2 and 0.3 have no window and another rotary base: build those with `auto_model`.
    """
    return mistral(32_000, 32, 32, 8, embed_dim=4096, intermediate_dim=14_336, max_seq_len=32_768)
