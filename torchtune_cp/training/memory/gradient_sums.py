"""Accumulates parameter gradients over tiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class GradientSums:
    """Adds up the tiles' parameter gradients, in float32 for any precision of a tile's.

    Hundreds of tiles summed in bfloat16 would lose what one large product, which adds up in float32
    inside, does not.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._dtypes = [p.dtype for p in parameters]
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add one tile's gradient of one parameter; its memory may be taken over."""
        total = self._sums[index]
        if total is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[index] = gradient.to(wide)
        else:
            total.add_(gradient)

    def take(self) -> Iterator[Tensor]:
        """Hand out the sums in the parameters' precision, each once."""
        for index, dtype in enumerate(self._dtypes):
            total = self._sums[index]
            self._sums[index] = None
            assert total is not None, "a parameter was not used for the output"
            yield total.to(dtype)
