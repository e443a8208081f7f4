"""The parts of a training loop: loss, step, schedules, activation checkpointing, seeds."""

from torchtune_cp.training.loss import LinearCrossEntropyLoss
from torchtune_cp.training.lr_schedulers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)
from torchtune_cp.training.profiler import setup_torch_profiler

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {
    "loss": ("LinearCrossEntropyLoss",),
    "lr_scheduler": (
        "get_constant_schedule_with_warmup",
        "get_cosine_schedule_with_warmup",
        "get_linear_schedule_with_warmup",
    ),
    "profiler": ("setup_torch_profiler",),
}

__all__ = [
    "LinearCrossEntropyLoss",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_linear_schedule_with_warmup",
    "setup_torch_profiler",
]
