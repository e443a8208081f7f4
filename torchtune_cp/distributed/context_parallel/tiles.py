"""Which queries meet which keys, as rectangles that an attention kernel can do in one call.

A tile's mask is written as flash attention writes it: with the last query aligned to the last key, query
i of `nq` sees key j of `nk` where `-left <= j - (i + nk - nq) <= right` (None: no limit). Everything
this project distributes comes out as such tiles: whole documents, chunks against earlier chunks, windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.assignment import Piece, Placed


class Tile(NamedTuple):
    """Consecutive queries against consecutive keys.

    Attributes:
        q: First query in the buffer of queries.
        nq: Number of queries; each of them sees a key.
        k: First key in the buffer of keys.
        nk: Number of keys; each of them is seen.
        left: How far before the aligned key a query sees; None without limit.
        right: How far behind it.
    """

    q: int
    nq: int
    k: int
    nk: int
    left: int | None = None
    right: int | None = None


def _by_document(pieces: Sequence[Placed]) -> dict[int, list[Placed]]:
    return {number: list(run) for number, run in groupby(pieces, key=lambda p: p.piece.document)}


def _size(run: Sequence[Placed]) -> int:
    return sum(p.piece.stop - p.piece.start for p in run)


def _banded(query: Placed, key: Placed, mask: AttentionMask) -> Tile | None:
    """The tile of two pieces under a mask of any kind, cut to what sees and is seen."""
    before = (mask.window or 1 << 62) - 1
    behind = 0 if mask.is_causal else before
    a, b = query.piece.start, query.piece.stop
    c, d = key.piece.start, key.piece.stop
    c, d = max(c, a - before), min(d, b + behind)
    a, b = max(a, c - behind), min(b, d + before)
    if a >= b or c >= d:
        return None
    left, right = before + d - b, behind + b - d
    return Tile(
        query.at + a - query.piece.start,
        b - a,
        key.at + c - key.piece.start,
        d - c,
        left if left < d - c - 1 else None,
        right if right < b - a - 1 else None,
    )


def _causal(queries: Sequence[Placed], keys: Sequence[Placed]) -> Iterator[Tile]:
    """The tiles of one document without a window: the fewest that do."""
    if [p.piece for p in queries] == [p.piece for p in keys]:
        # In increasing positions, "the same place or an earlier one" is "the same token or an earlier".
        size = _size(queries)
        yield Tile(queries[0].at, size, keys[0].at, size, None, 0 if size > 1 else None)
        return
    pending: Tile | None = None  # queries that see the same keys, all of them, are one tile
    for query in queries:
        a, b = query.piece.start, query.piece.stop
        earlier = _size([p for p in keys if p.piece.stop <= a])
        meeting = [p for p in keys if p.piece.start < b and p.piece.stop > a]
        if meeting:
            (key,) = meeting
            assert key.piece.start <= a < b <= key.piece.stop, "pieces overlap in part"
            count = earlier + b - key.piece.start
            yield Tile(query.at, b - a, keys[0].at, count, None, 0 if b - a > 1 else None)
        elif earlier:
            if pending is not None and pending.nk == earlier:
                pending = pending._replace(nq=pending.nq + b - a)
            else:
                if pending is not None:
                    yield pending
                pending = Tile(query.at, b - a, keys[0].at, earlier)
    if pending is not None:
        yield pending


def _in_chunks(pieces: Sequence[Placed], chunk: int, most: int) -> list[Placed]:
    """The pieces as those of documents of one chunk each: a chunk sees no other, as a document does not."""
    cut = []
    for piece, at in pieces:
        for number in range(piece.start // chunk, -(-piece.stop // chunk)):
            first = number * chunk
            start, stop = max(piece.start, first), min(piece.stop, first + chunk)
            part = Piece(piece.document * most + number, start - first, stop - first)
            cut.append(Placed(part, at + start - piece.start))
    return cut


def tiles_of(
    queries: Sequence[Placed],
    keys: Sequence[Placed],
    lengths: Mapping[int, int] | Sequence[int],
    mask: AttentionMask,
) -> list[Tile]:
    """Cut the attention between two buffers into tiles.

    Args:
        queries: The pieces in the buffer of queries; those of a document side by side, in order.
        keys: Likewise for keys and values.
        lengths: Tokens of each document.
        mask: What is attended to within a document.

    Returns:
        Tiles that hold every query-key pair of the mask exactly once.
    """
    if mask.chunk is not None:
        sizes = lengths if isinstance(lengths, Mapping) else dict(enumerate(lengths))
        most = -(-max(sizes.values(), default=1) // mask.chunk)
        queries, keys = (_in_chunks(pieces, mask.chunk, most) for pieces in (queries, keys))
        lengths = {
            number * most + place: min(mask.chunk, length - place * mask.chunk)
            for number, length in sizes.items()
            for place in range(-(-length // mask.chunk))
        }
        mask = AttentionMask(mask.is_causal, mask.window)
    of_key = _by_document(keys)
    tiles: list[Tile] = []
    for number, own in _by_document(queries).items():
        others = of_key.get(number)
        if others is None:
            continue
        within = mask.within(lengths[number])
        if within.window is not None:
            banded = (_banded(q, k, within) for q in own for k in others)
            tiles += [tile for tile in banded if tile is not None]
        elif within.is_causal:
            tiles += _causal(own, others)
        else:
            tiles.append(Tile(own[0].at, _size(own), others[0].at, _size(others)))
    return tiles


def visible(nq: int, nk: int, left: int | None, right: int | None) -> torch.Tensor:
    """The mask of a tile written out, `[nq, nk]` bool, True where a query sees a key."""
    distance = torch.arange(nk) - (torch.arange(nq) + nk - nq)[:, None]
    seen = torch.ones(nq, nk, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


#: Queries in one piece of a tile with a window: half a window costs a quarter of work that is masked away.
_LEAST_BLOCK, _LARGEST_BLOCK = 64, 1024


#: torch's CPU kernel does the keys of a causal square in blocks of 512 and skips those that no query of a
#: block sees, so a small square is done whole. Halves of at least this many queries, two squares and the
#: rectangle between them, are faster than the square as long as it is not longer than the other number.
_LEAST_HALF, _LONGEST_HALVED = 128, 4096


def _halves(square: Tile) -> list[Tile]:
    """Cut a square causal tile until what the kernel does in vain is small."""
    q, n, k, _, _, right = square
    if not 2 * _LEAST_HALF <= n <= _LONGEST_HALVED:
        return [square]
    half = n // 2
    before = _halves(Tile(q, half, k, half, None, right))
    behind = _halves(Tile(q + half, n - half, k + half, n - half, None, right))
    return [*before, Tile(q + half, n - half, k, half), *behind]


def square_tiles(tile: Tile) -> list[Tile]:
    """Cut a tile into ones for a kernel that knows full, square causal and explicitly masked attention.

    Args:
        tile: Any tile.

    Returns:
        Tiles that are full (no limits), square and causal (`nq == nk`, right 0, no left limit), or have
        a left limit or an odd right one and need their mask written out: few and of few shapes.
    """
    if tile.left is None and tile.right is None:
        return [tile]
    q, nq, k, nk, left, right = tile
    if left is None and right is not None and right <= 0:
        # Queries see a rectangle of keys and then a triangle; those before the first key see nothing.
        assert nk - nq + right >= 0, "a query that sees nothing"
        before = nk - nq + right
        square = Tile(q, nq, k + before, nq, None, 0)
        return _halves(square) if before == 0 else [Tile(q, nq, k, before), *_halves(square)]
    reach = nk if left is None else max(left, 1)
    block = max(_LEAST_BLOCK, min(reach // 2, _LARGEST_BLOCK))
    shift = nk - nq
    result = []
    for i in range(0, nq, block):
        j = min(i + block, nq)
        first = 0 if left is None else max(0, i + shift - left)
        last = nk if right is None else min(nk, j + shift + right)
        # Seen from the new corner, whose last query is j - 1 and whose last key is last - 1.
        moved = last - (j + shift)
        new_left = None if left is None or left + moved >= last - first - 1 else left + moved
        new_right = None if right is None or right - moved >= j - i - 1 else right - moved
        part = Tile(q + i, j - i, k + first, last - first, new_left, new_right)
        # Without its left limit it may be a plain causal one.
        result += square_tiles(part) if new_left is None and new_right == 0 else [part]
    return result
