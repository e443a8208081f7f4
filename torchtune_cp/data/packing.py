"""Which documents, or parts of them, share a pack: decided from their lengths alone.

Nothing here knows of ranks, meshes or seeds, so that every run of the same data has the same packs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtune_cp.errors import UserError

STRATEGIES = ("greedy", "best_fit")

Int64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Packs:
    """The composition of all packs: pack p is the pieces `bounds[p]` to `bounds[p + 1]`, in order.

    Attributes:
        document: [pieces] the document that each piece is cut from.
        start: [pieces] where the piece begins in the document's tokens.
        length: [pieces] its tokens, at least 1.
        bounds: [packs + 1] the first piece of each pack, and the number of pieces.
    """

    document: Int64
    start: Int64
    length: Int64
    bounds: Int64

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.bounds) - 1

    def pieces(self, pack: int) -> Iterator[tuple[int, int, int]]:
        """(document, start, length) of each piece of a pack."""
        part = slice(self.bounds[pack], self.bounds[pack + 1])
        yield from zip(
            self.document[part].tolist(),
            self.start[part].tolist(),
            self.length[part].tolist(),
            strict=True,
        )


def pack_documents(
    lengths: Int64, max_seq_len: int, *, strategy: str = "greedy", split_across_pack: bool = False
) -> Packs:
    """Spread documents over packs of at most `max_seq_len` tokens.

    A document that is longer than a pack is cut into pieces of `max_seq_len` tokens and a rest.

    `greedy` keeps the order. With `split_across_pack`, the documents are one long run of tokens that is
    cut every `max_seq_len` tokens, so that all packs but the last are full; without, a piece that does
    not fit into the pack at hand begins the next one. Both as in torchtune.

    `best_fit` goes through the pieces from the longest to the shortest and puts each into the pack that
    it leaves the least room in. Best-fit decreasing needs at most 11/9 of the fewest possible packs + 4
    (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms",
    1974), and cuts no document that would fit into a pack (Ding et al., "Fewer truncations improve
    language modeling", 2024, arXiv 2404.10830). Should keeping the order need fewer packs, which takes
    a lucky order, it is kept. Within a pack the pieces, and the packs by their first piece, follow the
    order of the documents.

    Args:
        lengths: [documents] tokens of each document; one of 0 tokens is in no pack.
        max_seq_len: The most tokens of a pack.
        strategy: `"greedy"` or `"best_fit"`.
        split_across_pack: Whether `greedy` may cut a document that would fit into a pack.

    Raises:
        UserError: An unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise UserError(
            f"dataset.packing_strategy={strategy!r} is not known; allowed: {', '.join(STRATEGIES)}"
        )
    lengths = np.asarray(lengths, dtype=np.int64)
    if strategy == "greedy" and split_across_pack:
        return _cut_every(lengths, max_seq_len)
    pieces = _cut_long(lengths, max_seq_len)
    in_order = _next_fit(pieces[2], max_seq_len)
    if strategy == "greedy":
        return Packs(*pieces, in_order)
    pack_of, count = _best_fit_decreasing(pieces[2], max_seq_len)
    if count > len(in_order) - 1:
        return Packs(*pieces, in_order)
    # Packs numbered by their first piece, then the pieces grouped by pack, each group in order.
    _, first = np.unique(pack_of, return_index=True)
    number = np.empty(count, dtype=np.int64)
    number[np.argsort(first)] = np.arange(count)
    order = np.argsort(number[pack_of], kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(number[pack_of], minlength=count))])
    document, start, length = (entry[order] for entry in pieces)
    return Packs(document, start, length, bounds.astype(np.int64))


def _cut_every(lengths: Int64, size: int) -> Packs:
    """All documents one behind the other, cut at their ends and every `size` tokens."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.unique(np.concatenate([[0], ends, np.arange(0, total, size)])).astype(np.int64)
    begin = cuts[:-1]
    document = np.searchsorted(ends, begin, side="right")
    start = begin - (ends - lengths)[document]
    bounds = np.append(np.searchsorted(begin, np.arange(0, total, size)), len(begin))
    return Packs(document, start, np.diff(cuts), bounds.astype(np.int64))


def _cut_long(lengths: Int64, size: int) -> tuple[Int64, Int64, Int64]:
    """(document, start, length) of the pieces of at most `size` tokens, in order."""
    count = -(-lengths // size)
    document = np.repeat(np.arange(len(lengths)), count)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    start = nth * size
    return document, start, np.minimum(lengths[document] - start, size)


def _next_fit(lengths: Int64, size: int) -> Int64:
    """Bounds of packs that take pieces in order until the next one does not fit."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    bounds = [0]
    while bounds[-1] < len(lengths):
        bounds.append(int(np.searchsorted(ends, ends[bounds[-1]] + size, side="right")) - 1)
    return np.asarray(bounds, dtype=np.int64)


def _best_fit_decreasing(lengths: Int64, size: int) -> tuple[Int64, int]:
    """The pack of each piece, and the number of packs.

    Open packs are kept by the room that is left in them. There are at most `size` different amounts of
    it, so that finding the tightest takes O(log size).
    """
    pack_of = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # the different amounts of room, ascending
    packs: dict[int, list[int]] = {}  # and the packs that have each
    count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = count, size
            count += 1
        else:
            room = rooms[place]
            pack = packs[room].pop()
            if not packs[room]:
                del packs[room], rooms[place]
        pack_of[piece] = pack
        left = room - length
        if left > 0:
            if left not in packs:
                packs[left] = []
                insort(rooms, left)
            packs[left].append(pack)
    return pack_of, count
