"""Random initial values, the distributions that transformers uses for these families."""

import torch
from torch import Tensor

from torchtune_cp.models.config import DecoderConfig
from torchtune_cp.models.encoder_config import EncoderConfig


@torch.no_grad()
def init_tensor_(
    name: str, tensor: Tensor, generator: torch.Generator, config: DecoderConfig | EncoderConfig
) -> None:
    """Fill one parameter in place: norm scales 1, biases 0, all other weights normal.

    The embedding of an encoder's padding token is 0.

    Args:
        name: The parameter's name in the model, for example `layers.0.attn.q_proj.weight`.
        tensor: The whole parameter, on the generator's device.
        generator: Drawn from for weights only.
        config: Gives the standard deviation, `initializer_range`.

    Raises:
        ValueError: If the name is of no kind known here.
    """
    module, _, kind = name.rpartition(".")
    if kind == "scale" or (kind == "weight" and module.endswith("norm")):
        tensor.fill_(1.0)
    elif kind == "bias":
        tensor.zero_()
    elif kind == "weight":
        tensor.normal_(0.0, config.initializer_range, generator=generator)
        if module == "tok_embeddings" and isinstance(config, EncoderConfig):
            tensor[config.pad_token_id] = 0.0
    else:
        raise ValueError(f"no initial value is known for parameter {name!r}")
