"""Qwen 2 (https://arxiv.org/abs/2407.10671)."""

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.builders import build_decoder
from torchtune_cp.models.transformer import TransformerDecoder

__all__ = ["qwen2", "qwen2_0_5b", "qwen2_1_5b", "qwen2_7b"]


def qwen2(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
    head_dim: int | None = None,
    q_proj_bias: bool = True,
    k_proj_bias: bool = True,
    v_proj_bias: bool = True,
    q_norm: bool = False,
    k_norm: bool = False,
) -> TransformerDecoder:
    """Build a Qwen 2 or Qwen 2.5 of any size; see `build_decoder` for the arguments.

    The last five are torchtune's arguments: only their defaults make a Qwen 2.

    Raises:
        ConfigError: A size is impossible, or biases or norms are those of another family.
    """
    if not (q_proj_bias and k_proj_bias and v_proj_bias) or q_norm or k_norm:
        raise ConfigError(
            "q_proj_bias, k_proj_bias and v_proj_bias must be true, q_norm and k_norm false: with norms"
            " over the heads and without biases it is torchtune_cp.models.qwen3.qwen3"
        )
    return build_decoder(
        "qwen2",
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
        qkv_bias=True,
    )


def qwen2_0_5b() -> TransformerDecoder:
    """Build Qwen 2 0.5B."""
    return qwen2(151_936, 24, 14, 2, 896, 4864, 32_768, norm_eps=1e-6, tie_word_embeddings=True)


def qwen2_1_5b() -> TransformerDecoder:
    """Build Qwen 2 1.5B."""
    return qwen2(151_936, 28, 12, 2, 1536, 8960, 32_768, norm_eps=1e-6, tie_word_embeddings=True)


def qwen2_7b() -> TransformerDecoder:
    """Build Qwen 2 7B."""
    return qwen2(152_064, 28, 28, 4, 3584, 18_944, 32_768, norm_eps=1e-6)
