"""Learning-rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtune_cp.errors import UserError


def _with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    last_epoch: int,
    decay: Callable[[float], float],
) -> LambdaLR:
    if num_warmup_steps < 0:
        raise UserError(f"lr_scheduler.num_warmup_steps={num_warmup_steps}: must not be negative")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return decay(min(progress, 1.0))

    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Rise linearly from 0 to the optimizer's rate, then fall along a cosine.

    Args:
        optimizer: Its groups' `lr` are the peak rates.
        num_warmup_steps: Optimizer steps of the rise; step 0 then has the rate 0.
        num_training_steps: Optimizer steps of the whole run.
        num_cycles: Periods of the cosine; 0.5 ends at 0.
        last_epoch: Index of the last step when resuming.

    Raises:
        UserError: A negative `num_warmup_steps`.
    """
    return _with_warmup(
        optimizer,
        num_warmup_steps,
        num_training_steps,
        last_epoch,
        lambda progress: max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))),
    )


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly from 0 to the optimizer's rate, then fall linearly to 0.

    Args:
        optimizer: Its groups' `lr` are the peak rates.
        num_warmup_steps: Optimizer steps of the rise.
        num_training_steps: Optimizer steps of the whole run.
        last_epoch: Index of the last step when resuming.

    Raises:
        UserError: A negative `num_warmup_steps`.
    """
    return _with_warmup(
        optimizer, num_warmup_steps, num_training_steps, last_epoch, lambda progress: 1.0 - progress
    )


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int = 0, last_epoch: int = -1
) -> LambdaLR:
    """Rise linearly from 0 to the optimizer's rate and stay there.

    Args:
        optimizer: Its groups' `lr` are the peak rates.
        num_warmup_steps: Optimizer steps of the rise.
        num_training_steps: Accepted for uniformity; without effect.
        last_epoch: Index of the last step when resuming.

    Raises:
        UserError: A negative `num_warmup_steps`.
    """
    return _with_warmup(optimizer, num_warmup_steps, num_training_steps, last_epoch, lambda _: 1.0)
