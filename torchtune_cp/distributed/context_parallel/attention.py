"""Runs a schedule: attention of one rank's queries with everybody's keys, forward and backward.

Shape legend: h query heads, g KV heads, n this rank's tokens, m tokens that travel, d elements of a head.

Partial results are merged by their logsumexp (as in FlashAttention, arXiv 2205.14135, section 3.1), in
float32 or, for float64 inputs, in float64. Backward recomputes each tile from the merged logsumexp, so no
partial result is kept. The gradients of keys and values go straight to the rank that holds those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from torchtune_cp.distributed.context_parallel.collectives import Grid, Pending
from torchtune_cp.distributed.context_parallel.kernels import Gradients
from torchtune_cp.distributed.context_parallel.schedule import Schedule, ScheduledCall
from torchtune_cp.distributed.context_parallel.torch_private import (
    Backward,
    keep_kv,
    take_kept_kv,
)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _buffer(
    tokens: int, heads: int, width: int, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Zeros [1, heads, tokens, width]; in memory the heads of a token lie together, as models want."""
    buffer = torch.zeros(1, tokens, heads, width, dtype=dtype, device=like.device)
    return buffer.transpose(1, 2)


def _keys_and_values(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, tokens, g, d] as two of [1, g, tokens, d]."""
    key, value = packed.transpose(1, 2)
    return key[None], value[None]


def _select_tokens(buffer: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[1, h, n, d] in another order; in memory the heads of a token lie together."""
    return buffer.transpose(1, 2).index_select(1, order).transpose(1, 2)


@dataclass(frozen=True)
class DocumentAttention:
    """The attention of one batch on one rank.

    Attributes:
        schedule: What to compute and in which order.
        grid: With whom; None on a single rank.
        rotate: `"allgather"` (keys and values of all ranks at once) or `"alltoall"` (one rank's at a
            time); how the ring's travel.
    """

    schedule: Schedule
    grid: Grid | None = None
    rotate: str = "allgather"

    # --- whose keys and values, in which order ------------------------------------------------

    def _pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        travelling = self.schedule.travelling
        return torch.stack([t[0].transpose(0, 1)[:travelling] for t in (key, value)])

    def _sources(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kept: torch.Tensor | None,
        gathered: Callable[[torch.Tensor], None],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of each step; what travels does so during the step before."""
        if not self.schedule.travelling or self.grid is None:
            yield key, value
            return
        if self.schedule.method == "ring" and self.rotate == "alltoall":
            packed = self._pack(key, value)
            arriving: Pending = self.grid.shift(packed, 1)
            yield key, value
            for back in range(1, self.schedule.ranks):
                theirs = arriving()
                if back + 1 < self.schedule.ranks:
                    arriving = self.grid.shift(packed, back + 1)
                yield _keys_and_values(theirs)
            return
        pending = (lambda: kept) if kept is not None else self.grid.gather(self._pack(key, value))
        yield key, value
        whole = pending()
        gathered(whole)
        if self.schedule.method == "ring":
            for back in range(1, self.schedule.ranks):
                yield _keys_and_values(whole[(self.schedule.rank - back) % self.schedule.ranks])
            return
        assert self.schedule.document_order is not None
        rows = whole.flatten(0, 2).index_select(0, self._order(whole.device))
        yield _keys_and_values(rows.unflatten(0, (2, -1)))

    def _order(self, device: torch.device) -> torch.Tensor:
        assert self.schedule.document_order is not None
        if self.schedule.document_order.device != device:
            self.schedule.document_order = self.schedule.document_order.to(device)
        return self.schedule.document_order

    # --- the order of the rank's own tokens -----------------------------------------------------

    def _in_order(self, buffer: torch.Tensor) -> torch.Tensor:
        """[1, h, n, d] with the pieces of each document side by side."""
        if self.schedule.order is None:
            return buffer
        if self.schedule.order.device != buffer.device:
            self.schedule.order = self.schedule.order.to(buffer.device)
        return _select_tokens(buffer, self.schedule.order)

    def _as_held(self, buffer: torch.Tensor) -> torch.Tensor:
        """The way back."""
        if self.schedule.order is None:
            return buffer
        return _select_tokens(buffer, torch.argsort(self.schedule.order.to(buffer.device)))

    # --- forward ------------------------------------------------------------------------------

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            query: [1, h, n, d].
            key: [1, g, n, d].
            value: As `key`.
            scale: Of the scores.

        Returns:
            The output [1, h, n, d], 0 where a token belongs to no document, and the logsumexp [1, h, n],
            -inf there, in the schedule's order.
        """
        query, key, value = (self._in_order(t) for t in (query, key, value))
        exact = _accumulation_dtype(query.dtype)
        calls = self.schedule.calls(query.device, query.dtype)
        dtype = exact if self.schedule.merges(query.device, query.dtype) else query.dtype
        _, heads, tokens, width = query.shape
        out = _buffer(tokens, heads, width, query, dtype)
        logsumexp = query.new_full((1, heads, tokens), float("-inf"), dtype=exact)
        whole: list[torch.Tensor] = []
        sources = self._sources(key, value, None, whole.append)
        for step, (keys, values) in zip(calls, sources, strict=False):
            for scheduled in step:
                q, k = scheduled.call.q, scheduled.call.k
                part, sums = scheduled.call.forward(q.of(query), k.of(keys), k.of(values), scale)
                _merge(scheduled, out, logsumexp, part, sums)
        for gathered in whole:
            keep_kv(logsumexp, gathered)
        return self._as_held(out.to(query.dtype)), logsumexp

    # --- backward -----------------------------------------------------------------------------

    def backward(self, given: Backward) -> Gradients:
        """Give the gradients of query, key and value; shapes as in and of `forward`."""
        grad_out, query, key, value, out = map(self._in_order, given[:5])
        logsumexp, scale = given.logsumexp, given.scale
        exact = _accumulation_dtype(query.dtype)
        calls = self.schedule.calls(query.device, query.dtype)
        _, heads, tokens, width = query.shape
        grad_query = _buffer(tokens, heads, width, query, exact)
        own = torch.zeros(2, tokens, key.size(1), width, dtype=exact, device=key.device)
        sink = _GradientSink(self, own, key.dtype)
        sources = self._sources(key, value, take_kept_kv(logsumexp), lambda _: None)
        for index, (step, (keys, values)) in enumerate(zip(calls, sources, strict=False)):
            packed = sink.open(index, keys.size(2))
            grad_keys, grad_values = _keys_and_values(packed)
            for scheduled in step:
                q, k = scheduled.call.q, scheduled.call.k
                parts = scheduled.call.backward(
                    Backward(
                        q.of(grad_out),
                        q.of(query),
                        k.of(keys),
                        k.of(values),
                        q.of(out),
                        q.of(logsumexp.unsqueeze(-1)).squeeze(-1),
                        scale,
                    )
                )
                q.add(grad_query, parts[0])
                k.add(grad_keys, parts[1])
                k.add(grad_values, parts[2])
            sink.close(index, packed)
        grad_key, grad_value = _keys_and_values(sink.total())
        # Copies: an operator's results may not share their memory.
        return (
            self._as_held(grad_query.to(query.dtype)),
            self._as_held(grad_key.to(key.dtype, copy=True)),
            self._as_held(grad_value.to(value.dtype, copy=True)),
        )


def _merge(
    scheduled: ScheduledCall,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    part: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    rows, column = scheduled.call.q, logsumexp.unsqueeze(-1)
    sums = sums.unsqueeze(-1)
    if scheduled.fresh:
        rows.put(out, part)
        rows.put(column, sums)
        return
    before = rows.of(column)
    weight = torch.sigmoid(sums - before)
    rows.put(out, torch.lerp(rows.of(out), part.to(out.dtype), weight.to(out.dtype)))
    rows.put(column, torch.logaddexp(before, sums))


class _GradientSink:
    """Brings the gradients of keys and values, `[2, tokens, g, d]` a step, to where those are held.

    They travel in the dtype of the keys and are added up in float32 (float64) where they arrive.
    """

    def __init__(self, attention: DocumentAttention, own: torch.Tensor, dtype: torch.dtype) -> None:
        self._schedule, self._grid, self._rotate = (
            attention.schedule,
            attention.grid,
            attention.rotate,
        )
        self._order = attention._order
        self._own, self._dtype = own, dtype
        self._arriving: list[Pending] = []
        self._parts: torch.Tensor | None = None

    def open(self, index: int, tokens: int) -> torch.Tensor:
        """Zeros for the gradients of a step; for step 0 they are the own ones."""
        if index == 0:
            return self._own
        return self._own.new_zeros(2, tokens, *self._own.shape[2:])

    def close(self, index: int, packed: torch.Tensor) -> None:
        """Send what a step found."""
        if index == 0:
            return
        assert self._grid is not None
        if self._schedule.method == "ring" and self._rotate == "alltoall":
            self._add_arrived()
            self._arriving.append(self._grid.shift(packed.to(self._dtype), -index))
            return
        ranks = self._schedule.ranks
        if self._schedule.method == "ring":
            if self._parts is None:
                self._parts = packed.new_zeros(ranks, *packed.shape, dtype=self._dtype)
            self._parts[(self._schedule.rank - index) % ranks] = packed
            if index + 1 < ranks:
                return
        else:
            shape = (ranks, 2, self._schedule.travelling, *packed.shape[2:])
            self._parts = packed.new_zeros(shape, dtype=self._dtype)
            rows = packed.flatten(0, 1).to(self._dtype)
            self._parts.flatten(0, 2).index_copy_(0, self._order(packed.device), rows)
        assert self._parts is not None
        deal = self._grid.deal(self._parts)
        self._arriving.append(lambda: deal().sum(0, dtype=self._own.dtype))

    def _add_arrived(self) -> None:
        for arriving in self._arriving:
            self._own[:, : self._schedule.travelling] += arriving()
        self._arriving.clear()

    def total(self) -> torch.Tensor:
        """The gradients of the own keys and values over all ranks' queries, `[2, n, g, d]`."""
        self._add_arrived()
        return self._own
