"""Attention of one batch of documents: one layout, and a schedule for each mask that its layers want."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchtune_cp.attention import AttentionMask, MaskMod
from torchtune_cp.config.context_parallel_rules import mask_function_problems
from torchtune_cp.distributed.context_parallel.attention import DocumentAttention
from torchtune_cp.distributed.context_parallel.collectives import Grid
from torchtune_cp.distributed.context_parallel.flex import MaskModAttention
from torchtune_cp.distributed.context_parallel.layout import Layout
from torchtune_cp.distributed.context_parallel.options import KernelChoice, refuse
from torchtune_cp.distributed.context_parallel.schedule import make_schedule


@dataclass(eq=False)
class BatchAttention:
    """What the layers' attention needs to know of a batch.

    Attributes:
        layout: Who holds what of it.
        grid: This rank's place; None on a single rank.
        method: `context_parallel_method`.
        rotate_method: How the ring's keys and values travel.
        kernels: Chooses the kernel calls that do some tiles.
    """

    layout: Layout
    grid: Grid | None
    method: str
    rotate_method: str
    kernels: KernelChoice
    _by_mask: dict[AttentionMask, DocumentAttention] = field(default_factory=dict)
    _by_function: dict[tuple[MaskMod, torch.device], MaskModAttention] = field(default_factory=dict)

    @property
    def heads_split(self) -> tuple[int, int]:
        """How many ranks share the heads, and which of them this is."""
        return (1, 0) if self.grid is None else (self.grid.heads_split, self.grid.head_rank)

    def under(self, mask: AttentionMask) -> DocumentAttention:
        """Attention under a mask.

        Args:
            mask: As a call wants it.
        """
        mask = mask.within(self.layout.longest)
        if mask not in self._by_mask:
            order = "allgather" if self.method == "allgather" else "ring"
            rank = 0 if self.grid is None else self.grid.ring_rank
            schedule = make_schedule(self.layout, mask, order, rank, self.kernels)
            self._by_mask[mask] = DocumentAttention(schedule, self.grid, self.rotate_method)
        return self._by_mask[mask]

    def under_function(self, mask_mod: MaskMod, device: torch.device) -> MaskModAttention:
        """Attention under a mask that is a function.

        Args:
            mask_mod: As a call gives it.
            device: Where the queries are.

        Raises:
            UserError: With a method that does not bring the keys together.
        """
        key = mask_mod, device
        if key not in self._by_function:
            refuse(mask_function_problems(self.layout.ranks, self.method))
            attention = MaskModAttention(self.layout, mask_mod, self.grid, device)
            self._by_function[key] = attention
        return self._by_function[key]
