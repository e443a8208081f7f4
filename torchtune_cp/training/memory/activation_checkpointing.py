"""Trades computation for memory: activation checkpointing, by layer or by operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtune_cp.distributed.context_parallel.torch_private import keep_gathered_kv
from torchtune_cp.errors import UserError

if TYPE_CHECKING:
    from torchtune_cp.models import LanguageModel

aten = torch.ops.aten

#: The operators that `F.scaled_dot_product_attention` becomes, by device and backend. Selective
#: checkpointing sees them with and without context parallelism: a dispatch mode is above DTensor,
#: so it sees the one operator on DTensors, and neither the ring's steps nor its collectives below it.
ATTENTION_OPS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._flash_attention_forward.default,
        aten._efficient_attention_forward.default,
        torch.ops.torchtune_cp.attention.default,
        torch.ops.torchtune_cp.to_tokens.default,
    }
)


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Without preserve_rng_state: no layer here draws random numbers.
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs
        )

    return run


def apply_activation_checkpointing(model: LanguageModel, every_nth_layer: int = 1) -> None:
    """Keep only the input of a layer in the forward pass and compute the rest again in backward.

    Wraps each layer's `forward`, not the module: parameter names stay, FSDP's hooks stay outside
    (parameters are gathered once for recomputation and backward), and a layer compiled afterwards has
    the checkpoint inside its compiled region.

    Args:
        model: A model with `layers`.
        every_nth_layer: 1 checkpoints every layer, 2 every second, and so on.

    Raises:
        UserError: `every_nth_layer` below 1.
    """
    if every_nth_layer < 1:
        raise UserError(f"ac_option={every_nth_layer}: must be at least 1")
    for index, layer in enumerate(model.layers):
        if index % every_nth_layer == 0:
            layer.forward = _checkpointed(layer.forward)


#: With `keep_kv`: what the ranks that share the heads (Ulysses) were sent.
_TO_HEADS = frozenset({torch.ops.torchtune_cp.to_heads.default})


def _keep(
    kept: frozenset[Any], _context: Any, op: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_selective_checkpointing(model: LanguageModel, *, keep_kv: bool = False) -> None:
    """Keep the input and the attention output of every layer; compute the rest again in backward.

    Attention is the part whose cost grows with the square of the sequence length, and under context
    parallelism the part that waits for other ranks. Its output and logsumexp take about as much memory
    as the layer's input, and with them backward runs no attention forward and none of its collectives
    again. Wraps `forward` as `apply_activation_checkpointing` does.

    Args:
        model: A model with `layers`.
        keep_kv: Also keep the keys and values that context parallelism gathered from all ranks, so
            that backward gathers none: the sequence's KV per layer in memory for two thirds of the
            bytes sent; with Ulysses the queries, keys and values of this rank's heads. A ring with the
            rotate method `alltoall` has nothing to keep. Not for compiled layers.
    """
    kept = ATTENTION_OPS | _TO_HEADS if keep_kv else ATTENTION_OPS
    contexts = partial(create_selective_checkpoint_contexts, partial(_keep, kept))
    for layer in model.layers:
        run = _checkpointed(layer.forward, context_fn=contexts)
        layer.forward = keep_gathered_kv(run) if keep_kv else run
