"""Trades computation or transfers for device memory: checkpointing and offloading of activations."""

from torchtune_cp.training.memory.checkpointing import (
    apply_activation_checkpointing,
    apply_selective_checkpointing,
)
from torchtune_cp.training.memory.offloading import ActivationOffload, apply_activation_offloading
from torchtune_cp.training.memory.tiled_mlp import apply_tiled_mlp

__all__ = [
    "ActivationOffload",
    "apply_activation_checkpointing",
    "apply_activation_offloading",
    "apply_selective_checkpointing",
    "apply_tiled_mlp",
]
