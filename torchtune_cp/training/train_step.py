"""One optimizer step, as the recipe makes it and as ``tune plan`` predicts it: the same code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.distributed import Meshes, ParallelDims, context_parallel
from torchtune_cp.distributed.context_parallel import attention_work
from torchtune_cp.distributed.fsdp import set_gradient_sync
from torchtune_cp.models.transformer import TransformerDecoder
from torchtune_cp.training.fp8 import precompute_float8_scales
from torchtune_cp.training.setup import head_chunks, ulysses_dim
from torchtune_cp.training.step import clip_gradients, count_label_tokens, sum_over, to_device

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepGradients:
    """What forward and backward of all micro-batches have left beside the gradients.

    Attributes:
        tokens: Label tokens of the global step, the denominator of its loss.
        losses: Of each micro-batch, the sum of this rank's token losses.
        norm: The gradient's 2-norm over all ranks, before clipping.
        attention_pairs: This rank's share of attention, see ``attention_work``.
    """

    tokens: float
    losses: list[Tensor]
    norm: Tensor
    attention_pairs: float


@dataclass
class TrainStep:
    """Forward, backward and update of one optimizer step.

    Attributes:
        cfg: The run's config.
        model: The sharded model.
        optimizer: Over its parameters.
        gradient_norm: From :func:`~torchtune_cp.training.setup.build_optimizer`.
        loss_fn: Sums a slice's token losses from hidden states and output weight.
        meshes: Who shares what.
        dims: The degrees of parallelism.
        device: Where the model computes.
        cut: Context manager through which every batch reaches the model: the line where a sequence is
            cut. Training and validation go through the same door.
    """

    cfg: FullFinetuneConfig
    model: TransformerDecoder
    optimizer: Optimizer
    gradient_norm: Callable[[], Tensor]
    loss_fn: Callable[..., Tensor]
    meshes: Meshes
    dims: ParallelDims
    device: torch.device
    cut: Callable[[Batch], AbstractContextManager[Batch]] = field(init=False)

    def __post_init__(self) -> None:
        """Bind the cut to the mesh."""
        self.cut = partial(
            context_parallel,
            self.meshes.cp,
            method=self.cfg.context_parallel_method,
            ulysses_dim=ulysses_dim(self.cfg, self.model),
            window=self.model.config.sliding_window,
            rotate_method=self.cfg.context_parallel_rotate_method,
            pad_to_multiple_of=self.dims.min_seq_len_divisor,
            by_documents=head_chunks(self.cfg, self.model) is not None,
        )

    def slice_loss(self, local: Batch) -> Tensor:
        """Sum the token losses of this rank's slice; its logits exist a chunk at a time.

        Args:
            local: What :attr:`cut` yielded.
        """
        head = partial(self.loss_fn, labels=local["labels"])
        loss: Tensor = self.model(local["tokens"], local.get("input_pos"), output_fn=head)
        return loss

    def backward(self, batches: list[Batch]) -> StepGradients:
        """Add up the gradients of all micro-batches of a step.

        Args:
            batches: Whole (not yet cut) batches, on any device.
        """
        # Counted before the cut, over everything that this optimizer step adds up.
        (tokens,) = sum_over(self.meshes.dp, count_label_tokens(batches), device=self.device)
        # FSDP averages gradients over its ranks; wanted is the sum / label tokens.
        scale = self.meshes.loss.size() / max(tokens, 1)
        losses, work = [], 0.0
        for i, batch in enumerate(batches):
            set_gradient_sync(self.model, i == len(batches) - 1)
            with self.cut(to_device(batch, self.device)) as local:
                loss = self.slice_loss(local)
                (loss * scale).backward()
            work += attention_work(local)
            losses.append(loss.detach())
        return StepGradients(
            tokens=tokens, losses=losses, norm=self.gradient_norm(), attention_pairs=work
        )

    def update(self, norm: Tensor) -> None:
        """Clip and step.

        Args:
            norm: Of the gradients that :meth:`backward` has left.
        """
        if self.cfg.clip_grad_norm is not None:
            clip_gradients(self.model, self.cfg.clip_grad_norm, norm)
        self.optimizer.step()  # with optimizer_in_bwd: done already, nothing is left to do

    def finish(self) -> None:
        """Free the gradients and prepare what the next forward pass sends."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.cfg.enable_fp8_training:
            precompute_float8_scales(self.model)
