"""From a step's operations and bytes to its time.

The model is a roofline: products take their operations at a fraction of the device's peak, everything else
the time of reading and writing memory. Collectives take their bytes over the slowest link that they cross.
What FSDP sends and what moves to the host runs beside the computation; so does the first half of a ring
step's exchange of keys and values, which is why half of context parallelism's traffic is counted as waited
for. Tensor parallelism waits for all of its traffic. It is a model for ranking meshes, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_cp.planner import devices
from torchtune_cp.planner.arithmetic import BACKWARD_PER_PAIR, MODEL_BACKWARD_PER_PAIR
from torchtune_cp.planner.devices import Device
from torchtune_cp.planner.profile import Profile

#: Shares of a mesh dimension's traffic that computation does not hide.
WAITED_FOR = {"cp": 0.5, "tp": 1.0}


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step.

    Attributes:
        compute: Products and attention.
        memory: Operators that are bound by memory.
        waiting: For other ranks, as far as computation does not hide it.
        beside: Longest of what runs beside the computation (FSDP's traffic, copies to the host).
        total: The step.
        model_flops: Operations of this rank that the model needs: nothing computed a second time.
        mfu: ``model_flops`` over what the device could do in ``total``.
    """

    compute: float
    memory: float
    waiting: float
    beside: float
    total: float
    model_flops: float
    mfu: float


def model_flops(profile: Profile) -> float:
    """Operations without recomputation: of checkpointed layers, and of scores in attention's backward."""
    share = {"attention_backward": MODEL_BACKWARD_PER_PAIR / BACKWARD_PER_PAIR}
    return sum(
        number * share.get(kind, 1.0)
        for (kind, again), number in profile.flops.items()
        if not again
    )


def step_time(
    profile: Profile, device: Device, spans: dict[str, bool], *, low_precision: bool
) -> StepTime:
    """Estimate a step of one rank.

    Args:
        profile: The rank's step.
        device: What it runs on.
        spans: For each mesh dimension whether it crosses nodes.
        low_precision: Whether products are in bfloat16.
    """
    peak = device.flops if low_precision else device.flops32
    efficiency = {
        "matmul": devices.PRODUCT_EFFICIENCY,
        "attention": devices.ATTENTION_EFFICIENCY,
        "attention_backward": devices.ATTENTION_BACKWARD_EFFICIENCY,
    }
    compute = sum(number / (peak * efficiency[kind]) for (kind, _), number in profile.flops.items())
    memory = profile.moved / (device.bandwidth * devices.MEMORY_EFFICIENCY)
    waiting, hidden, fsdp = 0.0, 0.0, 0.0
    for transfer, (sent, calls) in profile.transfers.items():
        bandwidth = device.network if spans.get(transfer.mesh, False) else device.link
        seconds = sent / (bandwidth * devices.LINK_EFFICIENCY) + calls * devices.LATENCY
        if transfer.mesh in WAITED_FOR:
            waiting += WAITED_FOR[transfer.mesh] * seconds
            hidden += (1 - WAITED_FOR[transfer.mesh]) * seconds
        else:
            fsdp += seconds
    copies = profile.copied / (device.host_link * devices.LINK_EFFICIENCY)
    beside = max(fsdp + hidden, copies)
    total = max(compute + memory + waiting, beside)
    needed = model_flops(profile)
    return StepTime(
        compute=compute,
        memory=memory,
        waiting=waiting,
        beside=beside,
        total=total,
        model_flops=needed,
        mfu=needed / (total * peak) if total else 0.0,
    )
