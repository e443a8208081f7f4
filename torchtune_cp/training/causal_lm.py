"""The step of a causal language model: how its sequences are cut, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.distributed import Meshes, ParallelDims, context_parallel
from torchtune_cp.models.transformer import TransformerDecoder
from torchtune_cp.training.setup import head_chunks, ulysses_dim
from torchtune_cp.training.step import count_label_tokens
from torchtune_cp.training.train_step import Batch, TrainStep


def causal_lm_step(
    cfg: FullFinetuneConfig,
    model: TransformerDecoder,
    optimizer: Optimizer,
    gradient_norm: Callable[[], Tensor],
    loss_fn: Callable[..., Tensor],
    *,
    meshes: Meshes,
    dims: ParallelDims,
    device: torch.device,
) -> TrainStep:
    """Build the step of ``full_finetune_distributed``.

    Args:
        cfg: The run's config.
        model: The sharded model.
        optimizer: Over its parameters.
        gradient_norm: From :func:`~torchtune_cp.training.setup.build_optimizer`.
        loss_fn: Sums a slice's token losses from hidden states, output weight and labels.
        meshes: Who shares what.
        dims: The degrees of parallelism.
        device: Where the model computes.
    """
    return TrainStep(
        cfg,
        model,
        optimizer,
        gradient_norm,
        meshes,
        device,
        cut=partial(
            context_parallel,
            meshes.cp,
            method=cfg.context_parallel_method,
            ulysses_dim=ulysses_dim(cfg, model),
            window=model.config.sliding_window,
            rotate_method=cfg.context_parallel_rotate_method,
            pad_to_multiple_of=dims.min_seq_len_divisor,
            by_documents=head_chunks(cfg, model) is not None,
        ),
        slice_loss=partial(_slice_loss, model, loss_fn),
        count=_count,
        counted_over=meshes.dp,  # context-parallel peers count the same whole batches
    )


def _slice_loss(
    model: TransformerDecoder, loss_fn: Callable[..., Tensor], local: Batch
) -> tuple[Tensor]:
    """Sum the token losses of this rank's slice; its logits exist a chunk at a time."""
    head = partial(loss_fn, labels=local["labels"])
    loss: Tensor = model(local["tokens"], local.get("input_pos"), output_fn=head)
    return (loss,)


def _count(batches: Sequence[Batch]) -> tuple[float]:
    return (count_label_tokens(batches),)
