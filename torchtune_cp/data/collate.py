"""Samples of different lengths -> one batch: padded, labels shifted, positions added.

All of it happens before the sequence is cut for context parallelism: once a rank holds only a slice,
it could neither see the label of the next rank's first token nor know the true positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from torchtune_cp.distributed.context_parallel.layout import IGNORE_INDEX
from torchtune_cp.errors import UserError

#: torchtune's name of it.
CROSS_ENTROPY_IGNORE_IDX = IGNORE_INDEX


def collate(
    samples: Sequence[Mapping[str, Any]],
    *,
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
    pad_to: int | None = None,
) -> dict[str, torch.Tensor]:
    """Pad samples to the longest of them, shift the labels by one and add positions.

    The labels of a sample stand at their own tokens (`labels[i]` is `tokens[i]` or `ignore_idx`). In
    the batch they are shifted: `labels[:, i]` is what the model should say after reading
    `tokens[:, i]`. The label of a sample's first token has no position to be predicted from and falls
    away; the last token of each sample, and all padding, gets `ignore_idx`.

    A packed sample (one with "seq_lens") holds several documents: the last token of each gets
    `ignore_idx`, for it must not predict the next document's first, and positions restart in each.

    An empty sample (`tokens == []`) is a row of padding without any label. The sequence is at least 1
    long, so that a batch of empty samples can still go through the model.

    Args:
        samples: b mappings with "tokens" and "labels" (equally long sequences of int), and
            optionally "sample_id" (int). Packed ones also have "seq_lens": the lengths of their
            documents, which add up to that of the tokens.
        padding_idx: Token id of padding; any id of the vocabulary will do, for it is never a label.
        ignore_idx: The label that the loss leaves out.
        pad_to: Pad to this length, so that all batches have one; None = to the longest sample.

    Returns:
        int64 CPU tensors `tokens`, `labels`, `input_pos`, each [b, s] with s the longest sample or
        `pad_to`; `sample_ids` [b] when the samples carry a "sample_id"; when one of them is packed,
        `seq_lens` [b, documents]: the lengths of each row's documents, from position 0 on, then zeros
        (a sample that is not packed is one document).

    Raises:
        UserError: When a sample's tokens and labels differ in length, when its "seq_lens" do not add up
            to its tokens, or when it is longer than `pad_to`, naming the sample.
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
    if pad_to is not None and seq > pad_to:
        longest = max(range(batch), key=lambda place: len(samples[place]["tokens"]))
        raise UserError(
            f"sample {samples[longest].get('sample_id', longest)} has {seq} tokens, more than "
            f"collate_fn.pad_to={pad_to}; raise it, or lower tokenizer.max_seq_len"
        )
    seq = pad_to or seq
    tokens = torch.full((batch, seq), padding_idx, dtype=torch.int64)
    labels = torch.full((batch, seq), ignore_idx, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = len(sample["tokens"])
        if length == 0:
            continue
        tokens[row, :length] = torch.as_tensor(sample["tokens"], dtype=torch.int64)
        labels[row, : length - 1] = torch.as_tensor(sample["labels"], dtype=torch.int64)[1:]
    # Padding keeps counting: nothing depends on its positions.
    input_pos = torch.arange(seq, dtype=torch.int64).expand(batch, seq).contiguous()
    out = {"tokens": tokens, "labels": labels, "input_pos": input_pos}
    if any("seq_lens" in sample for sample in samples):
        documents = [_document_lengths(sample, place) for place, sample in enumerate(samples)]
        out["seq_lens"] = pad_sequence(documents, batch_first=True)
        for row, lengths in enumerate(documents):
            if len(lengths) == 0:
                continue
            ends = torch.cumsum(lengths, dim=0)
            labels[row, ends - 1] = ignore_idx
            begins = torch.repeat_interleave(ends - lengths, lengths)
            input_pos[row, : len(begins)] -= begins
            input_pos[row, len(begins) :] -= begins[-1]
    if all("sample_id" in sample for sample in samples):
        out["sample_ids"] = torch.tensor([s["sample_id"] for s in samples], dtype=torch.int64)
    return out


def _document_lengths(sample: Mapping[str, Any], place: int) -> torch.Tensor:
    """int64 [documents] of a sample; one that is not packed is one document, or none when empty."""
    length = len(sample["tokens"])
    given = sample.get("seq_lens", [length] if length else [])
    lengths = torch.as_tensor(given, dtype=torch.int64)
    if int(lengths.sum()) != length or bool((lengths < 1).any()):
        raise UserError(
            f"sample {sample.get('sample_id', place)} has {length} tokens but seq_lens "
            f"{lengths.tolist()}; they must be 1 or more each and add up to the tokens"
        )
    return lengths


padded_collate_sft = collate
