"""The optimizer step, as the recipes make it and as ``tune plan`` predicts it: the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.distributed import (
    ContextParallelOptions,
    Meshes,
    ParallelDims,
    context_parallel,
)
from torchtune_cp.distributed.context_parallel import attention_work
from torchtune_cp.distributed.context_parallel.layout import IGNORE_INDEX
from torchtune_cp.distributed.fsdp import set_gradient_sync
from torchtune_cp.models.transformer import TransformerDecoder
from torchtune_cp.training.fp8 import precompute_float8_scales

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepGradients:
    """What forward and backward of all micro-batches have left beside the gradients.

    Attributes:
        counts: Of the global step, see :attr:`TrainStep.count`.
        losses: Of each micro-batch, the sum of this rank's token losses.
        sums: What else :attr:`TrainStep.slice_loss` gave, added up over this rank's micro-batches.
        norm: The gradient's 2-norm over all ranks, before clipping.
        attention_pairs: This rank's share of attention, see ``attention_work``.
    """

    counts: list[float]
    losses: list[Tensor]
    sums: list[Tensor]
    norm: Tensor
    attention_pairs: float

    @property
    def tokens(self) -> float:
        """Label tokens of the global step, the denominator of its loss."""
        return self.counts[0]


@dataclass(frozen=True)
class Evaluation:
    """The loss over a whole dataset, the same on every rank.

    Attributes:
        tokens: Label tokens.
        loss: The mean of their losses in nats.
        sums: What else :attr:`TrainStep.slice_loss` gave, added up over all batches and ranks.
    """

    tokens: int
    loss: float
    sums: list[float]


@dataclass
class TrainStep:
    """Forward, backward and update of one optimizer step.

    Recipes get theirs from :func:`causal_lm_step` and
    :func:`~torchtune_cp.training.masked_lm.masked_lm_step`.

    Attributes:
        cfg: The run's config.
        model: The sharded model.
        optimizer: Over its parameters.
        gradient_norm: From :func:`~torchtune_cp.training.setup.build_optimizer`.
        meshes: Who shares what.
        device: Where the model computes.
        cut: Context manager through which every batch reaches the model: the line where a sequence is
            cut, in training and in validation.
        slice_loss: The sum of the token losses of what :attr:`cut` yielded, and what else is to be added
            up over micro-batches and ranks; scalars.
        count: This rank's label tokens in some batches, and what else is to be counted.
        counted_over: The ranks whose counts add up to the global step's.
    """

    cfg: FullFinetuneConfig
    model: nn.Module
    optimizer: Optimizer
    gradient_norm: Callable[[], Tensor]
    meshes: Meshes
    device: torch.device
    cut: Callable[[Batch], AbstractContextManager[Batch]]
    slice_loss: Callable[[Batch], tuple[Tensor, ...]]
    count: Callable[[Sequence[Batch]], tuple[float, ...]]
    counted_over: DeviceMesh

    def backward(self, batches: list[Batch]) -> StepGradients:
        """Add up the gradients of all micro-batches of a step.

        Args:
            batches: As the loader gave them, on any device.
        """
        # Counted before the first forward pass, over everything that this optimizer step adds up.
        counts = sum_over(self.counted_over, *self.count(batches), device=self.device)
        # FSDP averages gradients over its ranks; wanted is the sum / label tokens.
        scale = self.meshes.loss.size() / max(counts[0], 1)
        losses: list[Tensor] = []
        sums: list[Tensor] = []
        work = 0.0
        for i, batch in enumerate(batches):
            set_gradient_sync(self.model, i == len(batches) - 1)
            with self.cut(to_device(batch, self.device)) as local:
                loss, *others = self.slice_loss(local)
                (loss * scale).backward()
            work += attention_work(local)
            losses.append(loss.detach())
            sums = _added(sums, others)
        return StepGradients(
            counts=counts,
            losses=losses,
            sums=sums,
            norm=self.gradient_norm(),
            attention_pairs=work,
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

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Batch], interrupted: Callable[[], object]
    ) -> Evaluation | None:
        """The mean token loss over batches, without gradients; all ranks have to take part.

        Args:
            batches: As a loader gives them, as many on every rank.
            interrupted: Asked before every batch, and of one mind on all ranks.

        Returns:
            None if it was interrupted.
        """
        self.model.eval()
        try:
            tokens, sums = 0.0, [torch.zeros((), dtype=torch.float64, device=self.device)]
            for batch in batches:
                if interrupted():
                    return None
                tokens += self.count([batch])[0]
                with self.cut(to_device(batch, self.device)) as local:
                    sums = _added(sums, self.slice_loss(local))
        finally:
            self.model.train()
        (all_tokens,) = sum_over(self.counted_over, tokens, device=self.device)
        loss, *others = sum_over(self.meshes.loss, *sums, device=self.device)
        return Evaluation(int(all_tokens), loss / max(all_tokens, 1), others)


def _added(totals: list[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Add values to totals place by place; totals that are missing are 0."""
    found = [total + value.detach() for total, value in zip(totals, values, strict=False)]
    return found + [value.detach() for value in values[len(totals) :]]


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
    options: ContextParallelOptions | None = None,
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
        options: Of context parallelism; None for those of the run.
    """
    if options is None:
        options = ContextParallelOptions.of_run(cfg, model.config, dims.min_seq_len_divisor)
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
            rotate_method=cfg.context_parallel_rotate_method,
            options=options,
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


def count_label_tokens(
    batches: Sequence[dict[str, Tensor]], ignore_index: int = IGNORE_INDEX
) -> int:
    """Count the labels that are trained on in some batches."""
    return sum(int((batch["labels"] != ignore_index).sum()) for batch in batches)


def sum_over(mesh: DeviceMesh, *values: float | Tensor, device: torch.device) -> list[float]:
    """Add numbers up over the ranks of a one-dimensional mesh.

    Args:
        mesh: Its ranks take part.
        values: Numbers or scalar tensors of this rank.
        device: Where the process group's collectives run.

    Returns:
        The sums, the same on every rank. Added in float64, so that counts are exact and the order of
        ranks does not show.
    """
    packed = torch.stack(
        [torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values]
    )
    dist.all_reduce(packed, group=mesh.get_group())
    return packed.tolist()


def clip_gradients(model: nn.Module, max_norm: float, total_norm: Tensor) -> None:
    """Scale all gradients down so that their norm is at most ``max_norm``.

    Args:
        model: After backward.
        max_norm: The largest norm allowed.
        total_norm: From :func:`torchtune_cp.training.optim_in_bwd.gradient_norm`.
    """
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total_norm)


def max_over(mesh: DeviceMesh, value: float, device: torch.device) -> float:
    """The largest of the ranks' numbers.

    Args:
        mesh: Its ranks take part.
        value: This rank's number.
        device: Where the process group's collectives run.
    """
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return largest.item()


def imbalance_over(mesh: DeviceMesh, work: float, device: torch.device) -> float:
    """The largest over the mean work of the ranks; 1.0 when all have the same.

    Args:
        mesh: Its ranks take part.
        work: This rank's, in any unit.
        device: Where the process group's collectives run.
    """
    (total,) = sum_over(mesh, work, device=device)
    return max_over(mesh, work, device) * mesh.size() / total if total else 1.0


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move a batch's tensors to a device."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
