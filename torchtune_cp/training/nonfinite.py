"""Detects a non-finite loss or gradient on all ranks, before the optimizer uses it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune_cp.distributed import Meshes
from torchtune_cp.errors import UserError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepTotals:
    """What all ranks together know of an optimizer step before it is made; the same on every rank.

    Attributes:
        loss_sum: Sum of the token losses of the global step.
        grad_norm: 2-norm of its gradient, before clipping.
        finite: Whether both are finite.
    """

    loss_sum: float
    grad_norm: float
    finite: bool


def step_totals(
    meshes: Meshes, losses: Sequence[Tensor], grad_norm: Tensor, device: torch.device
) -> StepTotals:
    """Sum the loss over ranks and read it together with the norm, with a single device synchronisation.

    Args:
        meshes: Losses are summed over `meshes.loss`; `meshes.tp` must agree on what is finite.
        losses: This rank's sum of token losses for each micro-batch, scalars.
        grad_norm: Of the step's whole gradient, a scalar, already combined over ranks.
        device: Where the process group's collectives run.
    """
    loss = torch.stack([loss.detach().to(device, torch.float64) for loss in losses]).sum()
    norm = grad_norm.detach().to(device, torch.float64)
    # A norm combined from the parts that a rank holds could be finite on one tensor-parallel rank
    # and not on another, where a parameter is not cut over them: the ranks count votes.
    refused = (~torch.isfinite(loss) | ~torch.isfinite(norm)).to(torch.float64)
    packed = torch.stack([loss, refused])
    dist.all_reduce(packed, group=meshes.loss.get_group())
    if meshes.tp.size() > 1:
        votes = packed[1:].clone()
        dist.all_reduce(votes, group=meshes.tp.get_group())
        packed[1:] = votes
    loss_sum, any_refused, norm_value = torch.cat([packed, norm.reshape(1)]).tolist()
    # Finite parts can add up to more than a float holds.
    finite = any_refused == 0 and math.isfinite(loss_sum)
    return StepTotals(loss_sum, norm_value, finite)


class NonFiniteGuard:
    """Decides about steps whose loss or gradient is NaN or infinite (`on_nonfinite`).

    Attributes:
        count: Steps skipped so far in the whole run; a resumed run sets it.
    """

    def __init__(
        self, action: str, meshes: Meshes, *, before_raising: Callable[[], None] | None = None
    ) -> None:
        """Count from zero.

        Args:
            action: `skip` (the optimizer leaves the step out) or `raise` (the run ends).
            meshes: Names the data-parallel rank whose samples are named.
            before_raising: Called on every rank before the run ends, for what must not be lost: a
                checkpoint that is being written.
        """
        assert action in ("skip", "raise"), action
        self.count = 0
        self._before_raising = before_raising
        self._action = action
        self._meshes = meshes

    def allows(
        self,
        totals: StepTotals,
        *,
        step: int,
        losses: Sequence[Tensor],
        batches: Sequence[dict[str, Tensor]],
    ) -> bool:
        """Return whether the optimizer may make the step; collective, with the same result on every rank.

        A refused step costs a collective and a warning on rank 0 (the package's logger writes there
        only); a step that is let through costs nothing.

        Args:
            totals: From `step_totals`.
            step: The number of the step, from 1 on.
            losses: This rank's sum of token losses for each micro-batch.
            batches: This rank's micro-batches, whole; those with `sample_ids` [b] are named by
                them.

        Raises:
            UserError: The step is refused and `on_nonfinite` is `raise`.
        """
        if totals.finite:
            return True
        samples = self._samples(losses, batches)
        what = f"the loss is {totals.loss_sum}"
        if math.isfinite(totals.loss_sum):
            what = f"the gradient's norm is {totals.grad_norm} (the loss is finite)"
        if self._action == "raise":
            if self._before_raising is not None:
                self._before_raising()
            raise UserError(
                f"step {step}: {what}; {samples}; on_nonfinite=raise ends the run,"
                " on_nonfinite=skip skips such steps"
            )
        self.count += 1
        if self.count == 1:
            # torch distinguishes a schedule that advances before the first optimizer step from one that is
            # stepped in the wrong order by nothing.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        _LOG.warning(
            "step %d skipped: %s; %s; skipped so far: %d (on_nonfinite=skip)",
            step,
            what,
            samples,
            self.count,
        )
        return False

    def _samples(self, losses: Sequence[Tensor], batches: Sequence[dict[str, Tensor]]) -> str:
        """Name the samples of the step, of all data-parallel ranks, and the micro-batches at fault."""
        mine = (
            self._meshes.dp.get_local_rank(),
            [b["sample_ids"].tolist() if "sample_ids" in b else None for b in batches],
            [not bool(torch.isfinite(loss)) for loss in losses],
        )
        everybody: list[tuple[int, list[list[int] | None], list[bool]]] = [mine]
        if dist.get_world_size() > 1:
            everybody = [mine] * dist.get_world_size()
            dist.all_gather_object(everybody, mine)
        ids: dict[int, list[list[int] | None]] = {}
        at_fault: set[tuple[int, int]] = set()
        for dp_rank, rank_ids, bad in everybody:
            ids[dp_rank] = rank_ids  # peers of a data-parallel rank read the same samples
            at_fault |= {(dp_rank, i) for i, is_bad in enumerate(bad) if is_bad}
        parts = []
        if at_fault:
            parts.append(
                "micro-batches whose loss is not finite: "
                + ", ".join(
                    f"number {i + 1} of data-parallel rank {dp_rank} ({_listed(ids[dp_rank][i])})"
                    for dp_rank, i in sorted(at_fault)
                )
            )
        whole = [batch for dp_rank in sorted(ids) for batch in ids[dp_rank]]
        flat = None if None in whole else [n for batch in whole if batch for n in batch]
        parts.append(f"the step's {_listed(flat)}")
        return "; ".join(parts)


def _listed(ids: list[int] | None) -> str:
    if ids is None:
        return "samples (ids unknown: the collate function passes no sample_ids on)"
    # -1 marks padding without content.
    return f"samples {', '.join(str(number) for number in ids if number >= 0)}"
