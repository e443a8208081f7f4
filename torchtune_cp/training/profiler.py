"""torch's profiler, set up from a config."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.distributed as dist

from torchtune_cp.config.argument_types import AtLeast
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.errors import UserError


class DisabledProfiler:
    """Stands where a profiler would; does nothing."""

    def __enter__(self) -> DisabledProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self) -> None:
        """Do nothing at the end of a step."""


def setup_torch_profiler(
    enabled: bool = False,
    cpu: bool = True,
    cuda: bool = True,
    profile_memory: bool = False,
    with_stack: bool = False,
    record_shapes: bool = False,
    with_flops: bool = False,
    wait_steps: Annotated[int, AtLeast(0)] = 1,
    warmup_steps: Annotated[int, AtLeast(0)] = 1,
    active_steps: Annotated[int, AtLeast(1)] = 1,
    num_cycles: Annotated[int, AtLeast(0)] = 1,
    output_dir: str = "profiling_outputs",
) -> Any:
    """Build a profiler that writes one Chrome trace per rank and cycle.

    Args:
        enabled: Whether to profile at all.
        cpu: Record operators on the host.
        cuda: Record kernels, where there is a CUDA device.
        profile_memory: Record allocations.
        with_stack: Record Python stacks (slow).
        record_shapes: Record the operators' input shapes.
        with_flops: Estimate FLOPs of some operators.
        wait_steps: Steps to leave out at the start of a cycle.
        warmup_steps: Steps to trace and throw away.
        active_steps: Steps to keep.
        num_cycles: How often to repeat; 0 means to the end.
        output_dir: `rankN_stepM.json` files are written here.

    Returns:
        A context manager whose `step()` is called after each training step.

    Raises:
        UserError: Enabled with neither `cpu` nor `cuda`, or without a step to keep.
    """
    if not enabled:
        return DisabledProfiler()
    activities = []
    if cpu:
        activities.append(torch.profiler.ProfilerActivity.CPU)
    if cuda and torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    if not activities:
        raise UserError(
            "profiler.enabled=True, but neither profiler.cpu nor profiler.cuda is usable"
        )
    if active_steps < 1:
        raise UserError(f"profiler.active_steps={active_steps}: must be at least 1")
    folder = expand_home(output_dir)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def write(profiler: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank{rank}_step{profiler.step_num}.json"))

    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=wait_steps, warmup=warmup_steps, active=active_steps, repeat=num_cycles
        ),
        on_trace_ready=write,
        profile_memory=profile_memory,
        with_stack=with_stack,
        record_shapes=record_shapes,
        with_flops=with_flops,
    )
