"""Who holds what of a batch.

A batch is documents (a row without further marks is one), and a layout gives pieces of them to the ranks:

    balanced_layout   by the work: short documents whole, long ones in equal parts (`assignment`)
    even_layout       the same parts of every document, as torch's ring and TransformerEngine have it
    whole_layout      all of it on a single rank, rows as they are
    layout_of_slices  as a data loader has cut it

Shape legend: b rows, s tokens of a row, cp ranks, n tokens of one rank with its padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.assignment import (
    Piece,
    Placed,
    assign,
    pairs_by_rank,
    placed,
    split_documents,
)
from torchtune_cp.distributed.context_parallel.documents import Document
from torchtune_cp.distributed.context_parallel.entries import SLICE_KEY
from torchtune_cp.errors import UserError

IGNORE_INDEX = -100

#: Layouts of batches that come again, as in validation.
_REMEMBERED = 16


def padded_length(seq_len: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is at least `seq_len`."""
    return -(-seq_len // divisor) * divisor


@dataclass(frozen=True)
class Layout:
    """What each rank holds of a batch.

    Attributes:
        documents: The documents of the batch.
        shape: `(b, s)` of the batch.
        mask: What the ranks' work is counted for.
        pieces: What each attention rank holds: those of split documents first.
        heads_split: How many context-parallel ranks share what one attention rank holds, consecutive
            parts of it outside of attention and parts of the heads inside it (Ulysses); else 1.
        length: n.
        starts: Where each of the pieces stands among its attention rank's tokens; None: side by side, with
            the padding at the end.
        rows: In how many rows a rank holds its n tokens.
        seq_len: Tokens of a row before it was padded to s for the cut; None: it was not.
    """

    documents: tuple[Document, ...]
    shape: tuple[int, int]
    mask: AttentionMask
    pieces: tuple[tuple[Piece, ...], ...]
    heads_split: int
    length: int
    starts: tuple[tuple[int, ...], ...] | None = None
    rows: int = 1
    seq_len: int | None = None

    @property
    def ranks(self) -> int:
        """Context-parallel ranks."""
        return len(self.pieces) * self.heads_split

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max((d.length for d in self.documents), default=0)

    def placed(self, rank: int) -> list[Placed]:
        """The pieces of an attention rank and where they stand among its tokens."""
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
        is_token = np.zeros(self.heads_split * self.length, dtype=bool)
        order = [np.arange(at, at + p.stop - p.start) for p, at in self.placed(rank)]
        for part in order:
            is_token[part] = True
        return torch.from_numpy(np.concatenate([*order, np.flatnonzero(~is_token)]))

    def pairs(self, mask: AttentionMask | None = None) -> list[int]:
        """Query-key pairs that a mask lets through, by attention rank; by default the layout's mask."""
        return pairs_by_rank(self.pieces, [d.length for d in self.documents], mask or self.mask)

    def _of_tokens(self, rank: int, first: Sequence[int] | None) -> npt.NDArray[np.int64]:
        """Positions of an attention rank's tokens in their documents, counted from `first` where given.

        [heads_split, n]; -1 for padding.
        """
        numbers = np.full(self.heads_split * self.length, -1, np.int64)
        for piece, at in self.placed(rank):
            start = piece.start + (0 if first is None else first[piece.document])
            size = piece.stop - piece.start
            numbers[at : at + size] = np.arange(start, start + size)
        return numbers.reshape(self.heads_split, self.length)

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """Place in the batch (rows laid end to end) of every token, [cp, n]; -1 for padding."""
        offsets = [d.offset for d in self.documents]
        return np.concatenate([self._of_tokens(r, offsets) for r in range(len(self.pieces))])

    @property
    def indices(self) -> torch.Tensor:
        """`places` as a tensor."""
        return torch.from_numpy(self.places)

    def positions(self, rank: int) -> torch.Tensor:
        """Position in its document of every token of a context-parallel rank, [n]; -1 on padding."""
        own = self._of_tokens(rank // self.heads_split, None)
        return torch.from_numpy(own[rank % self.heads_split])

    def sharing_heads(self, heads_split: int) -> Layout:
        """The same tokens on every rank, of which groups of consecutive ranks attend as one (Ulysses).

        Args:
            heads_split: Ranks in a group; divides the ranks.
        """
        assert self.heads_split == 1
        if heads_split == 1:
            return self
        pieces: list[list[Piece]] = []
        starts: list[dict[Piece, int]] = []
        for first in range(0, len(self.pieces), heads_split):
            held = {
                piece: number * self.length + at
                for number in range(heads_split)
                for piece, at in self.placed(first + number)
            }
            pieces.append(list(held))
            starts.append(held)
        split = split_documents(pieces)
        ordered = [sorted(own, key=lambda p: (p.document not in split, p)) for own in pieces]
        return replace(
            self,
            pieces=tuple(map(tuple, ordered)),
            starts=tuple(
                tuple(at[p] for p in own) for own, at in zip(ordered, starts, strict=True)
            ),
            heads_split=heads_split,
        )


@lru_cache(maxsize=_REMEMBERED)
def balanced_layout(
    documents: tuple[Document, ...],
    shape: tuple[int, int],
    cp: int,
    mask: AttentionMask,
    *,
    heads_split: int = 1,
    multiple_of: int = 1,
    at_least: int = 1,
) -> Layout:
    """Give a batch's documents to the ranks by the work that they are; see `assignment.assign`.

    Args:
        documents: From `documents.documents_of`.
        shape: `(b, s)` of the batch.
        cp: Context-parallel degree.
        mask: What is attended to within a document.
        heads_split: How many ranks share an attention rank's tokens; divides `cp`.
        multiple_of: What the tokens of one rank are padded to a multiple of.
        at_least: And to at least so many. An empty batch still goes through the model: the other
            data-parallel ranks wait for this one.
    """
    pieces = assign([d.length for d in documents], cp // heads_split, mask)
    most = max(sum(p.stop - p.start for p in own) for own in pieces)
    length = padded_length(max(most, at_least * heads_split), multiple_of * heads_split)
    return Layout(
        documents, shape, mask, tuple(map(tuple, pieces)), heads_split, length // heads_split
    )


@lru_cache(maxsize=_REMEMBERED)
def whole_layout(
    documents: tuple[Document, ...], shape: tuple[int, int], mask: AttentionMask
) -> Layout:
    """A single rank that keeps its rows as they are, padding included.

    Args:
        documents: From `documents.documents_of`.
        shape: `(b, s)` of the batch.
        mask: What is attended to within a document.
    """
    pieces = tuple(Piece(number, 0, d.length) for number, d in enumerate(documents))
    starts = tuple(d.offset for d in documents)
    return Layout(
        documents, shape, mask, (pieces,), 1, shape[0] * shape[1], (starts,), rows=shape[0]
    )


@lru_cache(maxsize=_REMEMBERED)
def even_layout(
    lengths: tuple[int, ...],
    padded: tuple[int, ...],
    shape: tuple[int, int],
    cp: int,
    mask: AttentionMask,
    *,
    rows: int = 1,
    seq_len: int | None = None,
) -> Layout:
    """The same parts of every padded document, one document behind the other.

    A causal mask gives late positions more work than early ones. Cut into `2 cp` chunks, rank r takes chunk
    r and chunk `2 cp - 1 - r` (as in Llama 3, arXiv 2407.21783, section 3.3.2). So it is for bidirectional
    attention over documents; whole rows of it (`seq_len`) are cut into `cp` chunks, as torch's ring does.

    Padding at the end of a document stands between the documents on the ranks that hold it, and belongs to
    none of them: nothing attends to it.

    Args:
        lengths: Tokens of each document without its padding.
        padded: Tokens of each document with it, multiples of `2 cp` (of 1 with `cp` 1).
        shape: `(b, s)` of the whole padded batch, whose rows laid end to end are the padded documents,
            possibly with more padding behind the last, whose consecutive parts are given out.
        cp: Context-parallel degree.
        mask: What is attended to within a document.
        rows: In how many rows a rank holds its part.
        seq_len: See `Layout`.

    Raises:
        ValueError: A length that does not divide.
    """
    head_tail = mask.is_causal or seq_len is None
    chunks = 2 * cp if head_tail and cp > 1 else cp
    total = shape[0] * shape[1]
    if any(whole % chunks for whole in padded) or total % cp:
        raise ValueError(f"lengths {list(padded)} of {total}: not multiples of {chunks}")
    documents: list[Document] = []
    pieces: list[list[Piece]] = [[] for _ in range(cp)]
    starts: list[list[int]] = [[] for _ in range(cp)]
    offset = at = 0
    for number, (real, whole) in enumerate(zip(lengths, padded, strict=True)):
        documents.append(Document(offset, real))
        size = whole // chunks
        for rank in range(cp):
            place = at
            for chunk in (rank, chunks - 1 - rank) if chunks > cp else (rank,):
                piece = Piece(number, chunk * size, min((chunk + 1) * size, real))
                if piece.start < piece.stop:
                    pieces[rank].append(piece)
                    starts[rank].append(place)
                place += size
        offset += whole
        at += whole // cp
    return Layout(
        tuple(documents),
        shape,
        mask,
        tuple(map(tuple, pieces)),
        1,
        total // cp,
        tuple(map(tuple, starts)),
        rows=rows,
        seq_len=seq_len,
    )


def ring_layout(shape: tuple[int, int], padded: int, cp: int, *, is_causal: bool) -> Layout:
    """Every row cut the same way, whatever it holds: what torch's ring attention takes.

    Args:
        shape: `(b, s)` before padding.
        padded: Tokens of a row with padding, which counts as part of its row.
        cp: Context-parallel degree.
        is_causal: Head-tail order, or consecutive parts.
    """
    rows, seq_len = shape
    lengths = (padded,) * rows
    mask = AttentionMask(is_causal)
    return even_layout(lengths, lengths, (rows, padded), cp, mask, rows=rows, seq_len=seq_len)


def slice_table(layout: Layout, numbers: Sequence[int] | None = None) -> torch.Tensor:
    """What a layout says beside the documents, as an entry of a rank's slices.

    Args:
        layout: Without shared heads.
        numbers: Which of the batch's `cu_seqlens` each document is; None: all are in the layout.

    Returns:
        int64 [1 + pieces, 5]: `(cp, n, b, s, rows)`, then of each piece rank, document, first position, one
        behind the last, and its place among the rank's tokens.
    """
    rows: list[Iterable[int]] = [(layout.ranks, layout.length, *layout.shape, layout.rows)]
    rows += [
        (rank, p.document if numbers is None else numbers[p.document], p.start, p.stop, at)
        for rank in range(layout.ranks)
        for p, at in layout.placed(rank)
    ]
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def layout_of_slices(
    batch: dict[str, torch.Tensor], cp: int, mask: AttentionMask, *, heads_split: int = 1
) -> Layout:
    """Read off one rank's slices who holds what.

    Args:
        batch: `tokens` of n elements, the whole batch's `cu_seqlens` and `cu_seqlens_padded` [documents
            + 1] (where each document ends without and with the padding behind it), and what
            `slice_table` gave.
        cp: Context-parallel degree.
        mask: What is attended to within a document.
        heads_split: See `Layout`.

    Raises:
        UserError: Entries are missing or do not fit each other, or slices for other ranks.
    """
    missing = [key for key in ("cu_seqlens", "cu_seqlens_padded") if batch.get(key) is None]
    if missing:
        raise UserError(
            f"a batch that is already cut needs {' and '.join(missing)} [documents + 1]; given:"
            f" {sorted(batch)}"
        )
    table, tokens = batch[SLICE_KEY], batch["tokens"].numel()
    if table.ndim != 2 or table.size(1) != 5 or table.is_floating_point():
        raise UserError(
            f"batch entry '{SLICE_KEY}' is {table.dtype} {list(table.shape)}: keep it as the data loader"
            " gave it"
        )
    (cut_for, length, b, s, rows), *held = table.tolist()
    if cut_for != cp:
        raise UserError(
            f"the batch was cut for {cut_for} context-parallel ranks, but cp_mesh has {cp}: build the"
            " data loader for the same mesh"
        )
    starts, lengths = batch["cu_seqlens_padded"].tolist(), batch["cu_seqlens"].diff().tolist()
    if (
        tokens != length
        or len(starts) != len(lengths) + 1
        or any(
            not 0 <= number < len(lengths) or stop > lengths[number]
            for _, number, _, stop, _ in held
        )
    ):
        raise UserError(
            f"batch entries 'cu_seqlens' ({len(lengths)} documents) and '{SLICE_KEY}' ({length} tokens of"
            f" this rank) do not describe these slices of {tokens} tokens"
        )
    pieces: list[list[Piece]] = [[] for _ in range(cp)]
    places: list[list[int]] = [[] for _ in range(cp)]
    for rank, number, start, stop, at in held:
        pieces[rank].append(Piece(number, start, stop))
        places[rank].append(at)
    layout = Layout(
        tuple(map(Document, starts[:-1], lengths)),
        (b, s),
        mask,
        tuple(map(tuple, pieces)),
        1,
        length,
        tuple(map(tuple, places)),
        rows=rows,
    )
    return layout.sharing_heads(heads_split)
