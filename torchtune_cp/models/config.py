"""The sizes and switches that describe a decoder; everything else about a model follows from them.

The protocols define what the shared blocks of decoders and encoders need from a config.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.values import is_number, require_sizes, shown, too_many_parameters

RopeScalingType = Literal["linear", "llama3"]


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the context of pretraining.

    Attributes:
        type: `linear` divides every frequency by `factor`. `llama3` divides only the frequencies
            whose wavelength is long against the original context, keeps the short ones, and blends
            between the two (Llama 3.1, https://arxiv.org/abs/2407.21783).
        factor: The stretch, at least 1.
        low_freq_factor: `llama3` only: wavelengths above `original_max_seq_len / low_freq_factor`
            tokens are stretched in full.
        high_freq_factor: `llama3` only: wavelengths below `original_max_seq_len / high_freq_factor`
            tokens are kept.
        original_max_seq_len: `llama3` only: the context of pretraining in tokens.
    """

    type: RopeScalingType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        """Refuse values that would give meaningless frequencies.

        Raises:
            ConfigError: If the factor is below 1, or the two llama3 factors are not in order.
        """
        wrong = [
            f"rope scaling: {name} is {shown(getattr(self, name))}, allowed is a number"
            for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
            if not is_number(getattr(self, name))
        ]
        if wrong:
            raise ConfigError(wrong)
        if self.factor < 1:
            raise ConfigError(f"rope scaling: factor is {self.factor}, allowed is 1 or more")
        if self.type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope scaling: low_freq_factor is {self.low_freq_factor} and high_freq_factor is "
                f"{self.high_freq_factor}, allowed is 0 < low_freq_factor < high_freq_factor"
            )
        if self.type == "llama3" and self.original_max_seq_len < 1:
            raise ConfigError(
                f"rope scaling: the original context is {self.original_max_seq_len} tokens, "
                "allowed is 1 or more"
            )


class RotarySizes(Protocol):
    """What rotary positions depend on; see `DecoderConfig`."""

    @property
    def head_dim(self) -> int:
        """See `DecoderConfig`."""
        ...

    @property
    def rope_base(self) -> float:
        """See `DecoderConfig`."""
        ...

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """See `DecoderConfig`."""
        ...


class AttentionSizes(RotarySizes, Protocol):
    """What an attention block is built from; see `DecoderConfig`."""

    @property
    def embed_dim(self) -> int:
        """See `DecoderConfig`."""
        ...

    @property
    def num_heads(self) -> int:
        """See `DecoderConfig`."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """See `DecoderConfig`."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """See `DecoderConfig`."""
        ...

    @property
    def output_bias(self) -> bool:
        """See `DecoderConfig`."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """See `DecoderConfig`."""
        ...

    @property
    def qk_norm(self) -> bool:
        """See `DecoderConfig`."""
        ...

    @property
    def norm_eps(self) -> float:
        """See `DecoderConfig`."""
        ...

    @property
    def is_causal(self) -> bool:
        """See `DecoderConfig`."""
        ...


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: RMS norm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
        family: Hugging Face's `model_type`: `llama`, `mistral`, `qwen2` or `qwen3`.
        vocab_size: Rows of the embedding and of the output projection.
        num_layers: Transformer layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of one head; need not be `embed_dim / num_heads`.
        embed_dim: Width of the residual stream.
        intermediate_dim: Hidden width of the MLP.
        max_seq_len: Longest context the weights were made for, in tokens. Not enforced: training
            beyond it is a normal thing to want.
        rope_base: Base of the rotary frequencies.
        rope_scaling: Stretch of the rotary frequencies, or None.
        norm_eps: Added to the mean square inside every RMS norm.
        tie_word_embeddings: The output projection uses the embedding's weight.
        qkv_bias: Biases on the query, key and value projections.
        output_bias: Bias on the attention's output projection.
        mlp_bias: Biases on the three MLP projections.
        qk_norm: RMS norm over each query and key head before the rotation.
        sliding_window: A token attends to itself and the `sliding_window - 1` tokens before it, in every
            layer; None for all earlier tokens.
        initializer_range: Standard deviation of the random initial weights.
        bos_token_id: Kept for `config.json`; the model does not use it.
        eos_token_id: As `bos_token_id`; some models have several.
        pad_token_id: As `bos_token_id`.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    intermediate_dim: int
    max_seq_len: int
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @property
    def is_causal(self) -> bool:
        """A token attends to itself and to earlier ones."""
        return True

    def __post_init__(self) -> None:
        """Check the sizes against each other.

        Raises:
            ConfigError: With every problem found, one line each.
        """
        require_sizes(self)
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}: "
                "num_kv_heads must divide num_heads"
            )
        if self.head_dim % 2:
            problems.append(
                f"head_dim is {self.head_dim}: rotary positions need an even head_dim "
                "(by default embed_dim / num_heads)"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            problems.append(
                f"sliding_window is {self.sliding_window}, allowed is 1 or more, or null for none"
            )
        width = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        per_layer = self.embed_dim * (width + 3 * self.intermediate_dim)
        problems += too_many_parameters(self.num_layers * per_layer)
        if problems:
            raise ConfigError(problems)
