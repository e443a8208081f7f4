"""MLPs: gated, SwiGLU (https://arxiv.org/abs/2002.05202), and plain with GELU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _SwiGLUFunction(torch.autograd.Function):
    """`silu(gate) * up`, keeping its two inputs only: silu(gate) is taken again in backward.

    Saves a third of the MLP's activation memory for one more pass over it.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        # In this order the product is freed before silu(gate) is taken: one tensor less at the peak.
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        grad_up = F.silu(gate).mul_(grad)
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`.

    Args:
        gate: `[..., hidden]`.
        up: `[..., hidden]`.

    Returns:
        `[..., hidden]`.
    """
    if torch.compiler.is_compiling():  # the compiler decides itself what to recompute
        return F.silu(gate) * up
    product: Tensor = _SwiGLUFunction.apply(gate, up)
    return product


class FeedForward(nn.Module):
    """`w2(silu(w1(x)) * w3(x))`.

    Args:
        embed_dim: Width of input and output.
        intermediate_dim: Hidden width.
        bias: Biases on all three projections.
    """

    def __init__(self, embed_dim: int, intermediate_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(embed_dim, intermediate_dim, bias=bias)
        self.w2 = nn.Linear(intermediate_dim, embed_dim, bias=bias)
        self.w3 = nn.Linear(embed_dim, intermediate_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP.

        Args:
            x: `[batch, seq, embed_dim]`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        output: Tensor = self.w2(self.activated(x))
        return output

    def activated(self, x: Tensor) -> Tensor:
        """All but the last projection.

        Args:
            x: `[batch, seq, embed_dim]`.

        Returns:
            `silu(w1(x)) * w3(x)`, `[batch, seq, intermediate_dim]`.
        """
        return swiglu(self.w1(x), self.w3(x))


class GELUFeedForward(nn.Module):
    """`w2(gelu(w1(x)))` with the exact GELU (https://arxiv.org/abs/1606.08415), and biases.

    Args:
        embed_dim: Width of input and output.
        intermediate_dim: Hidden width.
    """

    def __init__(self, embed_dim: int, intermediate_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(embed_dim, intermediate_dim)
        self.w2 = nn.Linear(intermediate_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP.

        Args:
            x: `[batch, seq, embed_dim]`.

        Returns:
            `[batch, seq, embed_dim]`.
        """
        output: Tensor = self.w2(self.activated(x))
        return output

    def activated(self, x: Tensor) -> Tensor:
        """All but the last projection.

        Args:
            x: `[batch, seq, embed_dim]`.

        Returns:
            `gelu(w1(x))`, `[batch, seq, intermediate_dim]`.
        """
        return F.gelu(self.w1(x))


def scale_hidden_dim_for_mlp(embed_dim: int, multiple_of: int = 256) -> int:
    """Llama's default hidden width: two thirds of 4 x `embed_dim`, rounded up.

    Two thirds, because SwiGLU has three matrices where the plain MLP has two.

    Args:
        embed_dim: Width of the residual stream.
        multiple_of: The result is rounded up to a multiple of this.

    Returns:
        The hidden width; 11008 for 4096.
    """
    hidden_dim = 4 * (2 * embed_dim // 3)
    return -(-hidden_dim // multiple_of) * multiple_of
