"""Where a batch is cut along the sequence before it reaches the model, and attention is distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtune_cp.attention import (
    distributed_attention,
    is_distributed,
    mark_for_context,
)
from torchtune_cp.distributed.context_parallel.backends import (
    DOCUMENTS,
    NONE,
    Backend,
    CutBatch,
    choose_backend,
    documents,
    padded_rows,
    ring,
)
from torchtune_cp.distributed.context_parallel.cut import restore
from torchtune_cp.distributed.context_parallel.entries import check_entries
from torchtune_cp.distributed.context_parallel.layout import Layout, ring_layout
from torchtune_cp.distributed.context_parallel.options import ContextParallelOptions
from torchtune_cp.errors import UserError


class LocalBatch(dict[str, torch.Tensor]):
    """One rank's slices of a batch, and who holds what of it.

    Attributes:
        layout: To be given to `unshard` and to `balance.attention_imbalance`.
        attention_pairs: See `balance.attention_work`.
        backend: How attention is distributed, and why so.
    """

    layout: Layout
    attention_pairs: float
    backend: Backend

    def __init__(self, cut: CutBatch, backend: Backend) -> None:
        """Keep the entries and the layout."""
        entries, layout, rank = cut
        super().__init__({**entries, "tokens": mark_for_context(entries["tokens"])})
        self.layout = layout
        self.attention_pairs = layout.pairs()[rank // layout.heads_split] / layout.heads_split
        self.backend = backend


@contextlib.contextmanager
def context_parallel(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, torch.Tensor],
    *,
    is_causal: bool = True,
    rotate_method: str = "allgather",
    method: str = "ring",
    options: ContextParallelOptions | None = None,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Cut a batch along the sequence and distribute attention over the context-parallel ranks.

    Must enclose the forward AND the backward pass: attention's backward talks to the other ranks too.
    Inside it, every `torchtune_cp.attention.attention` and `F.scaled_dot_product_attention` attends
    over all ranks of `cp_mesh`, each token within its document; all ranks of the mesh must enter it
    with the same batch, or each with its slices from one data loader.

    A batch is documents: those that it marks, or else its rows. Whole rows with `method="ring"` go through
    torch's ring, see `backends.choose_backend`: any length is accepted, and padded with labels of -100.
    Everything else is laid out by documents: they come as one sequence `[1, n]`, the rows' padding is
    dropped, and each rank's part is filled up to the longest one.

    Args:
        cp_mesh: One-dimensional mesh of the ranks that share each sequence; None, or of size 1, yields
            the whole batch, padded only if `pad_to_multiple_of` asks for it. Documents and windows are
            kept there, too.
        batch: `tokens` [b, s] and optionally `labels` (already shifted), `input_pos` [b, s], and for
            packed rows `seq_lens` [b, most documents] or `cu_seqlens` [documents + 1], see
            `documents.documents_of`. Other entries [b, s, ...] are cut with them; those without a
            dimension of s go to all ranks. It is left as it is: what is yielded are copies. A batch of
            `create_cp_dataloader` is this rank's slices already, and says so itself.
        is_causal: Whether the model's attention is causal. Decides the layout.
        rotate_method: How keys and values reach the other ranks in a ring: `"allgather"` (one
            collective, then all of them in memory) or `"alltoall"` (one rank's at a time).
        method: `"ring"` (keys and values pass by, rank by rank), `"allgather"` (they are gathered
            first) or `"ulysses"` (an all-to-all gives each rank all tokens of some heads).
        options: Everything that is rarer.

    Yields:
        A dict with this rank's slices, `input_pos` among them: a model must take its rotary positions
        from it. With several ranks, or documents, its attribute `layout` says who holds what.

    Raises:
        UserError: An unknown method, a mesh of several dimensions, options that do not fit, a malformed
            batch, entries that cannot be cut or are named as in other libraries (`attention_mask`,
            `position_ids`), slices cut for other ranks, or a bidirectional row that would need padding.
        RuntimeError: Entered inside another context-parallel region.
    """
    if is_distributed():
        raise RuntimeError("context_parallel cannot be entered inside another context_parallel")
    if cp_mesh is not None and cp_mesh.ndim != 1:
        raise UserError(f"cp_mesh must have one dimension, not {cp_mesh.mesh_dim_names}")
    cp = 1 if cp_mesh is None else cp_mesh.size()
    options = options or ContextParallelOptions()
    options.check(cp, method, rotate_method)
    check_entries(batch)
    backend = choose_backend(cp, batch, is_causal, method, options)
    if backend.name == NONE:
        divisor = options.pad_to_multiple_of
        yield batch if divisor == 1 else {**batch, **padded_rows(batch, is_causal, divisor)}
        return
    if backend.name == DOCUMENTS:
        entered = documents(
            cp_mesh,
            batch,
            is_causal=is_causal,
            method=method,
            rotate_method=rotate_method,
            options=options,
        )
    else:
        assert cp_mesh is not None
        entered = ring(
            cp_mesh, batch, is_causal=is_causal, rotate_method=rotate_method, options=options
        )
    with entered as (cut, region), distributed_attention(region):
        yield LocalBatch(cut, backend)


def unshard(
    local: torch.Tensor,
    cp_mesh: DeviceMesh | None,
    *,
    layout: Layout | None = None,
    seq_len: int | None = None,
    is_causal: bool = True,
    dim: int = 1,
) -> torch.Tensor:
    """Put a result that was computed on slices back in the order of the whole batch (no gradient).

    Args:
        local: This rank's slice, for example logits [b, n, vocab].
        cp_mesh: The mesh given to `context_parallel`.
        layout: The `layout` of the batch that `context_parallel` yielded.
        seq_len: In place of `layout`, for a batch without documents that was cut by the ring: length
            of the sequence before padding.
        is_causal: With `seq_len`: as given to `context_parallel`.
        dim: The sequence dimension of `local`; dimension 0 has the rows.

    Returns:
        The whole sequence, for example [b, seq_len, vocab], on every rank, without the padding; 0 where
        the rows of a packed batch have padding.

    Raises:
        UserError: Neither `layout` nor `seq_len`.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return local
    cp = cp_mesh.size()
    if layout is None:
        if seq_len is None:
            raise UserError("unshard needs layout=, the layout of the batch that was yielded")
        shape = (local.size(0), seq_len)
        layout = ring_layout(shape, local.size(dim) * cp, cp, is_causal=is_causal)
    with torch.no_grad():
        slices = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(cp)]
        dist.all_gather(slices, local.contiguous(), group=cp_mesh.get_group())
        return restore(layout, slices, dim)
