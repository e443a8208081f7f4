"""The two ways to distribute attention, and the choice between them.

    torch's ring          whole rows, causal or bidirectional, with torch's experimental context parallelism
    attention by documents  everything else: packs, windows, mask functions, the other methods

Both are exact. A backend cuts the batch, says who holds what, and gives the region in which models attend.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtune_cp.attention import Region
from torchtune_cp.config.context_parallel_rules import padding_problems
from torchtune_cp.distributed.context_parallel.batch_attention import BatchAttention
from torchtune_cp.distributed.context_parallel.collectives import Grid
from torchtune_cp.distributed.context_parallel.cut import cut_batch, pad_batch, slices_of
from torchtune_cp.distributed.context_parallel.entries import (
    DOCUMENT_KEYS,
    SLICE_KEY,
    other_entries,
)
from torchtune_cp.distributed.context_parallel.layout import Layout, padded_length, ring_layout
from torchtune_cp.distributed.context_parallel.ops import by_documents
from torchtune_cp.distributed.context_parallel.options import ContextParallelOptions, refuse
from torchtune_cp.distributed.context_parallel.torch_private import ring_attention

Batch = dict[str, torch.Tensor]

NONE, RING, DOCUMENTS = "none", "ring", "documents"


class Backend(NamedTuple):
    """Which backend a batch takes, and the reason.

    Attributes:
        name: `"none"` (plain attention on whole rows), `"ring"` (torch's) or `"documents"`.
        why: For people.
    """

    name: str
    why: str


class CutBatch(NamedTuple):
    """What a backend has made of a batch.

    Attributes:
        entries: This rank's.
        layout: Who holds what.
        rank: This one.
    """

    entries: Batch
    layout: Layout
    rank: int


def choose_backend(
    cp: int, batch: Batch, is_causal: bool, method: str, options: ContextParallelOptions
) -> Backend:
    """Decide how attention over a batch is distributed.

    Args:
        cp: Context-parallel degree.
        batch: As given to the context.
        is_causal: Likewise.
        method: Likewise.
        options: Likewise.
    """
    marks = [key for key in DOCUMENT_KEYS if batch.get(key) is not None]
    mask = options.mask(is_causal).within(batch["tokens"].size(1))
    for holds, why in (
        (bool(marks), f"the batch has documents ({', '.join(marks)})"),
        (mask.is_limited, "a window or a chunk is shorter than the rows"),
        (options.mask_mod is not None, "a mask function is given"),
        (options.head_chunks is not None, "heads are done in chunks"),
        (options.by_documents, "it was asked for"),
        (cp > 1 and method != "ring", f"the method is {method}"),
    ):
        if holds:
            return Backend(DOCUMENTS, why)
    return Backend(RING, "whole rows") if cp > 1 else Backend(NONE, "whole rows on one rank")


def padded_rows(batch: Batch, is_causal: bool, divisor: int) -> Batch:
    """Whole rows padded to a length that divides.

    Raises:
        UserError: The padding would be seen.
    """
    length = batch["tokens"].size(1)
    refuse(padding_problems(length, padded_length(length, divisor), divisor, is_causal))
    return pad_batch(batch, divisor)


@contextlib.contextmanager
def ring(
    mesh: DeviceMesh,
    batch: Batch,
    *,
    is_causal: bool,
    rotate_method: str,
    options: ContextParallelOptions,
) -> Generator[tuple[CutBatch, Region], None, None]:
    """Torch's ring; every row is padded to a multiple of `2 x cp` (and of `pad_to_multiple_of`)."""
    cp, rank = mesh.size(), mesh.get_local_rank()
    rows, length = batch["tokens"].shape
    whole = padded_rows(batch, is_causal, math.lcm(2 * cp, options.pad_to_multiple_of))
    layout = ring_layout((rows, length), whole["tokens"].size(1), cp, is_causal=is_causal)
    local = {**other_entries(batch), **cut_batch(whole, layout, rank)}
    with ring_attention(
        mesh, batch["tokens"].device, load_balance=is_causal, rotate_method=rotate_method
    ) as attend:
        region = Region(attend, None, is_causal, options.window, options.chunk)
        yield CutBatch(local, layout, rank), region


@contextlib.contextmanager
def documents(
    mesh: DeviceMesh | None,
    batch: Batch,
    *,
    is_causal: bool,
    method: str,
    rotate_method: str,
    options: ContextParallelOptions,
) -> Generator[tuple[CutBatch, Region], None, None]:
    """Attention by documents, also on a single rank."""
    cp = 1 if mesh is None else mesh.size()
    grid = None
    if mesh is not None and cp > 1:
        parts = options.heads_split(cp, method)
        grid = Grid(mesh.get_group(), cp, mesh.get_local_rank(), parts)
    rank, heads_split = (0, 1) if grid is None else (grid.rank, grid.heads_split)
    longest = batch["tokens"].size(1) * (cp if SLICE_KEY in batch else 1)
    local, layout = slices_of(
        batch,
        cp,
        rank,
        options.mask(is_causal).within(longest),
        heads_split=heads_split,
        multiple_of=options.multiple_of(cp),
    )
    attention = BatchAttention(layout, grid, method, rotate_method, options.kernels)
    attend = by_documents(*attention.heads_split)
    region = Region(attend, attention, is_causal, options.window, options.chunk, options.mask_mod)
    yield CutBatch(local, layout, rank), region
