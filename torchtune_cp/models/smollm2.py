"""SmolLM2 (https://arxiv.org/abs/2502.02737): small Llamas with tied embeddings."""

from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["smollm2", "smollm2_1_7b", "smollm2_135m", "smollm2_360m"]


def smollm2(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_base: float = 100_000,
) -> TransformerDecoder:
    """Build a SmolLM2 of any size; see `build_decoder` for the arguments."""
    return build_decoder(
        "llama",
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
        tie_word_embeddings=True,
    )


def smollm2_135m() -> TransformerDecoder:
    """Build SmolLM2 135M, base or instruct."""
    return smollm2(49_152, 30, 9, 3, embed_dim=576, intermediate_dim=1536, max_seq_len=8192)


def smollm2_360m() -> TransformerDecoder:
    """Build SmolLM2 360M, base or instruct."""
    return smollm2(49_152, 32, 15, 5, embed_dim=960, intermediate_dim=2560, max_seq_len=8192)


def smollm2_1_7b() -> TransformerDecoder:
    """Build SmolLM2 1.7B, base or instruct."""
    return smollm2(
        49_152,
        24,
        32,
        32,
        embed_dim=2048,
        intermediate_dim=8192,
        max_seq_len=8192,
        rope_base=130_000,
    )
