"""Batches of so many tokens, however many samples that is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchtune_cp.data.masked_dataset import token_count
from torchtune_cp.data.packing import pack_documents
from torchtune_cp.errors import UserError

OVERSIZE_POLICIES = ("error", "split", "drop")

logger = logging.getLogger(__name__)


class TokenBudgetDataset(Dataset):
    """Map-style: element i is a micro-batch, as many whole samples as a number of tokens allows.

    Which samples share a micro-batch depends on their lengths and order alone, not on ranks, mesh or
    seed; an epoch's order shuffles the micro-batches. The budget counts tokens without the padding to
    multiples of ``2 x cp``, so that every mesh makes the same micro-batches.

    Attributes:
        dropped: Samples left out for being longer than the budget.
        split: Samples cut into several pieces, each of which stands for itself.
    """

    def __init__(
        self,
        dataset: Any,
        token_micro_batch_size: int,
        *,
        oversize: str = "error",
        strategy: str = "greedy",
        first_id: int = 0,
        partial: bool = False,
    ) -> None:
        """Read the length of every sample and decide who shares a micro-batch.

        Args:
            dataset: Map-style; `dataset[i]` gives "tokens" and "labels". One with `token_count(i)` makes the
                tokens later.
            token_micro_batch_size: The most tokens of a micro-batch.
            oversize: What to do with a sample of more tokens: "split", "drop" or "error".
            strategy: See `pack_documents`.
            first_id: The `sample_id` of the first sample; the others count on.
            partial: Whether these are some samples of more: then none need be left, and nothing is logged.

        Raises:
            UserError: An unknown policy or strategy, a budget below 1, a sample that is too long under
                "error", or nothing that is left where something should be.
        """
        if oversize not in OVERSIZE_POLICIES:
            raise UserError(
                f"oversize={oversize!r} is not known; allowed: {', '.join(OVERSIZE_POLICIES)}"
            )
        if token_micro_batch_size < 1:
            raise UserError(
                f"token_micro_batch_size must be 1 or more, not {token_micro_batch_size}"
            )
        self.dataset = dataset
        self._first_id = first_id
        counts = [token_count(dataset, i) for i in range(len(dataset))]
        lengths = np.array(counts, dtype=np.int64)
        long = lengths > token_micro_batch_size
        if oversize == "error" and long.any():
            first = int(np.flatnonzero(long)[0])
            raise UserError(
                f"sample {first_id + first} has {lengths[first]} tokens, more than"
                f" token_micro_batch_size={token_micro_batch_size}; raise it, or set oversize to split"
                " or drop"
            )
        self.dropped = int(long.sum()) if oversize == "drop" else 0
        self.split = int(long.sum()) if oversize == "split" else 0
        if oversize == "drop":
            lengths[long] = 0
        self._packs = pack_documents(lengths, token_micro_batch_size, strategy=strategy)
        if not partial and not lengths.any():
            raise UserError(
                f"no samples: all {len(lengths)} have no tokens or more than"
                f" token_micro_batch_size={token_micro_batch_size}"
            )
        logger.log(
            logging.DEBUG if partial else logging.INFO,
            "%d samples in %d micro-batches of at most %d tokens, %.1f %% filled; %d cut, %d left out",
            int((lengths > 0).sum()),
            len(self._packs),
            token_micro_batch_size,
            100 * lengths.sum() / (max(len(self._packs), 1) * token_micro_batch_size),
            self.split,
            self.dropped,
        )

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset, if it wants to know."""
        tell = getattr(self.dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        samples = []
        for document, start, length in self._packs.pieces(index):
            whole = self.dataset[document]
            part = slice(start, start + length)
            samples.append(
                {
                    "tokens": whole["tokens"][part],
                    "labels": whole["labels"][part],
                    "sample_id": self._first_id + document,
                }
            )
        return {"samples": samples}
