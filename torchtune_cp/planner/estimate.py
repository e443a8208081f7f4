"""Estimates a step's time from its operations and bytes.

The model is a roofline: products take their operations at a fraction of the device's peak, everything else
the time of reading and writing memory. Collectives take their bytes over the slowest link that they cross.
What FSDP sends and what moves to the host overlaps with the computation; so does the first half of a ring
step's exchange of keys and values, which is why half of context parallelism's traffic is counted as
exposed. Tensor parallelism and Ulysses wait for all of their traffic. An optimizer on the host takes the time
of reading and writing the node's memory, after backward or during it. It is a model for ranking meshes, not a
measurement.
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
class Conditions:
    """What a step's time depends on besides its operations and its device.

    Attributes:
        spans: For each mesh dimension whether it crosses nodes.
        low_precision: Whether products are in bfloat16.
        on_a_node: Ranks that share the bandwidth of a node's memory.
        optimizer_overlaps: Whether an optimizer on the host steps during backward.
        waits_for_cp: Whether no traffic of context parallelism is hidden.
    """

    spans: dict[str, bool]
    low_precision: bool
    on_a_node: int = 1
    optimizer_overlaps: bool = False
    waits_for_cp: bool = False


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step.

    Attributes:
        compute: Products and attention.
        memory: Operators that are bound by memory.
        waiting: For other ranks, as far as computation does not hide it.
        overlapped: Longest of what overlaps with the computation (FSDP's traffic, copies to the host, the
            optimizer there).
        total: The step.
        model_flops: Operations of this rank that the model needs: nothing computed a second time.
        mfu: `model_flops` over what the device could do in `total`.
    """

    compute: float
    memory: float
    waiting: float
    overlapped: float
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


def step_time(profile: Profile, device: Device, conditions: Conditions) -> StepTime:
    """Estimate a step of one rank.

    Args:
        profile: The rank's step.
        device: What it runs on.
        conditions: The rest.
    """
    peak = device.flops if conditions.low_precision else device.flops32
    efficiency = {
        "matmul": devices.PRODUCT_EFFICIENCY,
        "attention": devices.ATTENTION_EFFICIENCY,
        "attention_backward": devices.ATTENTION_BACKWARD_EFFICIENCY,
    }
    compute = sum(number / (peak * efficiency[kind]) for (kind, _), number in profile.flops.items())
    memory = profile.moved / (device.bandwidth * devices.MEMORY_EFFICIENCY)
    waiting, hidden, fsdp = 0.0, 0.0, 0.0
    shares = WAITED_FOR | ({"cp": 1.0} if conditions.waits_for_cp else {})
    for transfer, (sent, calls) in profile.transfers.items():
        crosses = conditions.spans.get(transfer.mesh, False)
        bandwidth = device.network if crosses else device.link
        seconds = sent / (bandwidth * devices.LINK_EFFICIENCY) + calls * devices.LATENCY
        if transfer.mesh in shares:
            waiting += shares[transfer.mesh] * seconds
            hidden += (1 - shares[transfer.mesh]) * seconds
        else:
            fsdp += seconds
    copies = profile.copied / (device.host_link * devices.LINK_EFFICIENCY)
    on_host = profile.host_moved * conditions.on_a_node / device.host_bandwidth
    overlapped = max(fsdp + hidden, copies, on_host if conditions.optimizer_overlaps else 0.0)
    total = max(compute + memory + waiting, overlapped)
    total += 0.0 if conditions.optimizer_overlaps else on_host
    needed = model_flops(profile)
    return StepTime(
        compute=compute,
        memory=memory,
        waiting=waiting,
        overlapped=overlapped,
        total=total,
        model_flops=needed,
        mfu=needed / (total * peak) if total else 0.0,
    )
