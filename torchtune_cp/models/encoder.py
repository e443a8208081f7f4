"""Masked language models: every token attends to every token, and masked ones are predicted."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtune_cp.attention import check_inside, is_distributed
from torchtune_cp.errors import UserError
from torchtune_cp.models.attention import MultiHeadAttention
from torchtune_cp.models.encoder_config import EncoderConfig
from torchtune_cp.models.mlp import GELUFeedForward
from torchtune_cp.models.rope import inverse_frequencies, rotary_cos_sin
from torchtune_cp.models.token_dropout import token_dropout_scale
from torchtune_cp.models.transformer import OutputFn


class EncoderLayer(nn.Module):
    """Attention and MLP, each after a layer norm and added to the residual stream.

    Args:
        config: The model's sizes.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.sa_norm = nn.LayerNorm(config.embed_dim, config.norm_eps)
        self.attn = MultiHeadAttention(config)
        self.mlp_norm = nn.LayerNorm(config.embed_dim, config.norm_eps)
        self.mlp = GELUFeedForward(config.embed_dim, config.intermediate_dim)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attn_mask: Tensor | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: `[batch, seq, embed_dim]`.
            rope: Cosine and sine from `rotary_cos_sin`.
            attn_mask: See `MultiHeadAttention.forward`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        return self.feed_forward(x + self.attn(self.sa_norm(x), rope, attn_mask))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply the layer's second half, which treats every token by itself.

        Args:
            x: `[batch, seq, embed_dim]`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        hidden: Tensor = x + self.mlp(self.mlp_norm(x))
        return hidden


class MaskedLMHead(nn.Module):
    """Dense layer, GELU, layer norm, then the embedding's weight and a bias of its own.

    Args:
        config: The model's sizes.
        tok_embeddings: The embedding whose weight is used, read at each call: sharding
            replaces the parameter object.
    """

    def __init__(self, config: EncoderConfig, tok_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(config.embed_dim, config.embed_dim)
        self.norm = nn.LayerNorm(config.embed_dim, config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        # In a tuple, so that the embedding is not registered as a child a second time.
        self._tied_to = (tok_embeddings,)

    @property
    def weight(self) -> Tensor:
        """The embedding's weight, `[vocab, embed_dim]`."""
        return self._tied_to[0].weight

    def forward(self, x: Tensor, output_fn: OutputFn | None = None) -> Any:
        """Project to the vocabulary.

        Args:
            x: `[batch, seq, embed_dim]`.
            output_fn: See `TransformerEncoder.forward`.

        Returns:
            Logits, `[batch, seq, vocab]`, or what `output_fn` returned.
        """
        x = self.norm(F.gelu(self.dense(x)))
        if output_fn is None:
            return F.linear(x, self.weight, self.bias)
        # The bias as the weight of one more feature that is always 1: losses take a weight only.
        return output_fn(
            F.pad(x, (0, 1), value=1.0), torch.cat((self.weight, self.bias.unsqueeze(1)), dim=1)
        )


class TransformerEncoder(nn.Module):
    """A masked language model; has parameters only, no buffers.

    Attributes:
        config: Sizes and switches.
        rope_frequencies: Radians per position of each rotated pair, `[head_dim / 2]`, fp32, on the
            CPU; None computes them. The published ESM-2 weights were trained with frequencies rounded
            to half precision and store those: computed ones would be another model, by up to 0.02
            radians per 100 tokens. No parameter and no buffer, so that it exists next to a model on the
            meta device and is never sharded or cast.

    Args:
        config: Sizes and switches.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_frequencies: Tensor | None = None
        self.tok_embeddings = nn.Embedding(
            config.vocab_size, config.embed_dim, padding_idx=config.pad_token_id
        )
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim, config.norm_eps)
        self.output = MaskedLMHead(config, self.tok_embeddings)

    def forward(
        self,
        tokens: Tensor,
        input_pos: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        token_dropout_scale: Tensor | None = None,
        output_fn: OutputFn | None = None,
    ) -> Any:
        """Run the model.

        Args:
            tokens: Token ids, `[batch, seq]`, int64.
            input_pos: Position of each token in its document, `[batch, seq]`, int64; None means 0 to
                seq - 1. Under context parallelism each rank gives the true positions of its tokens.
            attention_mask: `[batch, seq]`, True (or 1) for tokens, False (or 0) for padding, which no
                token sees. For whole rows on one device; under context parallelism padding is a
                document of its own instead.
            token_dropout_scale: From the function of that name, for the tokens given, `[batch, seq]`.
                Must be given where `tokens` is a slice of a sequence or holds several documents a row;
                None computes it, taking each row for one whole document.
            output_fn: Called with the hidden states before the output projection and its weight, in
                place of the projection: a chunked loss goes here. The projection's bias stands as
                the last column of the weight, `[vocab, embed_dim + 1]`, and the hidden states' last
                feature is 1, `[batch, seq, embed_dim + 1]`. It runs inside forward, while sharded
                weights are gathered.

        Returns:
            Logits, `[batch, seq, vocab]`, or what `output_fn` returned.

        Raises:
            UserError: `token_dropout_scale` is needed and missing, or the tokens belong to a context that
                has ended.
        """
        check_inside(tokens)
        real = None if attention_mask is None else attention_mask.bool()
        hidden = self._embed(tokens, real, token_dropout_scale)
        if input_pos is None:
            input_pos = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        frequencies = self.rope_frequencies
        if frequencies is None:
            frequencies = inverse_frequencies(self.config)
        rope = rotary_cos_sin(frequencies, input_pos, hidden.dtype)
        attn_mask = None if real is None else real[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, rope, attn_mask)
        return self.output(self.norm(hidden), output_fn)

    def _embed(self, tokens: Tensor, real: Tensor | None, scale: Tensor | None) -> Tensor:
        hidden: Tensor = self.tok_embeddings(tokens)
        if self.config.token_dropout:
            mask_id = self.config.mask_token_id
            if scale is None and is_distributed():
                raise UserError(
                    "the model has token dropout, whose scale cannot be computed inside context_parallel"
                    " from slices or packed documents: give token_dropout_scale, as batches of"
                    " MaskedLMCollator(..., mask_id=...) carry it"
                )
            if scale is None:
                scale = token_dropout_scale(tokens, mask_id, real=real)
            scale = scale.masked_fill(tokens == mask_id, 0.0)
            hidden = (hidden * scale.unsqueeze(-1)).to(hidden.dtype)
        if real is not None:
            hidden = hidden.masked_fill(~real.unsqueeze(-1), 0.0)
        return hidden
