"""Root mean square layer norm (https://arxiv.org/abs/1910.07467)."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _RMSNormFunction(torch.autograd.Function):
    """RMS norm in few passes over memory, for CPUs.

    `F.rms_norm` has no fused CPU kernel: it copies fp32 inputs to fp64 and keeps several
    full-size intermediates. This keeps only the input and one number a row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        mean_square = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_()
        inverse_rms = mean_square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse_rms)
        return (x32 * inverse_rms).to(x.dtype).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, inverse_rms = ctx.saved_tensors
        scale32 = scale.float()
        grad32 = grad.float()
        normed = x.float() * inverse_rms
        product = grad32 * normed
        grad_scale = product.sum(dim=tuple(range(product.dim() - 1))).to(scale.dtype)
        # The part of the gradient along the input itself: the norm removes it.
        along = product.matmul(scale32).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad32, scale32, out=product).addcmul_(normed, along, value=-1)
        return grad_x.mul_(inverse_rms).to(x.dtype), grad_scale, None


class RMSNorm(nn.Module):
    """Divides each row by its root mean square and multiplies by a learned scale.

    The statistics are computed in fp32 for any input dtype.

    Args:
        dim: Width of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            x: `[..., dim]`, of two dimensions or more.

        Returns:
            `[..., dim]`, same dtype.
        """
        return self.normalise(x, self.scale)

    def normalise(self, x: Tensor, scale: Tensor) -> Tensor:
        """Normalise with a scale other than the parameter object, such as its local copy.

        Args:
            x: As in `forward`.
            scale: `[dim]`.

        Returns:
            `[..., dim]`, same dtype.
        """
        if (
            x.device.type == "cpu"
            and x.dtype != torch.float64
            and not torch.compiler.is_compiling()
        ):
            normed: Tensor = _RMSNormFunction.apply(x, scale, self.eps)
            return normed
        return F.rms_norm(x, (self.dim,), scale, self.eps)

    def extra_repr(self) -> str:
        """Show the sizes in the model's printout."""
        return f"{self.dim}, eps={self.eps}"


@contextlib.contextmanager
def rms_norm_from(
    normalise: Callable[[RMSNorm, Tensor, Tensor], Tensor],
) -> Generator[None, None, None]:
    """Let RMS norms compute with another function for a while: `tune plan` has that of a GPU.

    Args:
        normalise: Takes a norm and the arguments of `RMSNorm.normalise`.
    """
    original = RMSNorm.normalise
    RMSNorm.normalise = normalise  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        RMSNorm.normalise = original  # type: ignore[method-assign]
