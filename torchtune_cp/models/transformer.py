"""The decoder used by all families."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtune_cp.attention import check_inside
from torchtune_cp.models.attention import MultiHeadAttention
from torchtune_cp.models.config import DecoderConfig
from torchtune_cp.models.mlp import FeedForward
from torchtune_cp.models.norm import RMSNorm
from torchtune_cp.models.rope import inverse_frequencies, rotary_cos_sin

#: Makes something of the last hidden states `[batch, seq, embed_dim]` and the weight `[vocab, embed_dim]`.
OutputFn = Callable[[Tensor, Tensor], Any]


class TransformerLayer(nn.Module):
    """Attention and MLP, each after an RMS norm and added to the residual stream.

    Args:
        config: The model's sizes.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.sa_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attn = MultiHeadAttention(config)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp = FeedForward(config.embed_dim, config.intermediate_dim, config.mlp_bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Apply the layer.

        Args:
            x: `[batch, seq, embed_dim]`.
            rope: Cosine and sine from `rotary_cos_sin`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        return self.feed_forward(self.attend(x, rope))

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Apply the layer's first half, in which tokens interact.

        Args:
            x: `[batch, seq, embed_dim]`.
            rope: Cosine and sine from `rotary_cos_sin`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        hidden: Tensor = x + self.attn(self.sa_norm(x), rope)
        return hidden

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply the layer's second half, which treats every token by itself.

        Args:
            x: `[batch, seq, embed_dim]`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        hidden: Tensor = x + self.mlp(self.mlp_norm(x))
        return hidden


def _project(x: Tensor, weight: Tensor, output_fn: OutputFn | None) -> Any:
    return F.linear(x, weight) if output_fn is None else output_fn(x, weight)


class OutputProjection(nn.Linear):
    """The output projection, or what a function makes of its input and weight.

    The function is called inside this module's forward, so that sharding gathers the weight before
    and notices afterwards, as for any other module.

    Args:
        embed_dim: Width of the residual stream.
        vocab_size: Number of token ids.
    """

    def __init__(self, embed_dim: int, vocab_size: int) -> None:
        super().__init__(embed_dim, vocab_size, bias=False)

    def forward(self, x: Tensor, output_fn: OutputFn | None = None) -> Any:
        """Project to the vocabulary.

        Args:
            x: `[batch, seq, embed_dim]`.
            output_fn: See `TransformerDecoder.forward`.

        Returns:
            Logits, `[batch, seq, vocab]`, or what `output_fn` returned.
        """
        return _project(x, self.weight, output_fn)


class TiedOutput(nn.Module):
    """An output projection that uses the embedding's weight and has no parameter of its own.

    Args:
        tok_embeddings: The embedding whose weight is used, read at each call: sharding
            replaces the parameter object.
    """

    def __init__(self, tok_embeddings: nn.Embedding) -> None:
        super().__init__()
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
            output_fn: See `TransformerDecoder.forward`.

        Returns:
            Logits, `[batch, seq, vocab]`, or what `output_fn` returned.
        """
        return _project(x, self.weight, output_fn)


class TransformerDecoder(nn.Module):
    """A causal language model; has parameters only, no buffers.

    Args:
        config: Sizes and switches.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.embed_dim)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.output: OutputProjection | TiedOutput = (
            TiedOutput(self.tok_embeddings)
            if config.tie_word_embeddings
            else OutputProjection(config.embed_dim, config.vocab_size)
        )

    def untie_output(self) -> None:
        """Give a tied output projection a weight of its own, not initialised; before sharding."""
        tied_to = self.tok_embeddings.weight
        with torch.device(tied_to.device):
            self.output = OutputProjection(self.config.embed_dim, self.config.vocab_size)
        self.output.to(tied_to.dtype)
        self.config = replace(self.config, tie_word_embeddings=False)

    def forward(
        self,
        tokens: Tensor,
        input_pos: Tensor | None = None,
        *,
        output_fn: OutputFn | None = None,
    ) -> Any:
        """Run the model.

        Args:
            tokens: Token ids, `[batch, seq]`, int64.
            input_pos: Position of each token in its document, `[batch, seq]`, int64; None means 0 to
                seq - 1. Under context parallelism each rank gives the true positions of its tokens.
            output_fn: Called with the hidden states after the last norm, `[batch, seq, embed_dim]`,
                and the output weight, `[vocab, embed_dim]`, in place of the output projection: a
                chunked loss goes here and the whole logits never exist. It runs inside forward, while
                a sharded output weight is gathered.

        Returns:
            Logits, `[batch, seq, vocab]`, or what `output_fn` returned.

        Raises:
            UserError: The tokens belong to a context that has ended.
        """
        check_inside(tokens)
        hidden = self.tok_embeddings(tokens)
        if input_pos is None:
            input_pos = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        rope = rotary_cos_sin(inverse_frequencies(self.config), input_pos, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rope)
        return self.output(self.norm(hidden), output_fn)
