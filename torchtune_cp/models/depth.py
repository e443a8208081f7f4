"""A model with fewer layers, for checks that do not depend on the number of layers."""

import dataclasses

from torchtune_cp.errors import ConfigError
from torchtune_cp.models.transformer import TransformerDecoder


def first_layers(model: TransformerDecoder, num_layers: int) -> TransformerDecoder:
    """Take layers off a decoder's end, in place.

    Args:
        model: A decoder, on any device.
        num_layers: How many layers stay.

    Returns:
        The same model.

    Raises:
        ConfigError: No decoder, or one that has fewer layers.
    """
    if not isinstance(model, TransformerDecoder) or not 1 <= num_layers <= len(model.layers):
        raise ConfigError(
            f"num_layers is {num_layers}, allowed is 1 to the number of layers of a decoder"
        )
    model.layers = model.layers[:num_layers]
    model.config = dataclasses.replace(model.config, num_layers=num_layers)
    return model
