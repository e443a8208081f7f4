"""The one door through which a batch reaches the model: cut along the sequence, attention distributed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from torchtune_cp.distributed.context_parallel.attention import DocumentAttention
from torchtune_cp.distributed.context_parallel.collectives import Grid
from torchtune_cp.distributed.context_parallel.documents import (
    AttentionMask,
    documents_of,
)
from torchtune_cp.distributed.context_parallel.entries import (
    DOCUMENT_KEYS,
    check_entries,
    other_entries,
)
from torchtune_cp.distributed.context_parallel.flex import (
    MaskMod,
    MaskModAttention,
    mask_mod_region,
)
from torchtune_cp.distributed.context_parallel.layout import (
    DocumentLayout,
    SequenceLayout,
    cut_batch,
    document_layout,
    layout_of_slices,
    pad_batch,
    whole_rows,
)
from torchtune_cp.distributed.context_parallel.ops import document_region
from torchtune_cp.distributed.context_parallel.positions import (
    in_longer_rows,
    slices_with_positions,
    with_positions,
)
from torchtune_cp.distributed.context_parallel.schedule import make_schedule
from torchtune_cp.distributed.context_parallel.torch_private import ring_attention
from torchtune_cp.errors import UserError

METHODS = ("ring", "allgather", "ulysses")
ROTATE_METHODS = ("allgather", "alltoall")


class LocalBatch(dict[str, torch.Tensor]):
    """One rank's slices of a batch, and who holds what of it.

    Attributes:
        layout: To be given to :func:`unshard` and to :func:`balance.attention_imbalance`.
        attention_pairs: See :func:`balance.attention_work`.
    """

    layout: DocumentLayout | SequenceLayout
    attention_pairs: float

    def __init__(
        self, entries: dict[str, torch.Tensor], layout: DocumentLayout | SequenceLayout, rank: int
    ) -> None:
        """Keep the entries and the layout; ``rank`` is the one that holds the entries."""
        tokens = entries["tokens"].detach()  # not the caller's own tensor
        tokens.needs_context = True  # type: ignore[attr-defined]  # models look at it
        super().__init__({**entries, "tokens": tokens})
        self.layout = layout
        self.attention_pairs = layout.pairs()[rank // layout.heads_split] / layout.heads_split


def _pad(
    batch: dict[str, torch.Tensor], divisor: int, whole_rows_only: bool
) -> dict[str, torch.Tensor]:
    padded = pad_batch(batch, divisor)
    if whole_rows_only and padded["tokens"].shape != batch["tokens"].shape:
        raise UserError(
            f"a sequence of {batch['tokens'].size(1)} tokens with is_causal=False: every token would"
            f" attend to the padding, for no mask hides it; give a length that divides by {divisor}"
        )
    return padded


def _shape(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    rows, length = batch["tokens"].shape
    return rows, length


def _check(
    cp_mesh: DeviceMesh | None, method: str, rotate_method: str, ulysses_dim: int | None
) -> int:
    """Check the choices; returns in how many parts the heads are given out."""
    if method not in METHODS:
        raise UserError(f"context_parallel_method={method!r}: allowed are {', '.join(METHODS)}")
    if rotate_method not in ROTATE_METHODS:
        raise UserError(
            f"context_parallel_rotate_method={rotate_method!r}: allowed are {', '.join(ROTATE_METHODS)}"
        )
    if cp_mesh is not None and cp_mesh.ndim != 1:
        raise UserError(f"cp_mesh must have one dimension, not {cp_mesh.mesh_dim_names}")
    cp = 1 if cp_mesh is None else cp_mesh.size()
    if method != "ulysses":
        if ulysses_dim not in (None, 1):
            raise UserError(
                f"context_parallel_ulysses_dim={ulysses_dim}: it is for"
                f" context_parallel_method=ulysses, not {method}; set it to null"
            )
        return 1
    parts = cp if ulysses_dim is None else ulysses_dim
    if parts < 1 or cp % parts:
        raise UserError(
            f"context_parallel_ulysses_dim={parts}: must divide context_parallel_dim={cp}"
        )
    return parts


def _check_mask_mod(cp_mesh: DeviceMesh | None, method: str, window: int | None) -> None:
    if window is not None:
        raise UserError(f"window={window} with a mask_mod: let the mask_mod say what is seen")
    if cp_mesh is not None and cp_mesh.size() > 1 and method != "allgather":
        raise UserError(
            f"context_parallel_method={method} with a mask_mod: a mask of the model's own needs the keys"
            " side by side; set context_parallel_method=allgather"
        )


def _region(
    layout: DocumentLayout,
    grid: Grid | None,
    method: str,
    rotate_method: str,
    mask_mod: MaskMod | None,
    device: torch.device,
) -> contextlib.AbstractContextManager[None]:
    """What replaces attention for a batch laid out by documents."""
    if mask_mod is not None:
        return mask_mod_region(MaskModAttention(layout, mask_mod, grid, device))
    order = "allgather" if method == "allgather" else "ring"
    schedule = make_schedule(layout, order, 0 if grid is None else grid.ring_rank)
    return document_region(DocumentAttention(schedule, grid, rotate_method))


def _tell_models(window: int | None, mask_mod: MaskMod | None) -> None:
    """Let a model with a sliding window find out whether its context was told of it.

    Models do not know this package: they look at what stands for attention.
    """
    if mask_mod is None:
        F.scaled_dot_product_attention.window = window  # type: ignore[attr-defined]


_entered = False


@contextlib.contextmanager
def context_parallel(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, torch.Tensor],
    *,
    is_causal: bool = True,
    rotate_method: str = "allgather",
    pad_to_multiple_of: int = 1,
    method: str = "ring",
    window: int | None = None,
    ulysses_dim: int | None = None,
    mask_mod: MaskMod | None = None,
    already_cut: bool = False,
    by_documents: bool = False,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Cut a batch along the sequence and distribute attention over the context-parallel ranks.

    Must enclose the forward AND the backward pass: attention's backward talks to the other ranks too.
    Inside it, every ``F.scaled_dot_product_attention`` call attends over all ranks of ``cp_mesh``, each
    token within its document; all ranks of the mesh must enter it with the same batch.

    A batch without ``seq_lens``, with ``method="ring"`` and no window that cuts anything, goes through
    torch's ring: any length is accepted, every row is padded to a multiple of ``2 x cp`` (and of
    ``pad_to_multiple_of``), with labels of -100 on the padding. Everything else is laid out by documents
    (rows, if there are no ``seq_lens``): they come as one sequence ``[1, n]``, the rows' padding is dropped,
    and each rank's part is filled up to the longest one.

    Args:
        cp_mesh: One-dimensional mesh of the ranks that share each sequence; None, or of size 1, yields
            the whole batch, padded only if ``pad_to_multiple_of`` asks for it. Documents and windows are
            kept there, too.
        batch: ``tokens`` [b, s] and optionally ``labels`` (already shifted), ``input_pos`` [b, s], and for
            packed rows ``seq_lens`` [b, most documents] or ``cu_seqlens`` [documents + 1], see
            :func:`documents.documents_of`. Other entries [b, s, ...] are cut with them; those without a
            dimension of s go to all ranks. It is left as it is: what is yielded are copies.
        is_causal: Whether the model's attention is causal. Decides the layout: head-tail balanced for
            causal attention, consecutive slices for bidirectional attention.
        rotate_method: How keys and values reach the other ranks in a ring: ``"allgather"`` (one
            collective, then all of them in memory) or ``"alltoall"`` (one rank's at a time).
        pad_to_multiple_of: A further divisor of the padded length (2 x cp x tp with tensor parallelism).
        method: ``"ring"`` (keys and values pass by, rank by rank), ``"allgather"`` (they are gathered
            first) or ``"ulysses"`` (an all-to-all gives each rank all tokens of some heads).
        window: The model's sliding window: a token attends to itself and the ``window - 1`` before it (and
            behind it, where attention is bidirectional).
        ulysses_dim: With ``"ulysses"``: how many ranks share the heads, a divisor of the mesh's size;
            rings connect the ranks with the same heads. None for all of them.
        mask_mod: With ``"allgather"``: which keys of its document a query sees, as a function of row,
            head, query position and key position, for masks that documents, causality and a window
            cannot say. It takes the place of ``is_causal``, which then is but the layout's. On CUDA through
            FlexAttention, elsewhere with the mask written out.
        already_cut: The batch holds this rank's slices already, as a context-parallel data loader hands
            them out: ``tokens`` [b, n] and what goes with them, ``cu_seqlens`` and ``cu_seqlens_padded``
            [documents + 1], see :func:`layout.layout_of_slices`. They are yielded as one sequence
            ``[1, b n]``.
        by_documents: Lay any batch out by documents, also one that would go through torch's ring, and one
            that a single rank has: attention then is this project's operators alone, which attention over
            chunks of heads calls itself.

    Yields:
        A dict with this rank's slices, ``input_pos`` among them: a model must take its rotary positions
        from it. With several ranks, or documents, its attribute ``layout`` says who holds what.

    Raises:
        UserError: An unknown method, a mesh of several dimensions, a malformed batch, entries that cannot
            be cut or are named as in other libraries (``attention_mask``, ``position_ids``), slices cut
            for other ranks, a ``ulysses_dim`` that does not divide, or a bidirectional sequence that would
            need padding.
        RuntimeError: Entered inside another context-parallel region.
    """
    global _entered
    if _entered:
        raise RuntimeError("context_parallel cannot be entered inside another context_parallel")
    parts = _check(cp_mesh, method, rotate_method, ulysses_dim)
    check_entries(batch)
    cp = 1 if cp_mesh is None else cp_mesh.size()
    longest = batch["tokens"].size(1) * (cp if already_cut else 1)
    mask = AttentionMask(is_causal, window).within(longest)
    if mask_mod is not None:
        _check_mask_mod(cp_mesh, method, window)
        if already_cut:
            raise UserError("mask_mod with already_cut=True: give context_parallel the whole batch")
    by_documents |= any(batch.get(key) is not None for key in DOCUMENT_KEYS)
    by_documents |= mask.window is not None or mask_mod is not None
    _entered = True
    try:
        if already_cut:
            layout = layout_of_slices(batch, cp, mask, heads_split=parts)
            grid = None
            if cp_mesh is not None and cp > 1:
                grid = Grid(cp_mesh.get_group(), cp, cp_mesh.get_local_rank(), parts)
            local = slices_with_positions(batch, layout, 0 if grid is None else grid.rank)
            with _region(layout, grid, method, rotate_method, None, batch["tokens"].device):
                _tell_models(window, None)
                yield LocalBatch(local, layout, 0 if grid is None else grid.rank)
            return
        if cp_mesh is None or cp == 1:
            # Tensor parallelism alone cuts the residual stream, too, and needs a length that divides.
            rows, length = _shape(batch)
            documents = documents_of(batch) if by_documents else ()
            if by_documents:
                batch = with_positions(batch, documents)
            if pad_to_multiple_of > 1:
                whole_rows_only = not is_causal and not by_documents
                batch = {**batch, **_pad(batch, pad_to_multiple_of, whole_rows_only)}
            if not by_documents:
                yield batch
                return
            documents = in_longer_rows(documents, length, batch["tokens"].size(1))
            layout = whole_rows(documents, _shape(batch), mask)
            with _region(layout, None, "ring", rotate_method, mask_mod, batch["tokens"].device):
                _tell_models(window, mask_mod)
                yield LocalBatch(batch, layout, 0)
            return
        if not by_documents and method == "ring":
            divisor = math.lcm(2 * cp, pad_to_multiple_of)
            local = _pad(batch, divisor, not is_causal)
            rows, length = _shape(batch)
            sequence = SequenceLayout(length, local["tokens"].size(1), cp, is_causal, rows)
            with ring_attention(
                cp_mesh,
                buffers=list(local.values()),
                seq_dims=[1] * len(local),
                load_balance=is_causal,
                rotate_method=rotate_method,
            ):
                _tell_models(window, mask_mod)
                yield LocalBatch(
                    {**other_entries(batch), **local}, sequence, cp_mesh.get_local_rank()
                )
            return
        documents = documents_of(batch)
        batch = with_positions(batch, documents)
        layout = document_layout(
            documents,
            _shape(batch),
            cp,
            mask,
            heads_split=parts,
            # All ranks' parts together divide by pad_to_multiple_of then.
            multiple_of=pad_to_multiple_of // math.gcd(pad_to_multiple_of, cp),
        )
        grid = Grid(cp_mesh.get_group(), cp, cp_mesh.get_local_rank(), parts)
        local = cut_batch(batch, layout, grid.rank)
        with _region(layout, grid, method, rotate_method, mask_mod, batch["tokens"].device):
            _tell_models(window, mask_mod)
            yield LocalBatch(local, layout, grid.rank)
    finally:
        _entered = False


def unshard(
    local: torch.Tensor,
    cp_mesh: DeviceMesh | None,
    *,
    layout: DocumentLayout | SequenceLayout | None = None,
    seq_len: int | None = None,
    is_causal: bool = True,
    dim: int = 1,
) -> torch.Tensor:
    """Put a result that was computed on slices back in the order of the whole batch (no gradient).

    Args:
        local: This rank's slice, for example logits [b, n, vocab].
        cp_mesh: The mesh given to :func:`context_parallel`.
        layout: The ``layout`` of the batch that :func:`context_parallel` yielded.
        seq_len: In place of ``layout``, for a batch without documents that was cut by the ring: length
            of the sequence before padding.
        is_causal: With ``seq_len``: as given to :func:`context_parallel`.
        dim: The sequence dimension of ``local``.

    Returns:
        The whole sequence, for example [b, seq_len, vocab], on every rank, without the padding; 0 where
        the rows of a packed batch have padding.

    Raises:
        UserError: Neither ``layout`` nor ``seq_len``.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return local
    cp = cp_mesh.size()
    if layout is None:
        if seq_len is None:
            raise UserError("unshard needs layout=, the layout of the batch that was yielded")
        layout = SequenceLayout(seq_len, local.size(dim) * cp, cp, is_causal)
    with torch.no_grad():
        slices = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(cp)]
        dist.all_gather(slices, local.contiguous(), group=cp_mesh.get_group())
        return layout.restore(slices, dim)
