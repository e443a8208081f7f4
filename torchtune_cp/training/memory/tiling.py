"""Tiles along the sequence: the loops over tiles of tokens.

All such loops ask `tiles` of this module (not a name imported from it), so that `tune plan` can simulate
each kind of tile once.
"""

from __future__ import annotations

from collections.abc import Iterator


def tiles(num_tokens: int, size: int) -> Iterator[slice]:
    """Cut a sequence into tiles.

    What a loop does with a tile may depend on nothing but the tile's length and on whether it is the first.

    Args:
        num_tokens: Of the sequence.
        size: Tokens of a tile; the last one may be shorter.

    Yields:
        Slices of the sequence, in order.
    """
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))
