"""The step and the data of a masked language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import ConcatDataset

from torchtune_cp.config import MaskedLMConfig, instantiate
from torchtune_cp.data import (
    CPDataLoader,
    EsmTokenizer,
    MaskedDataset,
    MaskedLMCollator,
    TokenBudgetDataset,
    create_cp_dataloader,
)
from torchtune_cp.data.token_ids import CheckedIds
from torchtune_cp.datasets import SampleStream, SFTDataset, StreamedBatches, StreamPlace
from torchtune_cp.distributed import (
    ContextParallelOptions,
    Meshes,
    ParallelDims,
    context_parallel,
)
from torchtune_cp.distributed.context_parallel.layout import IGNORE_INDEX
from torchtune_cp.errors import UserError
from torchtune_cp.models import TransformerEncoder
from torchtune_cp.training.step import Batch, TrainStep, count_label_tokens


def masked_lm_step(
    cfg: MaskedLMConfig,
    model: TransformerEncoder,
    optimizer: Optimizer,
    gradient_norm: Callable[[], Tensor],
    loss_fn: Callable[..., Tensor],
    *,
    meshes: Meshes,
    dims: ParallelDims,
    device: torch.device,
) -> TrainStep:
    """Build the step of ``esm2_mlm_distributed``.

    Beside the losses it adds up the labels that the model guessed right. It counts label tokens, real
    tokens and tokens held, see :func:`count_tokens`.

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
            is_causal=False,
            method=cfg.context_parallel_method,
            rotate_method=cfg.context_parallel_rotate_method,
            options=ContextParallelOptions.of_run(cfg, model.config),
        ),
        slice_loss=partial(_slice_loss, model, loss_fn),
        count=partial(count_tokens, cp=dims.cp),
        counted_over=meshes.loss,  # every rank counts its own slices
    )


def _slice_loss(
    model: TransformerEncoder, loss_fn: Callable[..., Tensor], local: Batch
) -> tuple[Tensor, Tensor]:
    """Sum the token losses of this rank's slice, and count the labels that were guessed right."""
    found: tuple[Tensor, Tensor] = model(
        local["tokens"],
        local["input_pos"],
        token_dropout_scale=local.get("token_dropout_scale"),
        output_fn=partial(masked_lm_head, labels=local["labels"], loss_fn=loss_fn),
    )
    return found


def build_masked_lm_loader(
    cfg: MaskedLMConfig,
    dataset: DictConfig | ListConfig,
    tokenizer: Any,
    model: TransformerEncoder,
    dims: ParallelDims,
    meshes: Meshes,
    seed: int,
    *,
    validation: bool = False,
) -> CPDataLoader:
    """Build the loader: one rank of each data-parallel group reads, the others get their slices.

    Args:
        cfg: The run's config.
        dataset: ``cfg.dataset`` or ``cfg.dataset_val``; a list is concatenated.
        tokenizer: Handed to the datasets; knows the mask and padding tokens.
        model: Knows whether it needs the mask ratio of each sample.
        dims: The degrees of parallelism.
        meshes: Who shares batches.
        seed: Of the order of samples and of the masks.
        validation: Read every sample exactly once, in order, with the same masks each time; training
            leaves out an incomplete last global batch.

    Raises:
        UserError: A tokenizer or model that is not for masked language modelling or another's, or data
            that cannot be read.
    """
    if not isinstance(tokenizer, EsmTokenizer):
        raise UserError(
            f"tokenizer: {type(tokenizer).__name__} has no mask token; use"
            " torchtune_cp.data.esm_tokenizer"
        )
    if (tokenizer.mask_id, tokenizer.pad_id) != (
        model.config.mask_token_id,
        model.config.pad_token_id,
    ):
        raise UserError(
            f"tokenizer: its mask and padding tokens are {tokenizer.mask_id} and {tokenizer.pad_id}, the"
            f" model's are {model.config.mask_token_id} and {model.config.pad_token_id}; use the"
            " model's own tokenizer"
        )
    shuffle = cfg.shuffle and not validation
    loader, _ = create_cp_dataloader(
        partial(_masked_samples, cfg, dataset, tokenizer, seed, shuffle),
        meshes.world,
        collate_fn=CheckedIds(
            MaskedLMCollator(
                cfg.sequence_format,
                pad_id=tokenizer.pad_id,
                mask_id=tokenizer.mask_id if model.config.token_dropout else None,
            ),
            model.config.vocab_size,
        ),
        batch_size=(cfg.batch_size_val or cfg.batch_size) if validation else cfg.batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=not validation,
        num_workers=cfg.num_workers,
    )
    return loader


def _masked_samples(
    cfg: MaskedLMConfig,
    dataset: DictConfig | ListConfig,
    tokenizer: EsmTokenizer,
    seed: int,
    shuffle: bool,
) -> Any:
    nodes = list(dataset) if isinstance(dataset, ListConfig) else [dataset]
    parts = [instantiate(node, tokenizer) for node in nodes]
    masking = instantiate(cfg.masking, tokenizer, seed=seed)
    if isinstance(parts[0], SampleStream):
        keys = ["token_micro_batch_size"]
        if cfg.token_micro_batch_size is not None:
            keys += ["oversize", "packing_strategy"]
        return StreamedBatches(
            parts[0],
            partial(_batches_of_buffer, cfg, masking),
            shuffle=shuffle,
            seed=seed,
            settings=", ".join(f"{key} {getattr(cfg, key)}" for key in keys),
        )
    masked = MaskedDataset(parts[0] if len(parts) == 1 else ConcatDataset(parts), masking)
    return _batches(cfg, masked)


def _batches_of_buffer(
    cfg: MaskedLMConfig, masking: Callable[..., Any], samples: SFTDataset, place: StreamPlace
) -> Any:
    masked = MaskedDataset(samples, masking, first_id=place.samples)
    masked.set_epoch(place.epoch)
    return _batches(cfg, masked, first_id=place.samples, partial=True)


def _batches(cfg: MaskedLMConfig, masked: MaskedDataset, **settings: Any) -> Any:
    if cfg.token_micro_batch_size is None:
        return masked
    return TokenBudgetDataset(
        masked,
        cfg.token_micro_batch_size,
        oversize=cfg.oversize,
        strategy=cfg.packing_strategy,
        **settings,
    )


def masked_lm_head(
    hidden: Tensor,
    weight: Tensor,
    *,
    labels: Tensor,
    loss_fn: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Project, sum the token losses, and count the labels that are the most likely token.

    Args:
        hidden: [b, n, d].
        weight: [v, d].
        labels: [b, n]; -100 where nothing is to be predicted.
        loss_fn: Gives the sum.

    Returns:
        The sum of the token losses in nats and the count, int64, both scalars.
    """
    loss = loss_fn(hidden, weight, labels)
    with torch.no_grad():
        counts = labels != IGNORE_INDEX  # some 15 %: their logits are few
        predicted = (hidden[counts] @ weight.t()).argmax(-1)
        return loss, (predicted == labels[counts]).sum()


def count_tokens(batches: Sequence[dict[str, Tensor]], cp: int) -> tuple[int, float, int]:
    """Count this rank's tokens of some batches that are cut already.

    Args:
        batches: Slices.
        cp: How many ranks share them.

    Returns:
        Its labels, its part of the real tokens, and the tokens that it holds, padding included: they add
        up over data- and context-parallel ranks.
    """
    real = sum(int(batch["cu_seqlens"][-1]) for batch in batches) / cp
    return count_label_tokens(batches), real, sum(b["tokens"].numel() for b in batches)


def perplexity(loss: float) -> float:
    """``exp(loss)``, infinite where that is more than a float holds."""
    return math.exp(loss) if loss < 700 else math.inf
