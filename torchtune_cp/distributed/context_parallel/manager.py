"""The one door through which a batch reaches the model: cut along the sequence, attention distributed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtune_cp.distributed.context_parallel.layout import (
    consecutive_indices,
    head_tail_indices,
    pad_batch,
)
from torchtune_cp.distributed.context_parallel.torch_private import ring_attention
from torchtune_cp.errors import UserError

ROTATE_METHODS = ("allgather", "alltoall")


def _pad(batch: dict[str, torch.Tensor], divisor: int, is_causal: bool) -> dict[str, torch.Tensor]:
    padded = pad_batch(batch, divisor)
    if not is_causal and padded["tokens"].shape != batch["tokens"].shape:
        raise UserError(
            f"a sequence of {batch['tokens'].size(1)} tokens with is_causal=False: every token would"
            f" attend to the padding, for no mask hides it; give a length that divides by {divisor}"
        )
    return padded


@contextlib.contextmanager
def context_parallel(
    cp_mesh: DeviceMesh | None,
    batch: dict[str, torch.Tensor],
    *,
    is_causal: bool = True,
    rotate_method: str = "allgather",
    pad_to_multiple_of: int = 1,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Cut a batch along the sequence and distribute attention over the context-parallel ranks.

    Must enclose the forward AND the backward pass: attention's backward talks to the other ranks too.
    Inside it, every ``F.scaled_dot_product_attention`` call is ring attention over ``cp_mesh``; all ranks
    of the mesh must enter it with the same batch. Any length is accepted: the sequence is padded to a
    multiple of ``2 x cp`` (and of ``pad_to_multiple_of``), with labels of -100 on the padding.

    Args:
        cp_mesh: One-dimensional mesh of the ranks that share each sequence; None, or of size 1, yields
            the whole batch, padded only if ``pad_to_multiple_of`` asks for it.
        batch: ``tokens`` [b, s] and optionally ``labels`` (already shifted), ``input_pos`` [b, s]. It is
            left as it is: what is yielded are copies.
        is_causal: Whether the model's attention is causal. Decides the layout: head-tail balanced for
            causal attention, consecutive slices for bidirectional attention.
        rotate_method: How keys and values reach the other ranks: ``"allgather"`` (one collective, then
            all of them in memory) or ``"alltoall"`` (passed round the ring, one slice at a time).
        pad_to_multiple_of: A further divisor of the padded length (2 x cp x tp with tensor parallelism).

    Yields:
        A dict with this rank's slices [b, n], n = padded length / cp. ``input_pos`` holds the true
        positions of the slice and is always there when the sequence is cut: a model must take its rotary
        positions from it.

    Raises:
        UserError: An unknown ``rotate_method``, a mesh of several dimensions, a malformed batch, or a
            bidirectional sequence that would need padding.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        # Tensor parallelism alone cuts the residual stream, too, and needs a length that divides.
        if pad_to_multiple_of > 1:
            batch = _pad(batch, pad_to_multiple_of, is_causal)
        yield batch
        return
    if rotate_method not in ROTATE_METHODS:
        raise UserError(
            f"context_parallel_rotate_method={rotate_method!r}: allowed are {', '.join(ROTATE_METHODS)}"
        )
    if cp_mesh.ndim != 1:
        raise UserError(f"cp_mesh must have one dimension, not {cp_mesh.mesh_dim_names}")
    divisor = math.lcm(2 * cp_mesh.size(), pad_to_multiple_of)
    local = _pad(batch, divisor, is_causal)
    with ring_attention(
        cp_mesh,
        buffers=list(local.values()),
        seq_dims=[1] * len(local),
        load_balance=is_causal,
        rotate_method=rotate_method,
    ):
        yield local


def unshard(
    local: torch.Tensor,
    cp_mesh: DeviceMesh | None,
    *,
    seq_len: int,
    is_causal: bool = True,
    dim: int = 1,
) -> torch.Tensor:
    """Put a result that was computed on slices back in the order of the whole sequence (no gradient).

    Args:
        local: This rank's slice, for example logits [b, n, vocab].
        cp_mesh: The mesh given to :func:`context_parallel`.
        seq_len: Length of the sequence before padding.
        is_causal: As given to :func:`context_parallel`.
        dim: The sequence dimension of ``local``.

    Returns:
        The whole sequence, for example [b, seq_len, vocab], on every rank, without the padding.
    """
    if cp_mesh is None or cp_mesh.size() == 1:
        return local
    cp = cp_mesh.size()
    with torch.no_grad():
        slices = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(cp)]
        dist.all_gather(slices, local.contiguous(), group=cp_mesh.get_group())
        length = local.size(dim) * cp
        layout = head_tail_indices if is_causal else consecutive_indices
        restore = torch.argsort(layout(length, cp).flatten()).to(local.device)
        whole = torch.cat(slices, dim=dim).index_select(dim, restore)
        return whole.narrow(dim, 0, seq_len)
