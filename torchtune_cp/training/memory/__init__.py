"""Trades computation or transfers for device memory: checkpointing, offloading, tiles and head chunks."""

from torchtune_cp.training.memory.activation_checkpointing import (
    apply_activation_checkpointing,
    apply_selective_checkpointing,
)
from torchtune_cp.training.memory.chunked_attention import apply_chunked_attention
from torchtune_cp.training.memory.offloading import ActivationOffload, apply_activation_offloading
from torchtune_cp.training.memory.tiled_mlp import apply_tiled_mlp

__all__ = [
    "ActivationOffload",
    "apply_activation_checkpointing",
    "apply_activation_offloading",
    "apply_chunked_attention",
    "apply_selective_checkpointing",
    "apply_tiled_mlp",
]
