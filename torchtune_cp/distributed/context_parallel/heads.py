"""Giving out attention heads: every rank of a group gets all tokens of some of the heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtune_cp.config.context_parallel_rules import heads_problems, ulysses_problems
from torchtune_cp.distributed.context_parallel.collectives import Grid
from torchtune_cp.errors import UserError


def ulysses_degree(cp: int, num_heads: int, num_kv_heads: int, wanted: int | None = None) -> int:
    """Choose how many ranks share the heads with the method ulysses.

    Args:
        cp: Context-parallel degree.
        num_heads: Query heads (of one tensor-parallel rank).
        num_kv_heads: KV heads, likewise.
        wanted: `context_parallel_ulysses_dim`. None takes the largest divisor of `cp` by which both
            kinds of heads can be split, so that no KV head is sent twice; where only 1 is, the largest
            that splits the query heads.

    Raises:
        UserError: The choice, or every choice but 1, does not divide the query heads.
    """
    if wanted is None:
        divisors = [d for d in range(cp, 1, -1) if cp % d == 0 and num_heads % d == 0]
        evenly = [d for d in divisors if num_kv_heads % d == 0]
        wanted = next(iter(evenly or divisors), cp)
    for problem in (*ulysses_problems(wanted, cp, "ulysses"), *heads_problems(num_heads, wanted)):
        raise UserError(problem)
    return wanted


@dataclass(frozen=True)
class HeadChunks:
    """Some of the heads at a time, a chunk alike on every rank of a group that shares the heads.

    Attributes:
        ranks: Ranks that share the heads; 1 where every rank has all of them.
        chunks: Of the query heads. Chunk c has the c-th part of each rank's own heads, so that within a
            chunk, too, the first rank's come first and every rank gets equally many.
        kv_chunks: Of the KV heads, likewise. Each serves `chunks / kv_chunks` chunks of query heads,
            one after the other.
    """

    ranks: int
    chunks: int
    kv_chunks: int

    @classmethod
    def of(cls, chunks: int, num_heads: int, num_kv_heads: int, ranks: int = 1) -> HeadChunks:
        """Divide a model's heads.

        Args:
            chunks: `attention_head_chunks`.
            num_heads: Query heads.
            num_kv_heads: KV heads.
            ranks: Ranks that share the heads; divides `num_heads`.

        Raises:
            UserError: Some chunk's query heads would not use its KV heads evenly.
        """
        if num_kv_heads % ranks and ranks % num_kv_heads:
            raise UserError(
                f"attention_head_chunks={chunks} with context_parallel_method=ulysses over {ranks} ranks:"
                f" the model's num_kv_heads={num_kv_heads} is neither a multiple nor a divisor of {ranks};"
                " set context_parallel_ulysses_dim to one that is, or attention_head_chunks=null"
            )
        own, own_kv = num_heads // ranks, max(num_kv_heads // ranks, 1)
        allowed = cls.possible(num_heads, num_kv_heads, ranks)
        if chunks not in allowed:
            given = f"num_heads={num_heads} and num_kv_heads={num_kv_heads}"
            if ranks > 1:
                given += f", of which a rank has {own} and {own_kv} ({ranks} ranks share them),"
            raise UserError(
                f"attention_head_chunks={chunks}: the model's {given} can be done in"
                f" {', '.join(map(str, allowed))} equal chunks"
            )
        return cls(ranks, chunks, min(chunks, own_kv))

    @staticmethod
    def possible(num_heads: int, num_kv_heads: int, ranks: int = 1) -> list[int]:
        """The numbers of chunks that a model's heads can be done in; arguments as of `of`."""
        own, own_kv = num_heads // ranks, max(num_kv_heads // ranks, 1)
        return [
            c for c in range(1, own + 1) if own % c == 0 and (c % own_kv == 0 or own_kv % c == 0)
        ]

    @property
    def uses(self) -> int:
        """How many chunks of query heads one of KV heads serves."""
        return self.chunks // self.kv_chunks

    def queries(self, tensor: torch.Tensor, chunk: int, dim: int) -> torch.Tensor:
        """The part of one chunk of query heads.

        Args:
            tensor: With the query heads at `dim`; each may be several places there.
            chunk: Which.
            dim: Not negative.

        Returns:
            A view with two dimensions in place of `dim`: ranks, and what each has of the chunk.
        """
        return tensor.unflatten(dim, (self.ranks, self.chunks, -1)).select(dim + 1, chunk)

    def keys(self, tensor: torch.Tensor, chunk: int, dim: int) -> torch.Tensor:
        """As `queries`, of one chunk of KV heads."""
        # One chunk is all of them; then they may be fewer than the ranks.
        ranks = self.ranks if self.kv_chunks > 1 else 1
        return tensor.unflatten(dim, (ranks, self.kv_chunks, -1)).select(dim + 1, chunk)


class HeadSplit:
    """Which heads each of the ranks that share tokens has.

    Query heads are split evenly. A rank gets the KV heads that its query heads use, once each: they are
    not repeated for the queries of their group before they are sent.
    """

    def __init__(self, grid: Grid, query_heads: int, kv_heads: int) -> None:
        """Describe a split.

        Args:
            grid: This rank's place.
            query_heads: Of the model (or of this tensor-parallel rank); a multiple of `grid.heads_split`.
            kv_heads: Likewise.
        """
        self._grid = grid
        self._parts = grid.heads_split
        self._heads = (query_heads, kv_heads, kv_heads)
        self._ranges = [
            [self.kv_range(r, query_heads, total, self._parts) for total in self._heads]
            for r in range(self._parts)
        ]

    @staticmethod
    def kv_range(rank: int, query_heads: int, kv_heads: int, parts: int) -> tuple[int, int]:
        """First KV head that a rank's query heads use, and one behind the last."""
        each, group = query_heads // parts, query_heads // kv_heads
        return rank * each // group, ((rank + 1) * each - 1) // group + 1

    @staticmethod
    def kv_places(rank: int, query_heads: int, kv_heads: int, parts: int) -> list[int] | None:
        """Which of a rank's KV heads each of its query heads uses; None where groups are equal."""
        each, group = query_heads // parts, query_heads // kv_heads
        first, last = HeadSplit.kv_range(rank, query_heads, kv_heads, parts)
        places = [head // group - first for head in range(rank * each, (rank + 1) * each)]
        count = last - first
        even = each % count == 0 and places == [i // (each // count) for i in range(each)]
        return None if even else places

    def give(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange tokens of all heads for heads of all tokens.

        Args:
            tensors: Query, and possibly key and value, each [1, heads, n, d].

        Returns:
            They as [1, this rank's heads, n parts, d].
        """
        n, d = tensors[0].shape[2:]
        parts = [
            torch.cat([t[0, first:last] for t, (first, last) in zip(tensors, ranges, strict=False)])
            for ranges in self._ranges
        ]
        own = self._ranges[self._grid.head_rank][: len(tensors)]
        counts = [last - first for first, last in own]
        got = self._grid.among_heads(parts, [(sum(counts), n, d)] * self._parts)
        by_sender = [part.split(counts) for part in got]
        # [heads, parts, n, d]: a head's tokens side by side, in the order of the ranks.
        return [torch.stack(parts, 1).flatten(1, 2)[None] for parts in zip(*by_sender, strict=True)]

    def take_back(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange heads of all tokens for tokens of all heads; a head that several had is added up.

        Args:
            tensors: As `give` returns them, or their gradients.

        Returns:
            Each as [1, heads, n, d], the heads of a token side by side in memory.
        """
        n, d = tensors[0].size(2) // self._parts, tensors[0].size(3)
        packed = torch.cat([t[0] for t in tensors])
        counts = [[b - a for a, b in ranges[: len(tensors)]] for ranges in self._ranges]
        got = self._grid.among_heads(
            list(packed.split(n, dim=1)), [(sum(count), n, d) for count in counts]
        )
        exact = torch.float64 if packed.dtype == torch.float64 else torch.float32
        result = []
        by_sender = [part.split(count) for part, count in zip(got, counts, strict=True)]
        for index, tensor in enumerate(tensors):
            heads = self._heads[index]
            alone = sum(count[index] for count in counts) == heads
            whole = packed.new_zeros(n, heads, d, dtype=tensor.dtype if alone else exact)
            for sender, ranges in zip(by_sender, self._ranges, strict=True):
                first, last = ranges[index]
                whole[:, first:last] += sender[index].transpose(0, 1)
            result.append(whole.to(tensor.dtype).transpose(0, 1)[None])
        return result
