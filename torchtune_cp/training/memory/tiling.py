"""Tiles along the sequence: what the loops over tiles of tokens ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

#: Gives the tiles for a number of tokens and a size.
Tiling = Callable[[int, int], Iterator[slice]]


def every_tile(num_tokens: int, size: int) -> Iterator[slice]:
    """See `tiles`."""
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


_tiling: Tiling = every_tile


def tiles(num_tokens: int, size: int) -> Iterator[slice]:
    """Cut a sequence into tiles.

    What a loop does with a tile may depend on nothing but the tile's length and on whether it is the first.

    Args:
        num_tokens: Of the sequence.
        size: Tokens of a tile; the last one may be shorter.

    Returns:
        Slices of the sequence, in order.
    """
    return _tiling(num_tokens, size)


@contextlib.contextmanager
def tiles_from(tiling: Tiling) -> Generator[None, None, None]:
    """Let loops do other tiles for a while: `tune plan` runs one for all equal ones.

    Args:
        tiling: What gives them.
    """
    global _tiling
    saved, _tiling = _tiling, tiling
    try:
        yield
    finally:
        _tiling = saved
