"""Local attention over tiles: output and logsumexp of each, and a backward that takes the merged ones.

Shape legend: h query heads, g KV heads, d elements of a head; buffers are [1, heads, tokens, d].

Three ways to do the same tiles: on the CPU one flash call a tile; on CUDA in half precision one
variable-length call for all tiles of a kind; elsewhere plain torch operators, tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from torchtune_cp.distributed.context_parallel import torch_private
from torchtune_cp.distributed.context_parallel.tiles import Tile, square_tiles, visible
from torchtune_cp.distributed.context_parallel.torch_private import Backward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """Some tokens of a buffer: a range, which is a view, or several.

    Attributes:
        start: First token of a range.
        count: Tokens.
        places: All places where they are several ranges.
        ranges: First token and tokens of each; empty where it is a single one.
    """

    start: int
    count: int
    places: torch.Tensor | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    def first_touch(self, touched: npt.NDArray[np.bool_]) -> bool:
        """Mark the tokens as touched; whether none of them was before."""
        fresh = True
        for start, count in self.ranges or ((self.start, self.count),):
            here = touched[start : start + count]
            fresh &= not here.any()
            here[:] = True
        return fresh

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tokens' part of a buffer, whose dimension 2 has the tokens."""
        if self.places is None:
            return buffer.narrow(2, self.start, self.count)
        return buffer.index_select(2, self.places)

    def put(self, buffer: torch.Tensor, part: torch.Tensor) -> None:
        """Write the tokens' part of a buffer; a token may stand here only once."""
        if self.places is None:
            buffer.narrow(2, self.start, self.count).copy_(part)
        else:
            buffer.index_copy_(2, self.places, part.to(buffer.dtype))

    def add(self, buffer: torch.Tensor, part: torch.Tensor) -> None:
        """Add to the tokens' part of a buffer; a token may stand here several times."""
        if self.places is None:
            buffer.narrow(2, self.start, self.count).add_(part)
        else:
            buffer.index_add_(2, self.places, part.to(buffer.dtype))


class Call:
    """One kernel call.

    Attributes:
        q: The queries that it takes.
        k: The keys and values that it takes.
    """

    q: Rows
    k: Rows

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; [1, h, nq, d] and the logsumexp [1, h, nq]."""
        raise NotImplementedError

    def backward(self, given: Backward) -> Gradients:
        """This call's part of the gradients, with output and logsumexp over all keys."""
        raise NotImplementedError


@lru_cache(maxsize=32)
def _bias(
    nq: int, nk: int, left: int | None, right: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    # The blocks of a window have few shapes, which all layers share.
    seen = visible(nq, nk, left, right).to(device)
    return torch.zeros(nq, nk, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


class CpuFlashCall(Call):
    """torch's CPU flash kernel on one full, square causal or masked tile."""

    def __init__(self, tile: Tile) -> None:
        self.q, self.k = Rows(tile.q, tile.nq), Rows(tile.k, tile.nk)
        self._causal = tile.left is None and tile.right == 0 and tile.nq == tile.nk
        limited = tile.left is not None or tile.right is not None
        self._limits = (tile.left, tile.right) if limited and not self._causal else None

    def _mask(self, query: torch.Tensor) -> torch.Tensor | None:
        if self._limits is None:
            return None
        return _bias(self.q.count, self.k.count, *self._limits, query.dtype, query.device)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Call.forward`."""
        return torch_private.flash_for_cpu(
            query, key, value, self._causal, self._mask(query), scale
        )

    def backward(self, given: Backward) -> Gradients:
        """See `Call.backward`."""
        return torch_private.flash_for_cpu_backward(given, self._causal, self._mask(given.query))


class PlainCall(Call):
    """Plain operators on one tile, for devices and precisions without a fitting kernel.

    Holds the scores of the tile, so tiles are cut to at most `MOST_QUERIES` queries.
    """

    MOST_QUERIES = 512

    def __init__(self, tile: Tile) -> None:
        self.q, self.k = Rows(tile.q, tile.nq), Rows(tile.k, tile.nk)
        self._limits = (tile.left, tile.right)

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [g, h / g, nq, d], keys [g, 1, nk, d] and masked scores, in at least float32."""
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        grouped = query[0].unflatten(0, (key.size(1), -1)).to(exact)
        keys = key[0].unsqueeze(1).to(exact)
        scores = grouped @ keys.transpose(-1, -2) * scale
        if self._limits != (None, None):
            bias = _bias(self.q.count, self.k.count, *self._limits, exact, query.device)
            scores = scores + bias
        return grouped, keys, scores

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Call.forward`."""
        _, _, scores = self._scores(query, key, scale)
        logsumexp = scores.logsumexp(-1)
        weights = (scores - logsumexp.unsqueeze(-1)).exp()
        out = weights @ value[0].unsqueeze(1).to(weights.dtype)
        return out.flatten(0, 1)[None].to(query.dtype), logsumexp.flatten(0, 1)[None]

    def backward(self, given: Backward) -> Gradients:
        """See `Call.backward`."""
        grad_out, query, key, value, out, logsumexp, scale = given
        grouped, keys, scores = self._scores(query, key, scale)
        groups = (key.size(1), -1)
        weights = (scores - logsumexp[0].unflatten(0, groups).unsqueeze(-1)).exp()
        gradient = grad_out[0].unflatten(0, groups).to(weights.dtype)
        output = out[0].unflatten(0, groups).to(weights.dtype)
        grad_value = (weights.transpose(-1, -2) @ gradient).sum(1)
        grad_weights = gradient @ value[0].unsqueeze(1).to(weights.dtype).transpose(-1, -2)
        grad_scores = weights * (grad_weights - (gradient * output).sum(-1, keepdim=True)) * scale
        grad_query = (grad_scores @ keys).flatten(0, 1)[None]
        grad_key = (grad_scores.transpose(-1, -2) @ grouped).sum(1)
        return (
            grad_query.to(query.dtype),
            grad_key[None].to(key.dtype),
            grad_value[None].to(value.dtype),
        )


class VarlenCall(Call):
    """One variable-length flash call for tiles that share their limits and no query."""

    def __init__(self, tiles: Sequence[Tile], device: torch.device) -> None:
        self.q = _rows([(t.q, t.nq) for t in tiles], device)
        self.k = _rows([(t.k, t.nk) for t in tiles], device)
        self._limits = (tiles[0].left, tiles[0].right)
        self._sizes = (
            _borders([t.nq for t in tiles], device),
            _borders([t.nk for t in tiles], device),
            max(t.nq for t in tiles),
            max(t.nk for t in tiles),
        )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Call.forward`."""
        q, k, v = (_tokens_first(t) for t in (query, key, value))
        out, logsumexp = torch_private.flash_varlen(q, k, v, *self._sizes, *self._limits, scale)
        return out.transpose(0, 1)[None], logsumexp[None]

    def backward(self, given: Backward) -> Gradients:
        """See `Call.backward`."""
        tokens_first = Backward._make(
            (*map(_tokens_first, given[:5]), given.logsumexp[0].contiguous(), given.scale)
        )
        grads = torch_private.flash_varlen_backward(tokens_first, *self._sizes, *self._limits)
        grad_query, grad_key, grad_value = (t.transpose(0, 1)[None] for t in grads)
        return grad_query, grad_key, grad_value


def _tokens_first(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[0].transpose(0, 1).contiguous()


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    count = sum(size for _, size in ranges)
    if all(start + size == after for (start, size), (after, _) in pairwise(ranges)):
        return Rows(ranges[0][0], count)
    places = np.concatenate([np.arange(start, start + size) for start, size in ranges])
    return Rows(0, count, torch.from_numpy(places).to(device), tuple(ranges))


def _borders(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)).to(device)


def by_limits(tiles: Iterable[Tile]) -> list[list[Tile]]:
    """Group tiles so that one variable-length call can do a group: equal limits, no query twice."""
    groups: list[list[Tile]] = []
    for tile in tiles:
        for group in groups:
            same = (group[0].left, group[0].right) == (tile.left, tile.right)
            if same and all(t.q + t.nq <= tile.q or tile.q + tile.nq <= t.q for t in group):
                group.append(tile)
                break
        else:
            groups.append([tile])
    return groups


def at_most(tiles: Iterable[Tile], queries: int) -> Iterable[Tile]:
    """Cut tiles into ones of at most so many queries."""
    for t in tiles:
        for i in range(0, t.nq, queries):
            n = min(queries, t.nq - i)
            behind = t.nq - i - n  # queries after this part: the alignment moves by as many
            yield Tile(
                t.q + i,
                n,
                t.k,
                t.nk,
                None if t.left is None else t.left + behind,
                None if t.right is None else t.right - behind,
            )


def calls_of(tiles: Sequence[Tile], device: torch.device, dtype: torch.dtype) -> list[Call]:
    """Choose the kernel calls that do some tiles.

    Args:
        tiles: From `tiles.tiles_of`.
        device: Where the queries are.
        dtype: Theirs.
    """
    if device.type == "cpu":
        return [CpuFlashCall(part) for tile in tiles for part in square_tiles(tile)]
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return [VarlenCall(group, device) for group in by_limits(tiles)]
    return [PlainCall(part) for part in at_most(tiles, PlainCall.MOST_QUERIES)]
