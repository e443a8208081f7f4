"""A collate function that refuses token ids that the model does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_cp.data.collate import CROSS_ENTROPY_IGNORE_IDX
from torchtune_cp.data.loader import CollateFn
from torchtune_cp.errors import UserError


@dataclass(frozen=True)
class CheckedIds:
    """Another collate function, its batches looked at before a device is given them.

    On a CPU a wrong id ends in an IndexError of the embedding, on a GPU in an assertion without a name.

    Attributes:
        collate_fn: Makes the batches.
        vocab_size: The model's.
    """

    collate_fn: CollateFn
    vocab_size: int

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Raises:
            UserError: With an id that is no token of the model, and the samples that it may be of.
        """
        batch = self.collate_fn(list(samples))
        for key in ("tokens", "labels"):
            ids = batch.get(key)
            if ids is None:
                continue
            wrong = (ids < 0) | (ids >= self.vocab_size)
            if key == "labels":
                wrong &= ids != CROSS_ENTROPY_IGNORE_IDX
            if wrong.any():
                numbers = [int(s["sample_id"]) for s in samples if "sample_id" in s]
                where = f" (samples {numbers})" if numbers else ""
                raise UserError(
                    f"dataset: {key} hold the token id {int(ids[wrong][0])}{where}, but the model's"
                    f" vocab_size is {self.vocab_size}; its tokens must be those of the model's tokenizer"
                )
        return batch
