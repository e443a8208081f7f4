"""What is rarer than the method of context parallelism, in one object: made and checked once a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchtune_cp.attention import AttentionMask, MaskMod
from torchtune_cp.config.context_parallel_rules import (
    mask_function_problems,
    method_problems,
    ulysses_problems,
)
from torchtune_cp.distributed.context_parallel.heads import HeadChunks, ulysses_degree
from torchtune_cp.distributed.context_parallel.kernels import Call, calls_of
from torchtune_cp.distributed.context_parallel.tiles import Tile
from torchtune_cp.errors import UserError

if TYPE_CHECKING:
    from torchtune_cp.config import FullFinetuneConfig
    from torchtune_cp.models.config import AttentionSizes

#: Chooses the kernel calls that do some tiles, for queries of a device and dtype.
KernelChoice = Callable[[Sequence[Tile], torch.device, torch.dtype], list[Call]]


def refuse(problems: Iterable[str]) -> None:
    """Raise the first of some problems.

    Raises:
        UserError: There is one.
    """
    for problem in problems:
        raise UserError(problem)


@dataclass(frozen=True)
class ContextParallelOptions:
    """The options of `context_parallel` that few loops need.

    Attributes:
        ulysses_dim: With `method="ulysses"`: how many ranks share the heads, a divisor of the mesh's size;
            rings connect the ranks with the same heads. None for all of them.
        window: The model's sliding window, the smallest if its layers differ: a token attends to itself and
            the `window - 1` before it (and behind it, where attention is bidirectional). Work is balanced
            for it. A model of this package says with each call what it wants; for a call of
            `F.scaled_dot_product_attention`, which cannot, it holds as well.
        chunk: Likewise the tokens of a chunk (chunked attention).
        head_chunks: How layers with `attention_head_chunks` divide the heads.
        mask_mod: With `method="allgather"`: which keys of its document a query sees, as a function of row,
            head, query position and key position, for other masks. It takes the place of `is_causal`,
            which then is but the layout's. On CUDA through FlexAttention, elsewhere the mask is written out.
        pad_to_multiple_of: A further divisor of the padded length (2 x cp x tp with tensor parallelism).
        by_documents: Let attention by documents do also what would go through torch's ring.
        kernels: Chooses the kernels of attention by documents.
    """

    ulysses_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    head_chunks: HeadChunks | None = None
    mask_mod: MaskMod | None = None
    pad_to_multiple_of: int = 1
    by_documents: bool = False
    kernels: KernelChoice = calls_of

    @classmethod
    def of_run(
        cls, cfg: FullFinetuneConfig, sizes: AttentionSizes, divisor: int = 1
    ) -> ContextParallelOptions:
        """The options of a run.

        Args:
            cfg: The run's config.
            sizes: Of its model.
            divisor: What the length of a sequence must divide by.

        Raises:
            UserError: The model's heads cannot be divided as the config wants.
        """
        parts = None
        if cfg.context_parallel_method == "ulysses":
            tp = cfg.tensor_parallel_dim
            parts = ulysses_degree(
                cfg.context_parallel_dim,
                sizes.num_heads // tp,
                sizes.num_kv_heads // tp,
                cfg.context_parallel_ulysses_dim,
            )
        chunks, head_chunks = cfg.attention_head_chunks, None
        if chunks not in (None, 1):
            head_chunks = HeadChunks.of(chunks, sizes.num_heads, sizes.num_kv_heads, parts or 1)
        return cls(parts, sizes.sliding_window, head_chunks=head_chunks, pad_to_multiple_of=divisor)

    def check(self, cp: int, method: str, rotate_method: str) -> None:
        """Hold the options against each other and against the other arguments of a context.

        Raises:
            UserError: Naming the first that does not fit.
        """
        refuse(method_problems(method, rotate_method))
        refuse(ulysses_problems(self.ulysses_dim, cp, method))
        if self.mask_mod is not None:
            refuse(mask_function_problems(cp, method, limited=self.mask(True).is_limited))

    def mask(self, is_causal: bool) -> AttentionMask:
        """What work is balanced for."""
        return AttentionMask(is_causal, self.window, self.chunk)

    def heads_split(self, cp: int, method: str) -> int:
        """How many ranks share the heads; 1 where every rank has all of them."""
        if method != "ulysses":
            return 1
        return cp if self.ulysses_dim is None else self.ulysses_dim

    def multiple_of(self, cp: int) -> int:
        """What one rank's tokens must divide by, so that those of all divide by `pad_to_multiple_of`."""
        return self.pad_to_multiple_of // math.gcd(self.pad_to_multiple_of, cp)
