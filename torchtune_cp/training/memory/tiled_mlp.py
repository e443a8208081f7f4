"""The MLP in tiles along the sequence, so that its intermediates stay small.

An MLP processes every token independently, so nothing requires computing all tokens at once. At long
sequences its intermediates (six tensors of the hidden width in backward) are a layer's largest; cut into
tiles they are those of one tile (ALST's TiledMLP, arXiv 2506.13996, section 3.3).

Shape legend: b batch, n tokens of this rank, t tokens of a tile, d embedding, h hidden width of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchtune_cp.training.memory import tiling
from torchtune_cp.training.memory.gradient_sums import GradientSums

if TYPE_CHECKING:
    from torchtune_cp.models import LanguageModel
    from torchtune_cp.models.encoder import EncoderLayer
    from torchtune_cp.models.transformer import TransformerLayer


class _TiledFeedForward:
    """The second half of a layer (norm, MLP, residual), a tile at a time in both directions.

    Args:
        layer: Whose half it is.
        tile_tokens: t.
    """

    def __init__(self, layer: TransformerLayer | EncoderLayer, tile_tokens: int) -> None:
        self._layer = layer
        self._untiled = layer.feed_forward
        self._tile_tokens = tile_tokens

    def _tiles(self, num_tokens: int) -> Iterator[slice]:
        return tiling.tiles(num_tokens, self._tile_tokens)

    def parameters(self) -> list[Tensor]:
        """The parameters as they are now (gathered), those of the last projection at the end."""
        mlp = self._layer.mlp
        first = [part for part in mlp.children() if part is not mlp.w2]
        parts: list[nn.Module] = [self._layer.mlp_norm, *first, mlp.w2]
        return [p for part in parts for p in part.parameters()]

    # Outside of compiled graphs: the compiler cannot follow a gradient that is taken in backward, and
    # would unroll the loop, once per length.
    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        """Apply.

        Args:
            x: [b, n, d].

        Returns:
            [b, n, d].
        """
        if not torch.is_grad_enabled():
            return self._forward(x)
        # The input is handed to autograd BEFORE the output is computed. It is all that backward needs, so
        # a recomputing checkpoint, which stops when it has recomputed what was saved, stops here: under
        # activation checkpointing the MLP is computed as often as without tiles.
        token: Tensor = _Keep.apply(x, self, *self.parameters())
        with torch.no_grad():
            output = self._forward(x)
        attached: Tensor = _Attach.apply(token, output)
        return attached

    def _forward(self, x: Tensor) -> Tensor:
        output = torch.empty_like(x)
        for tile in self._tiles(x.size(1)):
            output[:, tile] = self._untiled(x[:, tile])
        return output

    def backward(self, x: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute each tile again and take its gradients.

        Args:
            x: [b, n, d], as given to the call.
            grad: [b, n, d], of the output.

        Returns:
            The gradients of `x` and of `parameters`.
        """
        parameters = self.parameters()
        sums = GradientSums(parameters)
        grad_x = torch.empty_like(x)
        for tile in self._tiles(x.size(1)):
            part = x[:, tile].detach().requires_grad_()
            grad_x[:, tile] = self._tile_gradients(part, grad[:, tile], parameters, sums)
        return grad_x, list(sums.take())

    def _tile_gradients(
        self, x: Tensor, grad: Tensor, parameters: list[Tensor], sums: GradientSums
    ) -> Tensor:
        layer, last = self._layer, self._layer.mlp.w2
        wanted = [x, *parameters]
        if type(last) is nn.Linear and not isinstance(last.weight, DTensor):
            # By hand, for the tile's output is not needed: autograd would compute it first.
            with torch.enable_grad():
                activated = layer.mlp.activated(layer.mlp_norm(x))
            flat = grad.flatten(0, 1)
            at = len(parameters) - (1 if last.bias is None else 2)
            sums.add(at, flat.t() @ activated.detach().flatten(0, 1))
            if last.bias is not None:
                sums.add(at + 1, flat.sum(0))
            found = torch.autograd.grad(activated, wanted[: at + 1], grad @ last.weight.detach())
            of_x = found[0] + grad  # past the MLP, along the residual
        else:
            # float8 and tensor parallelism have their own ways through a projection.
            with torch.enable_grad():
                output = self._untiled(x)
            found = torch.autograd.grad(output, wanted, grad)
            of_x = found[0]
        for index, gradient in enumerate(found[1:]):
            sums.add(index, gradient)
        return of_x


class _Keep(torch.autograd.Function):
    """Saves the input of a tiled half and takes its gradients; see `_TiledFeedForward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiled: _TiledFeedForward, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tiled = tiled
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x, grad_parameters = ctx.tiled.backward(x, grad)
        return grad_x, None, *grad_parameters


class _Attach(torch.autograd.Function):
    """Passes on an output that was computed without autograd, and its gradient to what it came from."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, output: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # or autograd would return a view of it, of which FSDP warns
        return output

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def apply_tiled_mlp(model: LanguageModel, tile_tokens: int) -> None:
    """Compute the second half of every layer (norm, MLP, residual) in tiles along the sequence.

    Backward computes each tile again before it takes its gradients; nothing but the half's input is kept
    for it. Parameter gradients are summed over the tiles in float32, and each parameter passes on one
    gradient, so FSDP reduces once as usual. Call it after tensor parallelism and before activation
    checkpointing.

    Args:
        model: A model with `layers`; may be on the meta device.
        tile_tokens: Tokens of a tile, counted along the sequence of this rank.
    """
    for module in model.layers:
        layer: Any = module
        layer.feed_forward = _TiledFeedForward(layer, tile_tokens)
