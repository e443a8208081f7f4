"""Which positions of a sequence each context-parallel rank holds.

Shape legend: b batch, s sequence, L padded sequence, n this rank's slice (L / cp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch

from torchtune_cp.distributed.context_parallel.assignment import (
    Piece,
    Placed,
    assign,
    pairs_by_rank,
    placed,
)
from torchtune_cp.distributed.context_parallel.documents import (
    AttentionMask,
    Document,
    attention_pairs,
)
from torchtune_cp.distributed.context_parallel.entries import (
    check_entries,
    cut_keys,
    other_entries,
    spread,
)
from torchtune_cp.errors import UserError

IGNORE_INDEX = -100


def padded_length(seq_len: int, divisor: int) -> int:
    """Return the smallest multiple of ``divisor`` that is at least ``seq_len``."""
    return -(-seq_len // divisor) * divisor


def pad_batch(batch: dict[str, torch.Tensor], divisor: int) -> dict[str, torch.Tensor]:
    """Copy a batch's sequence entries, padded at the end to a multiple of ``divisor``.

    Args:
        batch: ``tokens`` [b, s] and optionally ``labels``, ``input_pos`` and others [b, s, ...]; entries
            without a sequence are left out. Without ``input_pos`` the positions 0 .. s-1 are added.
        divisor: What the length must divide by.

    Returns:
        New contiguous tensors [b, L, ...]: labels padded with -100, positions counted on, others with 0.

    Raises:
        UserError: See :func:`entries.check_entries`.
    """
    check_entries(batch)
    tokens = batch["tokens"]
    b, s = tokens.shape
    length = padded_length(s, divisor)
    extra = length - s
    padded: dict[str, torch.Tensor] = {}
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


def head_tail_indices(length: int, cp: int) -> torch.Tensor:
    """Which positions every rank holds under head-tail balance.

    A causal mask gives late positions more work than early ones. Cut into ``2 cp`` chunks, rank r
    takes chunk r and chunk ``2 cp - 1 - r``, so that all ranks do the same work (as in Llama 3,
    arXiv 2407.21783, section 3.3.2, and in torch's load balancer).

    Args:
        length: Padded sequence length, a multiple of ``2 cp``.
        cp: Context-parallel degree.

    Returns:
        [cp, length / cp] positions, row r for rank r, in the order in which it holds them.

    Raises:
        ValueError: ``length`` is not a multiple of ``2 cp``.
    """
    if length % (2 * cp) != 0:
        raise ValueError(f"head-tail balance needs a multiple of {2 * cp}, not {length}")
    chunks = torch.arange(length).view(2 * cp, length // (2 * cp))
    ranks = torch.arange(cp)
    return torch.cat([chunks[ranks], chunks[2 * cp - 1 - ranks]], dim=1)


def consecutive_indices(length: int, cp: int) -> torch.Tensor:
    """Which positions every rank holds where no balance is needed (bidirectional attention).

    Args:
        length: Padded sequence length, a multiple of ``cp``.
        cp: Context-parallel degree.

    Returns:
        [cp, length / cp] positions, row r for rank r.
    """
    return torch.arange(length).view(cp, length // cp)


@dataclass(frozen=True)
class SequenceLayout:
    """Every row of a batch cut the same way, whatever it holds; what torch's ring attention takes.

    Attributes:
        seq_len: Tokens of a row before padding.
        padded_len: Tokens of a row with it, a multiple of ``2 cp``.
        cp: Context-parallel degree.
        is_causal: Head-tail order, or consecutive slices.
        rows: Sequences in the batch.
        heads_split: 1: every rank has all heads.
    """

    seq_len: int
    padded_len: int
    cp: int
    is_causal: bool
    rows: int = 1
    heads_split: int = 1

    def pairs(self) -> list[int]:
        """Query-key pairs that are computed, by rank, padding included: all have the same."""
        length = self.padded_len
        whole = attention_pairs(0, length, length, AttentionMask(self.is_causal))
        return [self.rows * whole // self.cp] * self.cp

    def restore(self, slices: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Put all ranks' slices together in the order of the sequence, without the padding.

        Args:
            slices: By rank, each with ``padded_len / cp`` tokens along ``dim``.
            dim: The sequence dimension.
        """
        layout = head_tail_indices if self.is_causal else consecutive_indices
        order = torch.argsort(layout(self.padded_len, self.cp).flatten()).to(slices[0].device)
        return torch.cat(list(slices), dim).index_select(dim, order).narrow(dim, 0, self.seq_len)


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of all rows as one sequence ``[1, n]`` a rank, without the rows' padding.

    Attributes:
        documents: The documents of the batch.
        shape: ``(b, s)`` of the batch.
        mask: What is attended to within a document.
        pieces: What each attention rank holds: those of split documents first.
        heads_split: How many context-parallel ranks share what one attention rank holds, consecutive
            parts of it outside of attention and parts of the heads inside it (Ulysses); else 1.
        length: Tokens of one context-parallel rank with its padding.
        starts: Where each of the pieces lies among its attention rank's tokens; None: side by side, with
            the padding at the end.
    """

    documents: tuple[Document, ...]
    shape: tuple[int, int]
    mask: AttentionMask
    pieces: tuple[tuple[Piece, ...], ...]
    heads_split: int
    length: int
    starts: tuple[tuple[int, ...], ...] | None = None

    def placed(self, rank: int) -> list[Placed]:
        """The pieces of an attention rank and where they lie among its tokens."""
        if self.starts is None:
            return placed(self.pieces[rank])
        return list(map(Placed, self.pieces[rank], self.starts[rank]))

    @cached_property
    def side_by_side(self) -> bool:
        """Whether every rank has the pieces of each document side by side, as attention wants them."""
        return all(
            a.piece.document != b.piece.document or a.at + a.piece.stop - a.piece.start == b.at
            for rank in range(len(self.pieces))
            for a, b in pairwise(self.placed(rank))
        )

    def side_by_side_order(self, rank: int) -> torch.Tensor:
        """Which of its tokens an attention rank takes first, second, ...: pieces in order, then padding."""
        tokens = torch.zeros(self.heads_split * self.length, dtype=torch.bool)
        order = [torch.arange(at, at + p.stop - p.start) for p, at in self.placed(rank)]
        for part in order:
            tokens[part] = True
        return torch.cat([*order, (~tokens).nonzero().flatten()])

    def pairs(self) -> list[int]:
        """Query-key pairs that the mask lets through, by attention rank."""
        return pairs_by_rank(self.pieces, [d.length for d in self.documents], self.mask)

    @cached_property
    def indices(self) -> torch.Tensor:
        """Place in the batch (rows laid end to end) of every token, [cp, length]; -1 for padding."""
        rows = torch.full((len(self.pieces), self.heads_split * self.length), -1)
        for rank, row in enumerate(rows):
            for piece, at in self.placed(rank):
                size = piece.stop - piece.start
                first = self.documents[piece.document].offset + piece.start
                row[at : at + size] = torch.arange(first, first + size)
        return rows.view(-1, self.length)

    def restore(self, slices: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Put all ranks' slices together in the order of the batch; 0 where it has padding.

        Args:
            slices: By rank, each ``[.., 1, n, ..]`` with n at ``dim`` and the 1 before it or at dimension 0.
            dim: The sequence dimension.

        Returns:
            ``[b, .., s, ..]``: dimension 0 has the rows again.
        """
        rows, row_length = self.shape
        index = self.indices.flatten().to(slices[0].device)
        whole = torch.cat(list(slices), dim).movedim(dim, 0)
        flat = whole.new_zeros(rows * row_length, *whole.shape[1:])
        flat[index[index >= 0]] = whole[index >= 0]
        # [b, s, 1, ..]: the batch of one that every slice had makes way for the rows.
        by_row = flat.view(rows, row_length, *flat.shape[1:]).squeeze(2)
        return by_row.movedim(1, dim)


@lru_cache(maxsize=64)
def document_layout(
    documents: tuple[Document, ...],
    shape: tuple[int, int],
    cp: int,
    mask: AttentionMask,
    *,
    heads_split: int = 1,
    multiple_of: int = 1,
) -> DocumentLayout:
    """Decide which rank holds what of a batch of documents; see :func:`assignment.assign`.

    Args:
        documents: From :func:`documents.documents_of`.
        shape: ``(b, s)`` of the batch.
        cp: Context-parallel degree.
        mask: What is attended to within a document.
        heads_split: How many ranks share an attention rank's tokens; divides ``cp``.
        multiple_of: What the tokens of one rank are padded to a multiple of.
    """
    pieces = assign([d.length for d in documents], cp // heads_split, mask)
    most = max(sum(p.stop - p.start for p in own) for own in pieces)
    # An empty batch still goes through the model: the other data-parallel ranks wait for this one.
    length = padded_length(max(most, 1), multiple_of * heads_split) // heads_split
    return DocumentLayout(documents, shape, mask, tuple(map(tuple, pieces)), heads_split, length)


@lru_cache(maxsize=64)
def whole_rows(
    documents: tuple[Document, ...], shape: tuple[int, int], mask: AttentionMask
) -> DocumentLayout:
    """The layout of a single rank that keeps its rows as they are, padding included.

    Args:
        documents: From :func:`documents.documents_of`.
        shape: ``(b, s)`` of the batch.
        mask: What is attended to within a document.
    """
    pieces = tuple(Piece(number, 0, d.length) for number, d in enumerate(documents))
    starts = tuple(d.offset for d in documents)
    return DocumentLayout(documents, shape, mask, (pieces,), 1, shape[0] * shape[1], (starts,))


def head_tail_places(padded: Sequence[int], cp: int, tail: int = 0) -> torch.Tensor:
    """Which places of padded documents, laid end to end, every rank holds: of each its head and tail.

    Args:
        padded: Tokens of each document with its padding, multiples of ``2 cp`` (of 1 with ``cp`` 1).
        cp: Context-parallel degree.
        tail: Padding behind the last document, a multiple of ``cp``; consecutive parts of it are given out.

    Returns:
        [cp, (sum of padded + tail) / cp] places, row r for rank r: chunks r and ``2 cp - 1 - r`` of the
        first document, then of the second, ...

    Raises:
        ValueError: A length that does not divide.
    """
    # numpy: it takes a third of torch's time here, and a data loader waits for this with every batch.
    lengths = np.asarray(list(padded), dtype=np.int64)
    total = int(lengths.sum())
    if cp == 1:
        return torch.arange(total + tail)[None]
    if (lengths % (2 * cp)).any() or tail % cp:
        raise ValueError(f"lengths {list(padded)} and {tail}: not multiples of {2 * cp} and {cp}")
    chunk = lengths // (2 * cp)
    offset = lengths.cumsum() - lengths
    sizes = chunk.repeat(2)
    # What is to be added to the places of an array that holds all chunks of a rank one behind the other.
    before = sizes.cumsum() - sizes
    places = np.empty((cp, (total + tail) // cp), dtype=np.int64)
    for rank, own in enumerate(places):
        head, last = offset + rank * chunk, offset + (2 * cp - 1 - rank) * chunk
        own[: total // cp] = (np.stack([head, last], axis=1).ravel() - before).repeat(sizes)
        own[: total // cp] += np.arange(total // cp)
    places[:, total // cp :] = np.arange(total, total + tail).reshape(cp, -1)
    return torch.from_numpy(places)


@lru_cache(maxsize=64)
def head_tail_layout(
    lengths: tuple[int, ...],
    padded: tuple[int, ...],
    shape: tuple[int, int],
    cp: int,
    mask: AttentionMask,
    *,
    heads_split: int = 1,
) -> DocumentLayout:
    """The layout of :func:`head_tail_places`: of every padded document its head and its tail, in order.

    Padding at the end of a document lies between the documents on the ranks that hold it, and belongs to
    none of them: nothing attends to it.

    Args:
        lengths: Tokens of each document without its padding.
        padded: Tokens of each document with it, multiples of ``2 cp`` (of 1 with ``cp`` 1).
        shape: ``(b, s)`` of the whole padded batch, whose rows laid end to end are the padded documents,
            possibly with more padding behind the last.
        cp: Context-parallel degree.
        mask: What is attended to within a document.
        heads_split: How many ranks share an attention rank's tokens; divides ``cp``.
    """
    length = shape[0] * shape[1] // cp
    chunks = 2 * cp if cp > 1 else 1
    documents, held = [], [[] for _ in range(cp)]  # type: ignore[var-annotated]
    offset = at = 0
    for number, (real, whole) in enumerate(zip(lengths, padded, strict=True)):
        documents.append(Document(offset, real))
        size = whole // chunks
        for rank in range(cp):
            place = at
            for chunk in (rank, chunks - 1 - rank) if cp > 1 else (0,):
                piece = Piece(number, chunk * size, min((chunk + 1) * size, real))
                if piece.start < piece.stop:
                    held[rank].append(Placed(piece, place))
                place += size
        offset += whole
        at += whole // cp
    pieces, starts = [], []
    for first in range(0, cp, heads_split):
        own = [
            Placed(piece, number * length + at)
            for number, rank in enumerate(range(first, first + heads_split))
            for piece, at in held[rank]
        ]
        own.sort()
        pieces.append(tuple(piece for piece, _ in own))
        starts.append(tuple(at for _, at in own))
    return DocumentLayout(
        tuple(documents), shape, mask, tuple(pieces), heads_split, length, tuple(starts)
    )


def layout_of_slices(
    batch: dict[str, torch.Tensor], cp: int, mask: AttentionMask, *, heads_split: int = 1
) -> DocumentLayout:
    """Read off a batch that was cut document by document, head and tail, who holds what.

    Args:
        batch: One rank's slices: ``tokens`` [b, n], and for the whole batch ``cu_seqlens`` and
            ``cu_seqlens_padded`` [documents + 1], integers: where each document ends, counted without and
            with the padding at its end; both begin with 0. The padded documents are the whole batch's rows
            laid end to end, possibly with more padding behind the last one.
        cp: Context-parallel degree.
        mask: What is attended to within a document.
        heads_split: See :func:`head_tail_layout`.

    Raises:
        UserError: Entries are missing or do not fit the number of tokens.
    """
    missing = [key for key in ("cu_seqlens", "cu_seqlens_padded") if batch.get(key) is None]
    if missing:
        raise UserError(
            f"a batch that is already cut needs {' and '.join(missing)} [documents + 1]; given:"
            f" {sorted(batch)}"
        )
    ends, padded_ends = batch["cu_seqlens"], batch["cu_seqlens_padded"]
    rows, n = batch["tokens"].shape
    lengths, padded = ends.diff().tolist(), padded_ends.diff().tolist()
    divisor = 2 * cp if cp > 1 else 1
    if (
        len(lengths) != len(padded)
        or any(real > whole for real, whole in zip(lengths, padded, strict=True))
        or any(whole % divisor for whole in padded)
        or sum(padded) > rows * n * cp
    ):
        raise UserError(
            f"cu_seqlens {ends.tolist()} and cu_seqlens_padded {padded_ends.tolist()} do not describe"
            f" documents padded to multiples of {divisor} in {rows} x {n} tokens on each of {cp} ranks"
        )
    shape = (rows, n * cp)
    return head_tail_layout(tuple(lengths), tuple(padded), shape, cp, mask, heads_split=heads_split)


def cut_batch(
    batch: dict[str, torch.Tensor], layout: DocumentLayout, rank: int
) -> dict[str, torch.Tensor]:
    """Copy one rank's tokens out of a batch.

    Args:
        batch: ``tokens``, ``input_pos`` and optionally ``labels`` and others [b, s, ...].
        layout: Who holds what.
        rank: Whose part is wanted.

    Returns:
        These entries as [1, n, ...], padding with the label -100 and else 0; and those without a sequence.
    """
    at = layout.indices[rank].to(batch["tokens"].device)
    local = other_entries(batch)
    for key in cut_keys(batch):
        taken = batch[key].flatten(0, 1)[at.clamp(min=0)]
        fill = IGNORE_INDEX if key == "labels" else 0
        local[key] = taken.masked_fill_(spread(at < 0, taken), fill)[None]
    return local


def positions_of_rank(layout: DocumentLayout, rank: int) -> torch.Tensor:
    """Each token's position in its document, int64 [n]; -1 on padding.

    Args:
        layout: Who holds what.
        rank: A context-parallel rank.
    """
    whole = np.full(layout.heads_split * layout.length, -1, dtype=np.int64)
    for piece, at in layout.placed(rank // layout.heads_split):
        whole[at : at + piece.stop - piece.start] = np.arange(piece.start, piece.stop)
    return torch.from_numpy(whole.reshape(layout.heads_split, -1)[rank % layout.heads_split])
