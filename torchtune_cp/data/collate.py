"""Samples of different lengths -> one batch: padded, labels shifted, positions added.

All of it happens before the sequence is cut for context parallelism: once a rank holds only a slice,
it could neither see the label of the next rank's first token nor know the true positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune_cp.distributed.context_parallel.layout import IGNORE_INDEX
from torchtune_cp.errors import UserError

#: torchtune's name of it.
CROSS_ENTROPY_IGNORE_IDX = IGNORE_INDEX


def collate(
    samples: Sequence[Mapping[str, Any]],
    *,
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
) -> dict[str, torch.Tensor]:
    """Pad samples to the longest of them, shift the labels by one and add positions.

    The labels of a sample stand at their own tokens (`labels[i]` is `tokens[i]` or `ignore_idx`). In
    the batch they are shifted: `labels[:, i]` is what the model should say after reading
    `tokens[:, i]`. The label of a sample's first token has no position to be predicted from and falls
    away; the last token of each sample, and all padding, gets `ignore_idx`.

    An empty sample (`tokens == []`) is a row of padding without any label. The sequence is at least 1
    long, so that a batch of empty samples can still go through the model.

    Args:
        samples: b mappings with "tokens" and "labels" (equally long sequences of int), and
            optionally "sample_id" (int).
        padding_idx: Token id of padding; any id of the vocabulary will do, for it is never a label.
        ignore_idx: The label that the loss leaves out.

    Returns:
        int64 CPU tensors `tokens`, `labels`, `input_pos`, each [b, s] with s the longest sample;
        `sample_ids` [b] when the samples carry a "sample_id".

    Raises:
        UserError: When a sample's tokens and labels differ in length, naming the sample.
    """
    if not samples:
        raise UserError("collate was given no samples; a batch needs at least one")
    for place, sample in enumerate(samples):
        if len(sample["tokens"]) != len(sample["labels"]):
            raise UserError(
                f"sample {sample.get('sample_id', place)} has {len(sample['tokens'])} tokens but "
                f"{len(sample['labels'])} labels; a dataset must give one label for each token"
            )
    batch = len(samples)
    seq = max(1, *(len(sample["tokens"]) for sample in samples))
    tokens = torch.full((batch, seq), padding_idx, dtype=torch.int64)
    labels = torch.full((batch, seq), ignore_idx, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = len(sample["tokens"])
        if length == 0:
            continue
        tokens[row, :length] = torch.as_tensor(sample["tokens"], dtype=torch.int64)
        labels[row, : length - 1] = torch.as_tensor(sample["labels"], dtype=torch.int64)[1:]
    # Padding keeps counting: every position stays unique, and nothing depends on the padding's.
    input_pos = torch.arange(seq, dtype=torch.int64).expand(batch, seq).contiguous()
    out = {"tokens": tokens, "labels": labels, "input_pos": input_pos}
    if all("sample_id" in sample for sample in samples):
        out["sample_ids"] = torch.tensor([s["sample_id"] for s in samples], dtype=torch.int64)
    return out


padded_collate_sft = collate
