"""A whole batch and its parts: padded or folded, cut for the ranks, and put together again.

Shape legend: b rows, s tokens of a row, cp ranks, n tokens of one rank with its padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.documents import (
    Document,
    document_positions,
    documents_of,
)
from torchtune_cp.distributed.context_parallel.entries import (
    SLICE_KEY,
    check_entries,
    cut_keys,
    other_entries,
    spread,
)
from torchtune_cp.distributed.context_parallel.layout import (
    IGNORE_INDEX,
    Layout,
    balanced_layout,
    even_layout,
    layout_of_slices,
    padded_length,
    slice_table,
    whole_layout,
)
from torchtune_cp.errors import UserError

Batch = dict[str, torch.Tensor]


def pad_batch(batch: Batch, divisor: int) -> Batch:
    """Copy a batch's sequence entries, padded at the end to a multiple of `divisor`.

    Args:
        batch: `tokens` [b, s] and optionally `labels`, `input_pos` and others [b, s, ...]; entries
            without a sequence are left out. Without `input_pos` the positions 0 .. s-1 are added.
        divisor: What the length must divide by.

    Returns:
        New contiguous tensors [b, L, ...]: labels padded with -100, positions counted on, others with 0.

    Raises:
        UserError: See `entries.check_entries`.
    """
    check_entries(batch)
    tokens = batch["tokens"]
    b, s = tokens.shape
    length = padded_length(s, divisor)
    extra = length - s
    padded: Batch = {}
    for key in cut_keys(batch):
        entry = batch[key]
        if key == "input_pos":
            tail = entry[:, -1:] + torch.arange(1, extra + 1, device=entry.device)
        else:
            # A padding token is never attended to by a real one (it stands behind all of them under a
            # causal mask) and its label is ignored, so any token id will do.
            fill = IGNORE_INDEX if key == "labels" else 0
            tail = entry.new_full((b, extra, *entry.shape[2:]), fill)
        padded[key] = torch.cat([entry, tail.to(entry.dtype)], dim=1).contiguous()
    if "input_pos" not in padded:
        positions = torch.arange(length, device=tokens.device)
        padded["input_pos"] = positions.expand(b, length).contiguous()
    return padded


def with_positions(batch: Batch, documents: tuple[Document, ...]) -> Batch:
    """A whole batch with positions, which must be those that `cu_seqlens` describes where it has any.

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
            f" batch that holds one rank's slices needs its entry '{SLICE_KEY}', too"
        )
    return batch


# --- the parts of a batch -------------------------------------------------------------------------


def slices_of(
    batch: Batch,
    cp: int,
    rank: int,
    mask: AttentionMask,
    *,
    heads_split: int = 1,
    multiple_of: int = 1,
) -> tuple[Batch, Layout]:
    """One rank's part of a batch of documents, and who holds what.

    A batch that says that it is cut already is only folded. A single rank keeps its rows, padded to a
    multiple of `multiple_of`; else the documents are one sequence [1, n], without the rows' padding.

    Args:
        batch: Accepted by `entries.check_entries`.
        cp: Context-parallel degree.
        rank: Whose part is wanted.
        mask: What is attended to within a document.
        heads_split: How many ranks share an attention rank's tokens; divides `cp`.
        multiple_of: What the tokens of one rank are padded to a multiple of.

    Returns:
        Entries [1, n, ...] (of a single rank [b, s, ...]), `input_pos` among them, and those without a
        sequence.
    """
    if SLICE_KEY in batch:
        layout = layout_of_slices(batch, cp, mask, heads_split=heads_split)
        return _folded(batch, layout, rank), layout
    documents = documents_of(batch)
    batch = with_positions(batch, documents)
    b, s = batch["tokens"].shape
    if cp == 1:
        if multiple_of > 1:
            batch = {**batch, **pad_batch(batch, multiple_of)}
            padded = batch["tokens"].size(1)
            documents = tuple(
                Document(d.offset // s * padded + d.offset % s, d.length) for d in documents
            )
            s = padded
        return batch, whole_layout(documents, (b, s), mask)
    layout = balanced_layout(
        documents, (b, s), cp, mask, heads_split=heads_split, multiple_of=multiple_of
    )
    return cut_batch(batch, layout, rank), layout


def _folded(batch: Batch, layout: Layout, rank: int) -> Batch:
    """A batch that is already cut, as one sequence `[1, n]`, with positions."""
    local = {key: batch[key].reshape(1, -1, *batch[key].shape[2:]) for key in cut_keys(batch)}
    expected = layout.positions(rank).to(batch["tokens"].device)[None]
    real = expected >= 0
    given = local.setdefault("input_pos", expected.clamp(min=0))
    if not torch.equal(given[real], expected[real].to(given.dtype)):
        raise UserError(
            "batch entry 'input_pos' does not hold the positions of this rank's slices: were they cut for"
            " another context-parallel rank?"
        )
    return {**other_entries(batch), **local}


def cut_batch(batch: Batch, layout: Layout, rank: int) -> Batch:
    """Copy one rank's tokens out of a batch.

    Args:
        batch: `tokens` and others [b, s, ...].
        layout: Who holds what.
        rank: Whose part is wanted.

    Returns:
        These entries as [rows, n / rows, ...], padding with the label -100 and else 0; and those without a
        sequence.
    """
    parts = _taken(batch, layout.places[rank], layout.rows)
    return {**other_entries(batch), **parts}


def _taken(batch: Batch, places: npt.NDArray[np.int64], rows: int) -> Batch:
    """The tokens at some places of a batch, in so many rows; -1 is padding."""
    at = torch.from_numpy(places).to(batch["tokens"].device)
    inside, padding = at.clamp(min=0), at < 0
    has_padding = bool((places < 0).any())
    taken = {}
    for key in cut_keys(batch):
        part = batch[key].flatten(0, 1).index_select(0, inside)
        if has_padding:
            part.masked_fill_(spread(padding, part), IGNORE_INDEX if key == "labels" else 0)
        taken[key] = part.unflatten(0, (rows, -1))
    return taken


def restore(layout: Layout, slices: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Put all ranks' parts together in the order of the batch; 0 where it has padding.

    Args:
        layout: Who holds what.
        slices: By rank, `[rows, .., n / rows, ..]` with the sequence at `dim`.
        dim: Not 0.

    Returns:
        `[b, .., s, ..]`, without the padding that the cut needed.
    """
    b, s = layout.shape
    index = layout.indices.flatten().to(slices[0].device)
    tokens_first = [part.movedim(dim, 1).flatten(0, 1) for part in slices]
    whole = torch.cat(tokens_first)
    flat = whole.new_zeros(b * s, *whole.shape[1:])
    flat[index[index >= 0]] = whole[index >= 0]
    by_row = flat.unflatten(0, (b, s))[:, : layout.seq_len]
    return by_row.movedim(1, dim)


# --- for data loaders -----------------------------------------------------------------------------


def _slices(
    batch: Batch, layout: Layout, places: npt.NDArray[np.int64], table: torch.Tensor
) -> list[Batch]:
    """All ranks' slices, cut at once: several times faster than one after the other."""
    parts = _taken(batch, places.reshape(-1), layout.ranks * layout.rows)
    by_rank = {key: part.chunk(layout.ranks) for key, part in parts.items()}
    for_all = other_entries(batch) | {
        "cu_seqlens": batch["cu_seqlens"],
        "cu_seqlens_padded": batch["cu_seqlens_padded"],
        SLICE_KEY: table,
    }
    return [
        {key: part[rank] for key, part in by_rank.items()} | for_all for rank in range(layout.ranks)
    ]


def _with_ends(batch: Batch) -> tuple[Batch, list[int]]:
    """A batch with `cu_seqlens` and `cu_seqlens_padded`, and which of those are not empty."""
    documents = documents_of(batch)
    batch = with_positions(batch, documents)
    ends = batch.get("cu_seqlens")
    if ends is not None:
        padded = batch.get("cu_seqlens_padded")
        batch = {**batch, "cu_seqlens_padded": ends if padded is None else padded}
        return batch, ends.diff().nonzero().flatten().tolist()
    lengths, starts = [d.length for d in documents], [d.offset for d in documents]
    first = int(bool(starts and starts[0]))  # padding before the first: an empty document
    if first:
        lengths, starts = [0, *lengths], [0, *starts]
    total = batch["tokens"].numel()
    batch = {key: entry for key, entry in batch.items() if key != "seq_lens"}
    batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    batch["cu_seqlens_padded"] = torch.tensor([*starts, total] if starts else [0])
    return batch, list(range(first, len(lengths)))


def balanced_slices(batch: Batch, cp: int, mask: AttentionMask) -> list[Batch]:
    """Cut a batch for all ranks by the work that its documents are.

    Args:
        batch: The whole batch of any collate function, `tokens` [b, s] and others. Padding behind the last
            document, where `cu_seqlens_padded` ends before the batch does, makes slices longer accordingly:
            a collate function that pads to one length gets slices of few lengths.
        cp: Context-parallel degree.
        mask: What the work is counted for.

    Returns:
        By rank: the entries [1, n, ...], those without a sequence, `cu_seqlens` and `cu_seqlens_padded`
        of the whole batch, and the entry by which `context_parallel` knows that the batch is cut.

    Raises:
        UserError: Malformed entries.
    """
    check_entries(batch)
    batch, numbers = _with_ends(batch)
    b, s = batch["tokens"].shape
    tail = b * s - int(batch["cu_seqlens_padded"][-1])
    at_least = -(-b * s // cp) if tail else 1
    layout = balanced_layout(documents_of(batch), (b, s), cp, mask, at_least=at_least)
    return _slices(batch, layout, layout.places, slice_table(layout, numbers))


def cut_for_ranks(batch: Batch, cp: int) -> list[Batch]:
    """Cut a batch document by document: rank r gets chunks r and `2 cp - 1 - r` of `2 cp` of each.

    Args:
        batch: The whole batch: `tokens` and every other entry [b, s, ...] is cut, those without a sequence
            go to all ranks. Documents must be padded one by one to multiples of `2 x cp`
            (`cu_seqlens_padded`); without `cu_seqlens` every row is one document, and is padded here.
        cp: Context-parallel degree.

    Returns:
        By rank: a batch of the same entries, those that were cut [b, s / cp], in the order of the documents,
        padding included; ready for `context_parallel`.

    Raises:
        UserError: Packed rows (`seq_lens`), malformed entries, or documents whose padded length does not
            divide by `2 x cp`.
    """
    check_entries(batch)
    divisor = 2 * cp if cp > 1 else 1
    if batch.get("seq_lens") is not None:
        raise UserError(
            "a packed batch needs its documents padded one by one to be cut head and tail: let the collate"
            " function give cu_seqlens and cu_seqlens_padded in place of seq_lens (as"
            " torchtune_cp.data.MaskedLMCollator does)"
        )
    if batch.get("cu_seqlens") is None and batch.get("cu_seqlens_padded") is None:
        rows, length = batch["tokens"].shape
        batch = {**batch, **pad_batch(batch, divisor)}
        row_ends = torch.arange(rows + 1)
        batch["cu_seqlens"] = row_ends * length
        batch["cu_seqlens_padded"] = row_ends * batch["tokens"].size(1)
    documents_of(batch)  # refuses what describes no documents of these tokens
    ends, padded_ends = batch["cu_seqlens"], batch.get("cu_seqlens_padded")
    padded_ends = ends if padded_ends is None else padded_ends
    padded = tuple(padded_ends.diff().tolist())
    b, s = batch["tokens"].shape
    try:
        # Padding is handed out with its document, and not seen by it.
        held = even_layout(padded, padded, (b, s), cp, AttentionMask(), rows=b)
        layout = even_layout(
            tuple(ends.diff().tolist()), padded, (b, s), cp, AttentionMask(), rows=b
        )
    except ValueError as error:
        raise UserError(
            f"a batch of {[b, s]} tokens with documents padded to {list(padded)} cannot be cut over {cp}"
            f" ranks: each must be a multiple of {divisor}"
        ) from error
    places = held.places.copy()
    places[places < 0] = np.arange(int(padded_ends[-1]), b * s)
    return _slices({**batch, "cu_seqlens_padded": padded_ends}, layout, places, slice_table(layout))
