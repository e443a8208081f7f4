"""One batch's attention on one rank: which tiles to do, in which order, on whose keys and values.

Made once a batch and mask, and used by every layer with that mask. Two schedules, both exact, on the same
tiles:

- `ring`: step 0 attends to the rank's own keys and values, step i to those of the rank i places down the
  ring, which travel meanwhile;
- `allgather`: keys and values of all ranks are put in the order of the documents first, so that a query
  finds everything it sees side by side.

Documents that one rank holds alone take part in step 0 only, and their keys and values do not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.assignment import (
    Piece,
    Placed,
    placed,
    split_documents,
)
from torchtune_cp.distributed.context_parallel.kernels import Call, calls_of
from torchtune_cp.distributed.context_parallel.layout import Layout
from torchtune_cp.distributed.context_parallel.tiles import Tile, tiles_of


@dataclass(frozen=True)
class ScheduledCall:
    """A kernel call and whether no earlier call had its queries.

    Attributes:
        call: What to call.
        fresh: True: its result is the first for all of its queries, nothing is to be merged.
    """

    call: Call
    fresh: bool


@dataclass(eq=False)
class Schedule:
    """What one attention rank does under one mask.

    Attributes:
        layout: Who holds what.
        mask: What is attended to within a document.
        method: `"ring"` or `"allgather"`.
        rank: The attention rank.
        length: Its tokens, padding included.
        travelling: Leading tokens whose keys and values go to the other ranks; 0 when none do.
        steps: The tiles on the own keys and values; then by place down the ring, or (`allgather`) those
            on the gathered ones.
        order: Where the tokens that the steps count through stand among the rank's own; None: they are in
            that order already.
        document_order: `allgather`: where the keys, then the values, of all split documents stand among
            the rows of what was gathered, `[ranks x 2 x travelling]` rows; else None.
        kernels: Chooses the kernel calls that do some tiles.
    """

    layout: Layout
    mask: AttentionMask
    method: str
    rank: int
    length: int
    travelling: int
    steps: list[list[Tile]]
    document_order: torch.Tensor | None
    order: torch.Tensor | None
    kernels: Callable[[Sequence[Tile], torch.device, torch.dtype], list[Call]]
    _calls: dict[tuple[torch.device, torch.dtype], list[list[ScheduledCall]]] = field(
        default_factory=dict
    )

    @property
    def ranks(self) -> int:
        """Number of attention ranks."""
        return len(self.layout.pieces)

    @property
    def pairs(self) -> int:
        """Query-key pairs of a head that this rank attends to."""
        return self.layout.pairs(self.mask)[self.rank]

    def calls(self, device: torch.device, dtype: torch.dtype) -> list[list[ScheduledCall]]:
        """The kernel calls of each step for tensors of a device and dtype."""
        key = (device, dtype)
        if key not in self._calls:
            touched = np.zeros(self.length, dtype=bool)
            self._calls[key] = [
                [
                    ScheduledCall(call, call.q.first_touch(touched))
                    for call in self.kernels(tiles, device, dtype)
                ]
                for tiles in self.steps
            ]
        return self._calls[key]

    def merges(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether any query meets its keys in more than one call."""
        return not all(p.fresh for step in self.calls(device, dtype) for p in step)


def _end(pieces: Sequence[Placed]) -> int:
    return max((p.at + p.piece.stop - p.piece.start for p in pieces), default=0)


@lru_cache(maxsize=16)
def make_schedule(
    layout: Layout,
    mask: AttentionMask,
    method: str,
    rank: int,
    kernels: Callable[[Sequence[Tile], torch.device, torch.dtype], list[Call]] = calls_of,
) -> Schedule:
    """Schedule a batch's attention.

    Args:
        layout: Who holds what of the batch.
        mask: What is attended to within a document; need not be the one that the layout is balanced for.
        method: `"ring"` or `"allgather"`.
        rank: The attention rank to plan for.
        kernels: Chooses the kernel calls that do some tiles.
    """
    lengths = [d.length for d in layout.documents]
    split = split_documents([list(own) for own in layout.pieces])
    ranks = len(layout.pieces)
    order = None if layout.side_by_side else layout.side_by_side_order(rank)
    held = [
        layout.placed(r) if layout.side_by_side else placed(layout.pieces[r]) for r in range(ranks)
    ]
    # What travels is the head of each rank's buffer, up to the last piece of a split document.
    travels = [[p for p in theirs if p.piece.document in split] for theirs in held]
    own, shared = held[rank], travels[rank]
    document_order = None
    if method == "ring":
        steps = [tiles_of(own, own, lengths, mask)]
        for back in range(1, ranks):
            theirs = travels[(rank - back) % ranks]
            steps.append(tiles_of(shared, theirs, lengths, mask))
    else:
        alone = [p for p in own if p.piece.document not in split]
        whole = placed(Piece(number, 0, lengths[number]) for number in sorted(split))
        steps = [
            tiles_of(alone, alone, lengths, mask),
            tiles_of(shared, whole, lengths, mask),
        ]
    travelling = max(map(_end, travels))
    if method == "allgather" and travelling:
        document_order = _document_order(travels, travelling)
    length = layout.length * layout.heads_split
    return Schedule(
        layout, mask, method, rank, length, travelling, steps, document_order, order, kernels
    )


def _document_order(travels: Sequence[Sequence[Placed]], travelling: int) -> torch.Tensor:
    rows = []
    for rank, pieces in enumerate(travels):
        first = 2 * travelling * rank  # a rank's keys, then its values
        rows += [(p.piece, first + p.at, p.piece.stop - p.piece.start) for p in pieces]
    keys = np.concatenate([np.arange(at, at + size) for _, at, size in sorted(rows)])
    return torch.from_numpy(np.concatenate([keys, keys + travelling]))
