"""What a token-normalised step over ranks and micro-batches needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtune_cp.distributed.context_parallel.layout import IGNORE_INDEX
from torchtune_cp.training.optim_in_bwd import GradientNorm


def micro_batches(
    loader: Iterable[dict[str, Tensor]], count: int
) -> Iterator[list[dict[str, Tensor]]]:
    """Group a loader's batches into optimizer steps.

    All micro-batches of a step are read before its first forward pass: the number of label tokens in
    the global step is the denominator of every one of them.

    Args:
        loader: Yields batches (token ids: small).
        count: Micro-batches per step. A last, incomplete group is yielded too.
    """
    iterator = iter(loader)
    while group := list(islice(iterator, count)):
        yield group


def count_label_tokens(
    batches: Sequence[dict[str, Tensor]], ignore_index: int = IGNORE_INDEX
) -> int:
    """Count the labels that are trained on in some batches."""
    return sum(int((batch["labels"] != ignore_index).sum()) for batch in batches)


def sum_over(mesh: DeviceMesh, *values: float | Tensor, device: torch.device) -> list[float]:
    """Add numbers up over the ranks of a one-dimensional mesh.

    Args:
        mesh: Its ranks take part.
        values: Numbers or scalar tensors of this rank.
        device: Where the process group's collectives run.

    Returns:
        The sums, the same on every rank. Added in float64, so that counts are exact and the order of
        ranks does not show.
    """
    packed = torch.stack(
        [torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values]
    )
    dist.all_reduce(packed, group=mesh.get_group())
    return packed.tolist()


def gradient_norm(model: nn.Module) -> Tensor:
    """The 2-norm of all gradients over all ranks, in float32.

    Parameters may be sharded over different meshes, or over different dimensions of one (a norm's scale
    under tensor parallelism is whole where a matrix is cut): each counts once.

    Args:
        model: After backward; parameters may be sharded (DTensor).

    Returns:
        A scalar tensor, the same on every rank.
    """
    norm = GradientNorm()
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm.add(parameter.grad)
    return norm.total()


def clip_gradients(model: nn.Module, max_norm: float, total_norm: Tensor) -> None:
    """Scale all gradients down so that their norm is at most ``max_norm``.

    Args:
        model: After backward.
        max_norm: The largest norm allowed.
        total_norm: From :func:`gradient_norm`.
    """
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total_norm)


def max_over(mesh: DeviceMesh, value: float, device: torch.device) -> float:
    """The largest of the ranks' numbers.

    Args:
        mesh: Its ranks take part.
        value: This rank's number.
        device: Where the process group's collectives run.
    """
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return largest.item()


def imbalance_over(mesh: DeviceMesh, work: float, device: torch.device) -> float:
    """The largest over the mean work of the ranks; 1.0 when all have the same.

    Args:
        mesh: Its ranks take part.
        work: This rank's, in any unit.
        device: Where the process group's collectives run.
    """
    (total,) = sum_over(mesh, work, device=device)
    return max_over(mesh, work, device) * mesh.size() / total if total else 1.0


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move a batch's tensors to a device."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
