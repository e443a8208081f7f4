"""A small random llama and one forward and backward pass of it."""

from __future__ import annotations

from typing import Any

import torch

from torchtune_cp.models.init import init_tensor_
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.models.transformer import TransformerDecoder

LAYERS, DIM, VOCAB = 3, 64, 32


def small_llama() -> TransformerDecoder:
    """3 layers of width 64 with random weights, the same every time."""
    model = llama3(
        vocab_size=VOCAB,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=DIM,
        intermediate_dim=128,
        max_seq_len=512,
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            init_tensor_(name, parameter, generator, model.config)
    return model


def tokens(length: int = 96) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: TransformerDecoder, batch: Any = None, **position: Any) -> torch.Tensor:
    logits = model(tokens() if batch is None else batch, **position)
    return logits.float().log_softmax(-1)[..., 0].sum()


def gradients(model: TransformerDecoder) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}
