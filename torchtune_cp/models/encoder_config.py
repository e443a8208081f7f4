"""The sizes and switches that describe a masked language model such as ESM-2."""

from dataclasses import dataclass

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.config import RopeScaling
from torchtune_cp.models.values import is_whole, require_sizes, shown, too_many_parameters


@dataclass(frozen=True)
class EncoderConfig:
    """A bidirectional transformer: layer norm, rotary positions, GELU, tied masked-LM head.

    All projections have biases. The output projection is the embedding's weight with a bias of its
    own.

    Attributes:
        family: Hugging Face's `model_type`: `esm`.
        vocab_size: Rows of the embedding.
        num_layers: Transformer layers.
        num_heads: Attention heads; divides `embed_dim`.
        embed_dim: Width of the residual stream.
        intermediate_dim: Hidden width of the MLP.
        max_seq_len: Hugging Face's `max_position_embeddings`; nothing depends on it, rotary positions
            have no end.
        rope_base: Base of the rotary frequencies.
        norm_eps: Added to the variance inside every layer norm.
        token_dropout: Zero the embeddings of mask tokens and rescale the others, see
            `token_dropout_scale`.
        mask_token_id: The mask token.
        pad_token_id: The padding token; its embedding gets no gradient as an input.
        bos_token_id: Kept for `config.json`; the model does not use it.
        eos_token_id: As `bos_token_id`.
        initializer_range: Standard deviation of the random initial weights.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    intermediate_dim: int
    max_seq_len: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    token_dropout: bool = True
    mask_token_id: int = 32
    pad_token_id: int = 1
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Check the sizes against each other.

        Raises:
            ConfigError: With every problem found, one line each.
        """
        require_sizes(self)
        problems = [
            f"{name} is {shown(getattr(self, name))}, allowed is 0 to vocab_size - 1 = {self.vocab_size - 1}"
            for name in ("mask_token_id", "pad_token_id")
            if not (is_whole(value := getattr(self, name)) and 0 <= value < self.vocab_size)
        ]
        if self.embed_dim % (2 * self.num_heads):
            problems.append(
                f"num_heads is {self.num_heads} and embed_dim is {self.embed_dim}: rotary positions "
                "need heads of an even width, so 2 x num_heads must divide embed_dim"
            )
        per_layer = self.embed_dim * (4 * self.embed_dim + 2 * self.intermediate_dim)
        problems += too_many_parameters(self.num_layers * per_layer)
        if problems:
            raise ConfigError(problems)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embed_dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Every head has keys and values of its own."""
        return self.num_heads

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """The rotary frequencies are not stretched."""
        return None

    @property
    def qkv_bias(self) -> bool:
        """Query, key and value projections have biases."""
        return True

    @property
    def output_bias(self) -> bool:
        """The attention's output projection has a bias."""
        return True

    @property
    def qk_norm(self) -> bool:
        """Query and key heads are not normalised."""
        return False

    @property
    def sliding_window(self) -> int | None:
        """Attention has no window."""
        return None

    @property
    def is_causal(self) -> bool:
        """Every token attends to every token."""
        return False

    @property
    def tie_word_embeddings(self) -> bool:
        """The output projection is the embedding's weight."""
        return True
