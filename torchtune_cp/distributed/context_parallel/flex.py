"""Attention under a mask that the model gives as a function, as FlexAttention takes it.

Documents, causality and windows are tiles; a `mask_mod` can be anything, such as chunked attention. Keys
and values are gathered; on CUDA FlexAttention skips the blocks that the mask leaves empty, elsewhere the
mask is written out: slow, but the same function with the same result, so that it can be tried anywhere.

Shape legend: n this rank's tokens, t all tokens that belong to a document, h query heads, g KV heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

from torchtune_cp.attention import MaskMod
from torchtune_cp.distributed.context_parallel.collectives import Grid
from torchtune_cp.distributed.context_parallel.layout import Layout


class _Gather(torch.autograd.Function):
    """Keys and values of all documents, in order; gradients go back to who holds them."""

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, grid: Grid | None, order: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.grid, ctx.order = grid, order
        # [2, n, g, d], then [ranks, 2, n, g, d], then [2, ranks n, g, d].
        packed = torch.stack([t[0].transpose(0, 1) for t in (key, value)])
        whole = packed[None] if grid is None else grid.gather(packed)()
        ctx.shape = whole.shape
        rows = whole.transpose(0, 1).flatten(1, 2)
        keys, values = (r.index_select(0, order).transpose(0, 1)[None] for r in rows)
        return keys, values

    @staticmethod
    def backward(
        ctx: Any, grad_keys: torch.Tensor, grad_values: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        ranks, _, n, *rest = ctx.shape
        rows = grad_keys.new_zeros(2, ranks * n, *rest)
        for row, gradient in zip(rows, (grad_keys, grad_values), strict=True):
            row.index_copy_(0, ctx.order, gradient[0].transpose(0, 1))
        parts = rows.unflatten(1, (ranks, n)).transpose(0, 1).contiguous()
        exact = torch.float64 if parts.dtype == torch.float64 else torch.float32
        arrived = parts if ctx.grid is None else ctx.grid.deal(parts)()
        key, value = arrived.sum(0, dtype=exact).to(parts.dtype)
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None], None, None


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@dataclass(eq=False)
class MaskModAttention:
    """The attention of one batch under a model's own mask.

    Attributes:
        layout: Who holds what of the batch.
        mask_mod: The mask within a document.
        grid: This rank's place; None on a single rank.
        device: Where the batch is.
    """

    layout: Layout
    mask_mod: MaskMod
    grid: Grid | None
    device: torch.device
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)
    _blocks: dict[int, BlockMask] = field(default_factory=dict)

    @cached_property
    def _of_batch(self) -> torch.Tensor:
        """Document, row and position of each place of the batch, [3, b s]; document -1 on padding."""
        rows, length = self.layout.shape
        of = torch.zeros(3, rows * length, dtype=torch.int64)
        of[0] = -1
        for number, document in enumerate(self.layout.documents):
            here = slice(document.offset, document.offset + document.length)
            of[0, here], of[1, here] = number, document.offset // length
            of[2, here] = torch.arange(document.length)
        return of

    @cached_property
    def order(self) -> torch.Tensor:
        """Where the tokens of all documents, in order, lie among those of all ranks, [t]."""
        places = self.layout.indices.flatten()
        return torch.argsort(places, stable=True)[int((places < 0).sum()) :].to(self.device)

    @cached_property
    def _queries(self) -> torch.Tensor:
        places = self.layout.indices[0 if self.grid is None else self.grid.rank]
        of = self._of_batch[:, places.clamp(min=0)].clone()
        of[0].masked_fill_(places < 0, -1)
        return of.to(self.device)

    @cached_property
    def _keys(self) -> torch.Tensor:
        of = self._of_batch
        return of[:, of[0] >= 0].to(self.device)

    @property
    def mask(self) -> MaskMod:
        """The mask between this rank's queries and all keys, in FlexAttention's signature."""
        document, row, position = self._queries
        key_document, _, key_position = self._keys
        mask_mod = self.mask_mod

        # No method: FlexAttention counts the parameters.
        def mask(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            same = document[q] == key_document[k]
            return same & mask_mod(row[q], h, position[q], key_position[k])

        return mask

    def block_mask(self, heads: int) -> BlockMask:
        """The mask by blocks, made once for all layers."""
        if heads not in self._blocks:
            sizes = (self._queries.size(1), self._keys.size(1))
            self._blocks[heads] = create_block_mask(self.mask, 1, heads, *sizes, self.device.type)
        return self._blocks[heads]

    def written_out(self, heads: int) -> torch.Tensor:
        """The mask element by element, [1, h, n, t]; a query that sees nothing sees all."""
        if heads not in self._masks:
            sizes = (self._queries.size(1), self._keys.size(1))
            mask = create_mask(self.mask, 1, heads, *sizes, self.device.type)
            self._masks[heads] = mask | ~mask.any(-1, keepdim=True)
        return self._masks[heads]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend over all ranks.

        Args:
            query: [1, h, n, d].
            key: [1, g, n, d].
            value: As `key`.
            scale: Of the scores.

        Returns:
            [1, h, n, d]; 0 where a token belongs to no document.
        """
        keys, values = _Gather.apply(key, value, self.grid, self.order)
        heads, gqa = query.size(1), query.size(1) != key.size(1)
        if query.is_cuda:
            out = _compiled_flex_attention()(
                query, keys, values, block_mask=self.block_mask(heads), scale=scale, enable_gqa=gqa
            )
        else:
            out = scaled_dot_product_attention(
                query, keys, values, self.written_out(heads), scale=scale, enable_gqa=gqa
            )
        real = self._queries[0] >= 0
        return torch.where(real[:, None], out, 0.0)
