"""Shared code of the families' builders: defaults, checks, and the decoder."""

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.config import DecoderConfig, RopeScaling
from torchtune_cp.models.mlp import scale_hidden_dim_for_mlp
from torchtune_cp.models.transformer import TransformerDecoder
from torchtune_cp.models.values import is_number, is_whole, shown


def build_decoder(
    family: str,
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    embed_dim: int,
    max_seq_len: int,
    attn_dropout: float,
    norm_eps: float,
    rope_base: float,
    intermediate_dim: int | None = None,
    head_dim: int | None = None,
    rope_scaling: RopeScaling | None = None,
    tie_word_embeddings: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
) -> TransformerDecoder:
    """Fill in the defaults that depend on other sizes, check, and build.

    Args:
        family: Hugging Face's `model_type`.
        vocab_size: See `DecoderConfig`, as all that follow unless said otherwise.
        num_layers: Transformer layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; None means `num_heads`.
        embed_dim: Width of the residual stream.
        max_seq_len: Context of the weights in tokens.
        attn_dropout: Must be 0: attention over a sequence that is spread over ranks has no dropout.
        norm_eps: Added to the mean square inside every RMS norm.
        rope_base: Base of the rotary frequencies.
        intermediate_dim: Hidden width of the MLP; None means `scale_hidden_dim_for_mlp(embed_dim)`.
        head_dim: Width of one head; None means `embed_dim / num_heads`.
        rope_scaling: Stretch of the rotary frequencies.
        tie_word_embeddings: Output projection with the embedding's weight.
        qkv_bias: Biases on query, key and value projections.
        output_bias: Bias on the attention's output projection.
        qk_norm: RMS norm over each query and key head.
        sliding_window: Window of the pretrained attention.

    Returns:
        The model, on the device of the surrounding `torch.device(...)` context.

    Raises:
        ConfigError: If a size is impossible, naming the argument.
    """
    if attn_dropout != 0.0:
        raise ConfigError(
            f"attn_dropout is {attn_dropout}, allowed is 0.0: attention that is distributed along "
            "the sequence has no dropout"
        )
    if not is_whole(embed_dim):
        raise ConfigError(f"embed_dim is {shown(embed_dim)}, allowed is an integer from 1 on")
    if head_dim is None:
        if not is_whole(num_heads) or num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"num_heads is {shown(num_heads)} and embed_dim is {embed_dim}: num_heads must divide "
                "embed_dim unless head_dim is given"
            )
        head_dim = embed_dim // num_heads
    return TransformerDecoder(
        DecoderConfig(
            family=family,
            vocab_size=vocab_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            embed_dim=embed_dim,
            intermediate_dim=(
                scale_hidden_dim_for_mlp(embed_dim)
                if intermediate_dim is None
                else intermediate_dim
            ),
            max_seq_len=max_seq_len,
            rope_base=float(rope_base) if is_number(rope_base) else rope_base,
            rope_scaling=rope_scaling,
            norm_eps=norm_eps,
            tie_word_embeddings=tie_word_embeddings,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
            sliding_window=sliding_window,
        )
    )
