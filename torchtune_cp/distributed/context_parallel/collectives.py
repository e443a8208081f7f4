"""What the ranks of a context-parallel group send each other, on public collectives alone.

The group is a grid: `heads_split` consecutive ranks share the tokens of one attention rank and have
parts of the heads each; ranks with the same part of the heads form a ring. Both are reached through the
whole group, with nothing sent to the others, so that no further process groups are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch 2.13 calls it all_gather_single and warns of the earlier name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Waits for what was sent and returns what came.
Pending = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """This rank's place in a context-parallel group.

    Attributes:
        group: The process group.
        size: Its ranks.
        rank: This one.
        heads_split: How many ranks share the tokens of an attention rank.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    heads_split: int = 1

    @property
    def ring_size(self) -> int:
        """Number of attention ranks."""
        return self.size // self.heads_split

    @property
    def ring_rank(self) -> int:
        """This rank's place among them."""
        return self.rank // self.heads_split

    @property
    def head_rank(self) -> int:
        """Which part of the heads it has."""
        return self.rank % self.heads_split

    def _in_ring(self, place: int) -> int:
        return (place % self.ring_size) * self.heads_split + self.head_rank

    def _send(self, buffer: torch.Tensor, sent: Sequence[int], got: Sequence[int]) -> Pending:
        received = buffer.new_empty(sum(got))
        work = dist.all_to_all_single(
            received, buffer, list(got), list(sent), group=self.group, async_op=True
        )

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait

    def gather(self, part: torch.Tensor) -> Pending:
        """Gather equal parts of the whole ring: `[ring_size, *part.shape]`."""
        shape = (self.ring_size, *part.shape)
        if self.heads_split == 1:
            whole = part.new_empty(shape)
            work = _all_gather(
                whole.view(-1), part.contiguous().view(-1), group=self.group, async_op=True
            )

            def wait() -> torch.Tensor:
                work.wait()
                return whole

            return wait
        return self.deal(part.expand(shape))

    def deal(self, parts: torch.Tensor) -> Pending:
        """Send part i of `[ring_size, ..]` to ring rank i and get its part for this one, by sender."""
        counts = [0] * self.size
        for place in range(self.ring_size):
            counts[self._in_ring(place)] = parts[0].numel()
        pending = self._send(parts.reshape(-1), counts, counts)
        return lambda: pending().view(parts.shape)

    def shift(self, part: torch.Tensor, by: int) -> Pending:
        """Send a part `by` places up the ring and get the one from as far down it."""
        sent, got = [0] * self.size, [0] * self.size
        sent[self._in_ring(self.ring_rank + by)] = part.numel()
        got[self._in_ring(self.ring_rank - by)] = part.numel()
        pending = self._send(part.reshape(-1), sent, got)
        return lambda: pending().view(part.shape)

    def among_heads(
        self, parts: Sequence[torch.Tensor], got: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send one part to each rank that shares this one's tokens, and get one from each.

        Args:
            parts: By receiver, of any shapes.
            got: The shapes of what comes, by sender.
        """
        first = self.rank - self.head_rank
        sent_counts, got_counts = [0] * self.size, [0] * self.size
        sizes = [int(torch.Size(shape).numel()) for shape in got]
        for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            sent_counts[first + place], got_counts[first + place] = part.numel(), size
        buffer = torch.cat([part.reshape(-1) for part in parts])
        received = self._send(buffer, sent_counts, got_counts)().split(sizes)
        return [part.view(*shape) for part, shape in zip(received, got, strict=True)]
