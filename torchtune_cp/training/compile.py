"""torch.compile, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchtune_cp.models import LanguageModel


def compile_layers(model: LanguageModel, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer's `forward`; equal layers share what was compiled.

    The forward function is compiled, not the module, so that FSDP's hooks (which gather parameters)
    stay outside. Under context parallelism call it after activation checkpointing was applied: a
    checkpoint around a compiled region gives wrong gradients there with torch 2.13's inductor, one
    inside is exact. Under tensor parallelism alone call it before: torch 2.13 then puts the mesh among
    the tensors that the compiled checkpoint saves, and stops.

    Args:
        model: A model with `layers`; not yet sharded.
        backend: What compiles the graphs; another one than inductor serves to look at them.
    """
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
