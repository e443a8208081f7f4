"""Rotary position embedding (https://arxiv.org/abs/2104.09864) from explicit positions.

Layout as in Hugging Face's checkpoints: within a head, dimension i is rotated with dimension
i + head_dim / 2.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtune_cp.models.config import RopeScaling, RotarySizes


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend in between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    # How many wavelengths fit into the original context decides: below `low` all of the stretch,
    # above `high` none of it.
    fits = scaling.original_max_seq_len / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((fits - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def inverse_frequencies(config: RotarySizes) -> Tensor:
    """Angle per position of each rotated pair.

    Computed on the CPU in fp32 for any device of the model, so that every device rotates by the
    same angles: at a million tokens the last bit of a frequency is 0.06 radians.

    Args:
        config: Gives head_dim, the base and the scaling.

    Returns:
        `[head_dim / 2]`, fp32, on the CPU; radians per position.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / (config.rope_base ** (pairs / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    return _scale_llama3(frequencies, scaling)


def rotary_cos_sin(
    frequencies: Tensor, input_pos: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every rotation angle, once for all layers of a forward pass.

    Angles, cosines and sines are taken in fp32 and then rounded to the activations' dtype, the
    order of transformers, whose weights these are.

    Args:
        frequencies: `[head_dim / 2]`, radians per position, from `inverse_frequencies` or a checkpoint.
        input_pos: Position of each token in its document, `[batch or 1, seq]`.
        dtype: The activations' dtype.

    Returns:
        Cosine and sine, each `[batch or 1, seq, 1, head_dim]`. The sine's first half is negated, so
        that the rotation is `x * cos + swap_halves(x) * sin`.
    """
    angles = (input_pos[..., None].float() * frequencies.to(input_pos.device)).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _swap_halves(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1)


class _RotateFunction(torch.autograd.Function):
    """The rotation in three passes over memory; its gradient is the rotation the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _swap_halves(x).mul_(sin).addcmul_(x, cos)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _swap_halves(grad).mul_(-sin).addcmul_(grad, cos), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions of every head by its token's angle.

    Args:
        x: Queries or keys, `[batch, seq, heads, head_dim]`.
        cos: From `rotary_cos_sin`, `[batch or 1, seq, 1, head_dim]`.
        sin: As `cos`.

    Returns:
        `[batch, seq, heads, head_dim]`.
    """
    if torch.compiler.is_compiling():  # the compiler fuses this into one pass by itself
        return x * cos + _swap_halves(x) * sin
    rotated: Tensor = _RotateFunction.apply(x, cos, sin)
    return rotated
