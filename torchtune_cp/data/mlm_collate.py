"""Masked samples -> one batch, packed or padded, that can be cut for context parallelism.

Two formats, named as in TransformerEngine:

- THD (total tokens, heads, width): the samples stand one behind the other in one row; each is padded to
  a multiple of ``2 x cp`` and no further.
- BSHD (batch, sequence, heads, width): a row each, all padded to the longest.

Either says with `cu_seqlens` and `cu_seqlens_padded` where its samples end, without and with their padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtune_cp.data.collate import CROSS_ENTROPY_IGNORE_IDX
from torchtune_cp.distributed.context_parallel.layout import padded_length
from torchtune_cp.errors import UserError
from torchtune_cp.models.token_dropout import token_dropout_scale

FORMATS = ("thd", "bshd")


@dataclass(frozen=True)
class MaskedLMCollator:
    """Makes batches of samples whose labels stand at their own tokens (nothing is shifted).

    Attributes:
        sequence_format: "thd" or "bshd".
        pad_id: The padding token.
        divisor: What each sample's padded length divides by: ``2 x cp``, or 1 without context
            parallelism.
        mask_id: The mask token of a model with token dropout: batches then carry each sample's
            `token_dropout_scale`, which a rank could not compute of a slice. None leaves it out.
        length: THD: pad the whole row to this many tokens, so that all batches have one shape; a
            multiple of `divisor`. None = as long as its samples.
    """

    sequence_format: str
    pad_id: int
    divisor: int = 1
    mask_id: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            UserError: An unknown format, or a length that does not divide.
        """
        if self.sequence_format not in FORMATS:
            raise UserError(
                f"sequence_format={self.sequence_format!r} is not known; allowed: {', '.join(FORMATS)}"
            )
        if self.length is not None and (
            self.sequence_format != "thd" or self.length % self.divisor
        ):
            raise UserError(
                f"length={self.length}: is for the format thd, and a multiple of {self.divisor}"
            )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Args:
            samples: Mappings with "tokens" and "labels" (equally long sequences of int), and optionally
                "sample_id" (int). A mapping with "samples" stands for those. One without tokens is left
                out of a THD batch and a row of padding in a BSHD one.

        Returns:
            CPU tensors of the whole batch, int64 unless said otherwise: `tokens`, `labels`, `input_pos` and
            `token_dropout_scale` (float32), each [b, s] with b = 1 for THD; `cu_seqlens` and
            `cu_seqlens_padded` [samples + 1]; `sample_ids` [samples]. Padding has the label -100, and
            positions that count on. A batch of no tokens at all has `divisor` tokens of padding.

        Raises:
            UserError: A sample whose tokens and labels differ in length, or more tokens than `length`.
        """
        rows = [row for sample in samples for row in sample.get("samples", [sample])]
        for place, row in enumerate(rows):
            if len(row["tokens"]) != len(row["labels"]):
                raise UserError(
                    f"sample {row.get('sample_id', place)} has {len(row['tokens'])} tokens but "
                    f"{len(row['labels'])} labels; masking must give one label for each token"
                )
        if self.sequence_format == "thd":
            rows = [row for row in rows if len(row["tokens"])]
        lengths = [len(row["tokens"]) for row in rows]
        padded = [padded_length(length, self.divisor) for length in lengths]
        if self.sequence_format == "bshd":
            padded = [max([self.divisor, *padded])] * len(rows)
            shape = (len(rows), padded[0])
        else:
            shape = (1, self._row_length(sum(padded)))
        # All samples in a few operations: a batch of hundreds of short ones is as quick as one of a few.
        total = shape[0] * shape[1]
        sizes = torch.tensor(
            [*padded, total - sum(padded)]
        )  # the last: what the row is padded with
        document = torch.arange(len(sizes)).repeat_interleave(sizes)
        input_pos = torch.arange(total) - (sizes.cumsum(0) - sizes)[document]
        real = input_pos < torch.tensor([*lengths, 0])[document]
        tokens = torch.full((total,), self.pad_id, dtype=torch.int64)
        labels = torch.full_like(tokens, CROSS_ENTROPY_IGNORE_IDX)
        for entry, key in ((tokens, "tokens"), (labels, "labels")):
            if rows:
                joined = np.concatenate([np.asarray(row[key], dtype=np.int64) for row in rows])
                entry[real] = torch.from_numpy(joined)
        batch = {
            "tokens": tokens.view(shape),
            "labels": labels.view(shape),
            "input_pos": input_pos.view(shape),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "cu_seqlens_padded": torch.tensor([0, *padded]).cumsum(0),
        }
        if self.mask_id is not None:
            scale = token_dropout_scale(
                tokens[None], self.mask_id, real=real[None], document_ids=document[None]
            )
            batch["token_dropout_scale"] = scale.view(shape)
        if all("sample_id" in row for row in rows):
            batch["sample_ids"] = torch.tensor([r["sample_id"] for r in rows], dtype=torch.int64)
        return batch

    def _row_length(self, total: int) -> int:
        if self.length is None:
            return max(total, self.divisor)
        if total > self.length:
            raise UserError(
                f"the samples of a batch have {total} tokens with their padding, more than the length"
                f" of {self.length}"
            )
        return self.length
