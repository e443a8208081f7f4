"""Positions of a batch's tokens in their documents: found where they are missing, else held against them."""

from __future__ import annotations

import torch

from torchtune_cp.distributed.context_parallel.documents import Document, document_positions
from torchtune_cp.distributed.context_parallel.entries import cut_keys, other_entries
from torchtune_cp.distributed.context_parallel.layout import DocumentLayout, positions_of_rank
from torchtune_cp.errors import UserError


def in_longer_rows(
    documents: tuple[Document, ...], length: int, padded: int
) -> tuple[Document, ...]:
    """The same documents after each row was padded.

    Args:
        documents: From :func:`documents.documents_of`.
        length: Tokens of a row before.
        padded: And after.
    """
    if length == padded:
        return documents
    return tuple(
        Document(d.offset // length * padded + d.offset % length, d.length) for d in documents
    )


def with_positions(
    batch: dict[str, torch.Tensor], documents: tuple[Document, ...]
) -> dict[str, torch.Tensor]:
    """A whole batch with positions, which must be those that ``cu_seqlens`` describes where it has any.

    Args:
        batch: As given to the context.
        documents: Its documents.

    Raises:
        UserError: The positions are others: of slices, most likely.
    """
    given = batch.get("input_pos")
    if given is not None and batch.get("cu_seqlens") is None:
        return batch
    rows, length = batch["tokens"].shape
    positions = document_positions(documents, (rows, length), batch["tokens"].device)
    if given is None:
        return {**batch, "input_pos": positions.clamp(min=0)}
    real = positions >= 0
    if not torch.equal(given[real], positions[real].to(given.dtype)):
        raise UserError(
            "batch entry 'input_pos' does not count from 0 in each document that cu_seqlens describes; a"
            " batch that holds one rank's slices needs already_cut=True"
        )
    return batch


def slices_with_positions(
    batch: dict[str, torch.Tensor], layout: DocumentLayout, rank: int
) -> dict[str, torch.Tensor]:
    """A batch that is already cut, as one sequence ``[1, n]``, with positions.

    Args:
        batch: As given to the context.
        layout: Who holds what of it.
        rank: This context-parallel rank.

    Raises:
        UserError: The positions are not those of this rank's slices.
    """
    local = {key: batch[key].reshape(1, -1, *batch[key].shape[2:]) for key in cut_keys(batch)}
    expected = positions_of_rank(layout, rank).to(batch["tokens"].device)[None]
    real = expected >= 0
    given = local.setdefault("input_pos", expected.clamp(min=0))
    if not torch.equal(given[real], expected[real].to(given.dtype)):
        raise UserError(
            "batch entry 'input_pos' does not hold the positions of this rank's slices: already_cut=True is"
            " for batches of a data loader that cuts for the same context-parallel ranks"
        )
    return {**other_entries(batch), **local}
