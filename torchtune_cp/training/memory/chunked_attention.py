"""Attention over one chunk of heads after another, so that few tensors of the whole slice exist.

A layer's first half makes queries, keys, values and the output of attention, each as long as the
sequence, and in backward the gradient of each. Heads are independent up to the output projection: done a
chunk at a time, all of these but the output are as large as a chunk (UPipe, arXiv 2602.21196, does so for
Ulysses; here it is for every method). The operations on single tokens, norm and projections, are computed in
tiles.

Shape legend: b batch, n tokens of a row on this rank, t = b n, e embedding, h query heads, g KV heads,
d elements of a head, c query heads of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from torchtune_cp.distributed.context_parallel.head_chunks import KeysAndValues
from torchtune_cp.distributed.context_parallel.heads import HeadChunks
from torchtune_cp.models.rope import rotate
from torchtune_cp.training.memory import tiling
from torchtune_cp.training.memory.gradient_sums import GradientSums

if TYPE_CHECKING:
    from torchtune_cp.models.transformer import TransformerDecoder, TransformerLayer

#: Tokens of a tile if `mlp_tile_tokens` is null.
TILE_TOKENS = 4096


class _Projection:
    """What makes the queries, keys or values of some heads from normed hidden states.

    Args:
        linear: That of all heads.
        part: Takes the heads' part, of several dimensions, out of dimension 0 of a parameter.
        norm: Of each head.
        rotated: Whether rotary positions are applied.
    """

    def __init__(
        self,
        linear: nn.Linear,
        part: Callable[[Tensor], Tensor],
        norm: nn.Module | None,
        *,
        rotated: bool,
    ) -> None:
        self._linear = linear
        weight = part(linear.weight).flatten(0, -2)
        self._part = {"weight": weight}
        if linear.bias is not None:
            self._part["bias"] = part(linear.bias).flatten()
        self._norm = norm
        self._rotated = rotated
        self.width = weight.size(0)

    def __call__(self, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[t, e] to [t, heads, d]."""
        # A call of the module, so that whoever follows modules (tune plan) sees this one at work.
        made: Tensor = functional_call(self._linear, self._part, (normed,))
        heads = made.unflatten(1, (-1, cos.size(-1)))
        if self._norm is not None:
            heads = self._norm(heads)
        return rotate(heads, cos, sin) if self._rotated else heads


class _ChunkedAttention:
    """The first half of a layer (norm, attention, residual), a chunk of heads at a time both ways.

    Args:
        layer: Whose half it is.
        heads: How they are divided.
        tile_tokens: Tokens that are projected at a time.
    """

    def __init__(self, layer: TransformerLayer, heads: HeadChunks, tile_tokens: int) -> None:
        self._layer = layer
        self._heads = heads
        self._tile_tokens = tile_tokens
        self._scale = layer.attn.head_dim**-0.5

    def _tiles(self, num_tokens: int) -> Iterator[slice]:
        return tiling.tiles(num_tokens, self._tile_tokens)

    def parameters(self) -> list[Tensor]:
        """The parameters as they are now (gathered)."""
        return [*self._layer.sa_norm.parameters(), *self._layer.attn.parameters()]

    # Outside of compiled graphs, as tiled MLPs are: the compiler cannot follow a gradient that is taken
    # in backward, and would unroll the loops.
    @torch.compiler.disable
    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Apply.

        Args:
            x: [b, n, e].
            rope: Cosine and sine, [b or 1, n, 1, d].

        Returns:
            [b, n, e].
        """
        if not torch.is_grad_enabled():
            return self.forward(x, *rope)[0]
        output: Tensor = _HalfLayer.apply(self, x, *rope, *self.parameters())
        return output

    # --- forward ----------------------------------------------------------------------------------

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute without autograd.

        Args:
            x: [b, n, e].
            cos: [b or 1, n, 1, d].
            sin: As `cos`.

        Returns:
            The half's output [b, n, e], that of attention [t, h, d], and each chunk's logsumexp.
        """
        attn, heads = self._layer.attn, self._heads
        tokens, rope = x.reshape(-1, x.size(-1)), self._rope_of_tokens(x, cos, sin)
        attended = tokens.new_empty(tokens.size(0), attn.q_proj.out_features).unflatten(
            1, (-1, attn.head_dim)
        )
        logsumexps = []
        for kv_chunk in range(heads.kv_chunks):
            kv: KeysAndValues | None = None
            for chunk in range(kv_chunk * heads.uses, (kv_chunk + 1) * heads.uses):
                query, *kv_parts = self._project(tokens, rope, chunk, None if kv else kv_chunk)
                if kv is None:
                    kv = KeysAndValues(kv_parts[0], kv_parts[1], heads.uses, heads.ranks, attn.mask)
                del kv_parts
                out, logsumexp = kv.attend(query, self._scale)
                _write(heads.queries(attended, chunk, 1), out)
                logsumexps.append(logsumexp)
                del query, out
        output = x.new_empty(x.shape)
        rows = output.view(tokens.shape)
        for tile in self._tiles(tokens.size(0)):
            torch.add(tokens[tile], attn.output_proj(attended[tile].flatten(1)), out=rows[tile])
        return output, attended, logsumexps

    def _rope_of_tokens(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all rows laid end to end, [t, 1, d]."""
        rows = x.size(0)
        whole = [angle.expand(rows, *angle.shape[1:]).flatten(0, 1) for angle in (cos, sin)]
        return whole[0], whole[1]

    def _project(
        self, tokens: Tensor, rope: tuple[Tensor, Tensor], chunk: int, kv_chunk: int | None
    ) -> list[Tensor]:
        """Make the queries of a chunk, [1, c, t, d], and of a chunk of KV heads keys and values."""
        attn, heads = self._layer.attn, self._heads
        made_by = [
            _Projection(
                attn.q_proj, lambda p: heads.queries(p, chunk, 0), attn.q_norm, rotated=True
            )
        ]
        if kv_chunk is not None:
            keys = partial(heads.keys, chunk=kv_chunk, dim=0)
            made_by.append(_Projection(attn.k_proj, keys, attn.k_norm, rotated=True))
            made_by.append(_Projection(attn.v_proj, keys, None, rotated=False))
        made = [
            tokens.new_empty(tokens.size(0), projection.width).unflatten(1, (-1, attn.head_dim))
            for projection in made_by
        ]
        for tile in self._tiles(tokens.size(0)):
            normed = self._layer.sa_norm(tokens[tile])
            for projection, whole in zip(made_by, made, strict=True):
                whole[tile] = projection(normed, rope[0][tile], rope[1][tile])
        return [_heads_first(whole) for whole in made]

    # --- backward ---------------------------------------------------------------------------------

    def backward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attended: Tensor,
        logsumexps: list[Tensor],
        grad: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute queries, keys and values again, a chunk at a time, and take all gradients.

        Args:
            x: [b, n, e], as given to the call.
            cos: Likewise.
            sin: Likewise.
            attended: From `forward`; overwritten with the gradients of the queries.
            logsumexps: From there.
            grad: [b, n, e], of the output.

        Returns:
            The gradients of `x` and of `parameters`.
        """
        tokens, rope = x.reshape(-1, x.size(-1)), self._rope_of_tokens(x, cos, sin)
        grad = grad.reshape(tokens.shape)
        parameters = self.parameters()
        sums = GradientSums(parameters)
        place = {id(p): index for index, p in enumerate(parameters)}
        last = self._layer.attn.output_proj
        for tile in self._tiles(tokens.size(0)):
            sums.add(place[id(last.weight)], grad[tile].t() @ attended[tile].flatten(1))
            if last.bias is not None:
                sums.add(place[id(last.bias)], grad[tile].sum(0))
        grad_key, grad_value = self._attention_gradients(tokens, rope, attended, logsumexps, grad)
        # [b, n, e] of its own: a gradient that is a view of something is not freed with it.
        grad_x = x.new_empty(x.shape)
        rows = grad_x.view(tokens.shape)
        made = (attended, grad_key, grad_value)
        for tile in self._tiles(tokens.size(0)):
            part = self._projection_gradients(
                tokens[tile],
                (rope[0][tile], rope[1][tile]),
                [whole[tile] for whole in made],
                sums,
                place,
            )
            torch.add(part, grad[tile], out=rows[tile])  # the latter along the residual
        return grad_x, list(sums.take())

    def _attention_gradients(
        self,
        tokens: Tensor,
        rope: tuple[Tensor, Tensor],
        attended: Tensor,
        logsumexps: list[Tensor],
        grad: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Give those of keys and values, [t, g, d], and put those of the queries into `attended`."""
        attn, heads = self._layer.attn, self._heads
        kv_heads = attn.k_proj.out_features // attn.head_dim
        grad_key, grad_value = (
            tokens.new_empty(tokens.size(0), kv_heads, attn.head_dim) for _ in range(2)
        )
        for kv_chunk in range(heads.kv_chunks):
            kv: KeysAndValues | None = None
            for chunk in range(kv_chunk * heads.uses, (kv_chunk + 1) * heads.uses):
                query, *kv_parts = self._project(tokens, rope, chunk, None if kv else kv_chunk)
                if kv is None:
                    kv = KeysAndValues(kv_parts[0], kv_parts[1], heads.uses, heads.ranks, attn.mask)
                del kv_parts
                columns = heads.queries(attn.output_proj.weight, chunk, 1).flatten(1, 2)
                grad_out = (grad @ columns).unflatten(1, (-1, attn.head_dim))
                place = heads.queries(attended, chunk, 1)
                grad_query, grads = kv.gradients(
                    _heads_first(grad_out),
                    query,
                    _heads_first(place.flatten(1, 2)),
                    logsumexps[chunk],
                    self._scale,
                )
                del query, grad_out
                # What attention gave for these heads is not needed any more.
                _write(place, grad_query)
                if grads is not None:
                    _write(heads.keys(grad_key, kv_chunk, 1), grads[0])
                    _write(heads.keys(grad_value, kv_chunk, 1), grads[1])
                del grad_query, grads
        return grad_key, grad_value

    def _projection_gradients(
        self,
        tokens: Tensor,
        rope: tuple[Tensor, Tensor],
        grads: list[Tensor],
        sums: GradientSums,
        place: dict[int, int],
    ) -> Tensor:
        """Give the gradient of a tile's tokens from those of its queries, keys and values."""
        attn = self._layer.attn
        turned_back = rope[0], -rope[1]
        tokens = tokens.detach().requires_grad_()
        with torch.enable_grad():
            normed = self._layer.sa_norm(tokens)
        input_ = normed.detach()
        grad_normed: Tensor | None = None
        for linear, norm, grad in zip(
            (attn.q_proj, attn.k_proj, attn.v_proj),
            (attn.q_norm, attn.k_norm, None),
            grads,
            strict=True,
        ):
            if linear is not attn.v_proj:
                grad = rotate(grad, *turned_back)
            if norm is not None:
                heads = linear(input_).unflatten(1, (-1, attn.head_dim)).detach().requires_grad_()
                with torch.enable_grad():
                    part = norm(heads)
                grad, of_scale = torch.autograd.grad(part, (heads, norm.scale), grad)
                sums.add(place[id(norm.scale)], of_scale)
            flat = grad.flatten(1)
            sums.add(place[id(linear.weight)], flat.t() @ input_)
            if linear.bias is not None:
                sums.add(place[id(linear.bias)], flat.sum(0))
            part = flat @ linear.weight
            grad_normed = part if grad_normed is None else grad_normed.add_(part)
        assert grad_normed is not None
        scale = self._layer.sa_norm.scale
        of_tokens, of_scale = torch.autograd.grad(normed, (tokens, scale), grad_normed)
        sums.add(place[id(scale)], of_scale)
        return of_tokens


def _heads_first(tokens_first: Tensor) -> Tensor:
    """[t, heads, d] as [1, heads, t, d]."""
    return tokens_first.transpose(0, 1)[None]


def _write(place: Tensor, heads_first: Tensor) -> None:
    """Put [1, heads, t, d] into a view [t, ranks, heads / ranks, d] of a larger tensor."""
    place.copy_(heads_first[0].transpose(0, 1).unflatten(1, place.shape[1:3]))


class _HalfLayer(torch.autograd.Function):
    """The half in autograd: what it saves, and that it gives gradients once; see `_ChunkedAttention`."""

    @staticmethod
    def forward(
        ctx: Any, half: _ChunkedAttention, x: Tensor, cos: Tensor, sin: Tensor, *_parameters: Tensor
    ) -> Tensor:
        output, attended, logsumexps = half.forward(x, cos, sin)
        ctx.save_for_backward(x, cos, sin, attended, *logsumexps)
        ctx.half = half
        ctx.done = False
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise RuntimeError(
                "backward ran a second time through a layer with attention_head_chunks, whose first backward"
                " puts gradients where the output of attention was: leave out retain_graph=True, or set"
                " attention_head_chunks=null"
            )
        ctx.done = True
        x, cos, sin, attended, *logsumexps = ctx.saved_tensors
        grad_x, grad_parameters = ctx.half.backward(x, cos, sin, attended, logsumexps, grad)
        return None, grad_x, None, None, *grad_parameters


def apply_chunked_attention(
    model: TransformerDecoder, heads: HeadChunks, tile_tokens: int | None = None
) -> None:
    """Compute the first half of every layer (norm, attention, residual) a chunk of heads at a time.

    Such a half keeps its input, the output of attention and its logsumexp for backward, which makes
    queries, keys and values of a chunk again. Forward and backward must run inside
    `context_parallel(..., options=ContextParallelOptions(head_chunks=heads))`, also on a single rank. Call it
    before activation checkpointing.

    Args:
        model: A model with `layers`; may be on the meta device. Without tensor parallelism and float8.
        heads: How its heads are divided.
        tile_tokens: Tokens that are normed and projected at a time, counted along the sequence of this
            rank; None = `TILE_TOKENS`.
    """
    for module in model.layers:
        layer: Any = module
        layer.attend = _ChunkedAttention(layer, heads, tile_tokens or TILE_TOKENS)
