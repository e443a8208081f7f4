"""Random initial values, the distributions that transformers uses for these families."""

import torch
from torch import Tensor

from torchtune_cp.models.config import DecoderConfig


@torch.no_grad()
def init_tensor_(
    name: str, tensor: Tensor, generator: torch.Generator, config: DecoderConfig
) -> None:
    """Fill one parameter in place: norm scales 1, biases 0, all other weights normal.

    Args:
        name: The parameter's name in the model, for example `layers.0.attn.q_proj.weight`.
        tensor: The whole parameter, on the generator's device.
        generator: Drawn from for weights only.
        config: Gives the standard deviation, `initializer_range`.

    Raises:
        ValueError: If the name is of no kind known here.
    """
    kind = name.rpartition(".")[2]
    if kind == "scale":
        tensor.fill_(1.0)
    elif kind == "bias":
        tensor.zero_()
    elif kind == "weight":
        tensor.normal_(0.0, config.initializer_range, generator=generator)
    else:
        raise ValueError(f"no initial value is known for parameter {name!r}")
