"""ESM-2 (https://doi.org/10.1126/science.ade2574), protein masked language models."""

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.encoder import TransformerEncoder
from torchtune_cp.models.encoder_config import EncoderConfig

__all__ = ["esm2", "esm2_3b", "esm2_8m", "esm2_15b", "esm2_35m", "esm2_150m", "esm2_650m"]

# num_layers, embed_dim, num_heads
_SIZES = {
    "8M": (6, 320, 20),
    "35M": (12, 480, 20),
    "150M": (30, 640, 20),
    "650M": (33, 1280, 20),
    "3B": (36, 2560, 40),
    "15B": (48, 5120, 40),
}


def esm2(
    vocab_size: int = 33,
    num_layers: int = 6,
    num_heads: int = 20,
    embed_dim: int = 320,
    intermediate_dim: int | None = None,
    max_seq_len: int = 1026,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000.0,
    token_dropout: bool = True,
    mask_token_id: int = 32,
    pad_token_id: int = 1,
    initializer_range: float = 0.02,
) -> TransformerEncoder:
    """Build an ESM-2 of any size; the defaults are those of the smallest published one.

    Args:
        vocab_size: The ESM alphabet has 33 tokens.
        num_layers: Transformer layers.
        num_heads: Attention heads.
        embed_dim: Width of the residual stream.
        intermediate_dim: Hidden width of the MLP; None means 4 x `embed_dim`.
        max_seq_len: See `EncoderConfig`.
        attn_dropout: Must be 0: attention over a sequence that is split over ranks does not support dropout.
        norm_eps: Added to the variance inside every layer norm.
        rope_base: Base of the rotary frequencies.
        token_dropout: See `EncoderConfig`.
        mask_token_id: The mask token.
        pad_token_id: The padding token.
        initializer_range: Standard deviation of random initial weights. The default suits the published
            widths; with it the attention of narrow models (64 or 128 features) hardly learns: use about `1
            / sqrt(embed_dim)` for them.

    Returns:
        The model, on the device of the surrounding `torch.device(...)` context.

    Raises:
        ConfigError: A size is invalid; the message names the argument.
    """
    if attn_dropout != 0.0:
        raise ConfigError(
            f"attn_dropout is {attn_dropout}, allowed is 0.0: attention that is distributed along "
            "the sequence has no dropout"
        )
    return TransformerEncoder(
        EncoderConfig(
            family="esm",
            vocab_size=vocab_size,
            num_layers=num_layers,
            num_heads=num_heads,
            embed_dim=embed_dim,
            intermediate_dim=4 * embed_dim if intermediate_dim is None else intermediate_dim,
            max_seq_len=max_seq_len,
            rope_base=float(rope_base),
            norm_eps=norm_eps,
            token_dropout=token_dropout,
            mask_token_id=mask_token_id,
            pad_token_id=pad_token_id,
            initializer_range=initializer_range,
        )
    )


def _build(size: str) -> TransformerEncoder:
    num_layers, embed_dim, num_heads = _SIZES[size]
    return esm2(num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads)


def esm2_8m() -> TransformerEncoder:
    """Build ESM-2 8M (`facebook/esm2_t6_8M_UR50D`)."""
    return _build("8M")


def esm2_35m() -> TransformerEncoder:
    """Build ESM-2 35M (`facebook/esm2_t12_35M_UR50D`)."""
    return _build("35M")


def esm2_150m() -> TransformerEncoder:
    """Build ESM-2 150M (`facebook/esm2_t30_150M_UR50D`)."""
    return _build("150M")


def esm2_650m() -> TransformerEncoder:
    """Build ESM-2 650M (`facebook/esm2_t33_650M_UR50D`)."""
    return _build("650M")


def esm2_3b() -> TransformerEncoder:
    """Build ESM-2 3B (`facebook/esm2_t36_3B_UR50D`)."""
    return _build("3B")


def esm2_15b() -> TransformerEncoder:
    """Build ESM-2 15B (`facebook/esm2_t48_15B_UR50D`)."""
    return _build("15B")
