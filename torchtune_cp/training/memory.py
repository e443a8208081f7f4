"""Trades computation for memory: activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from torchtune_cp.errors import UserError

if TYPE_CHECKING:
    from torchtune_cp.models.transformer import TransformerDecoder


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Without preserve_rng_state: no layer here draws random numbers.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def apply_activation_checkpointing(model: TransformerDecoder, every_nth_layer: int = 1) -> None:
    """Keep only the input of a layer in the forward pass and compute the rest again in backward.

    Wraps each layer's ``forward``, not the module: parameter names stay, FSDP's hooks stay outside
    (parameters are gathered once for recomputation and backward), and a layer compiled afterwards has
    the checkpoint inside its compiled region.

    Args:
        model: A model with ``layers``.
        every_nth_layer: 1 checkpoints every layer, 2 every second, and so on.

    Raises:
        UserError: ``every_nth_layer`` below 1.
    """
    if every_nth_layer < 1:
        raise UserError(f"ac_option={every_nth_layer}: must be at least 1")
    for index, layer in enumerate(model.layers):
        if index % every_nth_layer == 0:
            layer.forward = _checkpointed(layer.forward)
