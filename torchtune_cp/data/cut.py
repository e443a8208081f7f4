"""A whole batch -> what each context-parallel rank gets of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtune_cp.distributed.context_parallel.documents import documents_of
from torchtune_cp.distributed.context_parallel.entries import check_entries, cut_keys
from torchtune_cp.distributed.context_parallel.layout import head_tail_places, pad_batch
from torchtune_cp.errors import UserError


def with_document_ends(batch: dict[str, torch.Tensor], cp: int) -> dict[str, torch.Tensor]:
    """Give a batch of any collate function what a cut needs.

    Args:
        batch: `tokens` [b, s] and what goes with them. With `cu_seqlens` it stays as it is (without
            `cu_seqlens_padded`, no document has padding); else every row is one document, padded to a
            multiple of ``2 x cp``.
        cp: Context-parallel degree.

    Returns:
        The batch with `cu_seqlens`, `cu_seqlens_padded` and `input_pos`.

    Raises:
        UserError: Packed rows (`seq_lens`) without `cu_seqlens_padded`, or malformed entries.
    """
    check_entries(batch)
    if batch.get("cu_seqlens") is not None or batch.get("cu_seqlens_padded") is not None:
        documents_of(batch)  # refuses what describes no documents of these tokens
        return {**batch, "cu_seqlens_padded": batch.get("cu_seqlens_padded", batch["cu_seqlens"])}
    if batch.get("seq_lens") is not None:
        raise UserError(
            "a packed batch needs its documents padded one by one to be cut for context parallelism:"
            " let the collate function give cu_seqlens and cu_seqlens_padded in place of seq_lens (as"
            " torchtune_cp.data.MaskedLMCollator does)"
        )
    rows, length = batch["tokens"].shape
    padded = pad_batch(batch, 2 * cp if cp > 1 else 1)
    ends = torch.arange(rows + 1)
    return {
        **batch,
        **padded,
        "cu_seqlens": ends * length,
        "cu_seqlens_padded": ends * padded["tokens"].size(1),
    }


@dataclass(frozen=True)
class CutBatch:
    """A batch cut for all ranks, each entry still one tensor.

    Attributes:
        cp: Context-parallel degree.
        entries: By name, in the batch's order.
        cut: Names of the entries that are cut, [cp, b, s / cp, ...] with rank r's part in row r; the others
            go to all ranks.
    """

    cp: int
    entries: dict[str, torch.Tensor]
    cut: frozenset[str]

    def of_rank(self, rank: int) -> dict[str, torch.Tensor]:
        """What a rank gets."""
        return {
            name: entry[rank] if name in self.cut else entry for name, entry in self.entries.items()
        }


def cut_batch(batch: dict[str, torch.Tensor], cp: int) -> CutBatch:
    """Cut a batch document by document: rank r gets chunks r and ``2 cp - 1 - r`` of ``2 cp`` of each.

    Args:
        batch: The whole batch, see :func:`with_document_ends`; `tokens` and every other entry [b, s, ...]
            is cut, those without a sequence go to all ranks.
        cp: Context-parallel degree.

    Raises:
        UserError: A malformed batch, or documents whose padded length does not divide by ``2 x cp``.
    """
    batch = with_document_ends(batch, cp)
    shape = batch["tokens"].shape
    padded = batch["cu_seqlens_padded"].diff().tolist()
    tail = shape.numel() - sum(padded)
    try:
        places = head_tail_places(padded, cp, tail)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"a batch of {list(shape)} tokens with documents padded to {padded} cannot be cut over"
            f" {cp} ranks: each must be a multiple of {2 * cp}"
        ) from error
    order = places.flatten()
    cut = frozenset(cut_keys(batch))
    rows, length = shape
    # All ranks' parts in one go: several times faster than indexing for each.
    entries = {
        key: entry.flatten(0, 1)
        .index_select(0, order)
        .view(cp, rows, length // cp, *entry.shape[2:])
        if key in cut
        else entry
        for key, entry in batch.items()
    }
    return CutBatch(cp, entries, cut)


def cut_for_ranks(batch: dict[str, torch.Tensor], cp: int) -> list[dict[str, torch.Tensor]]:
    """Cut a batch, see :func:`cut_batch`.

    Args:
        batch: The whole batch.
        cp: Context-parallel degree.

    Returns:
        By rank: a batch of the same entries, those that were cut [b, s / cp], in the order of the documents;
        ready for `context_parallel(..., already_cut=True)`.

    Raises:
        UserError: As :func:`cut_batch`.
    """
    cut = cut_batch(batch, cp)
    return [cut.of_rank(rank) for rank in range(cp)]
