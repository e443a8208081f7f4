"""A plan as a table and as JSON."""

from __future__ import annotations

import math
from typing import Any

from torchtune_cp.planner.estimate import model_flops
from torchtune_cp.planner.plan import Plan, in_words
from torchtune_cp.planner.trace import CATEGORIES, MEANING

FLOPS_CONVENTION = (
    "a multiply-add counts as 2; causal attention counts the pairs that the mask allows"
    " through; MFU leaves out recomputation"
)


def _rows(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            c.ljust(w) if i == 0 or i == len(row) - 1 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _seconds(time: float) -> str:
    return f"{time:,.2f} s" if time >= 1 else f"{time * 1e3:,.2f} ms"


def as_table(plan: Plan, seq_source: str) -> str:
    """The plan for people.

    Args:
        plan: The plan.
        seq_source: Where its sequence length comes from.
    """
    device, peak = plan.cluster.device, plan.peak
    mesh = " x ".join(f"{name} {size}" for name, size in plan.degrees.items() if size > 1)
    lines = [
        f"{plan.cluster.size} x {device.name}: {mesh or 'one rank'};"
        f" sequences of {plan.seq_len:,} tokens ({seq_source}), {plan.tokens:,} tokens a step",
        "",
        f"Memory of rank {plan.rank} at its peak: {peak.location.describe()}",
    ]
    rows: list[tuple[str, ...]] = [
        (name, in_words(peak.device[name]), MEANING[name])
        for name in CATEGORIES
        if peak.device[name]
    ]
    rows.append(("tensors", in_words(peak.total), "to the byte" if not device.is_gpu else ""))
    rows += [(name, in_words(count), "estimate") for name, count in plan.estimates.items()]
    rows.append(("needed", in_words(plan.needed), _of(plan.needed, device.memory)))
    lines += _rows(rows)
    if plan.host_tensors:
        lines += ["", "Host memory", *_rows(_host_rows(plan))]
    lines += ["", "Sent by a rank in a step"]
    transfers: list[tuple[str, ...]] = [("mesh", "collective", "calls", "bytes", "")]
    for (mesh_name, kind), (sent, calls) in sorted(sent_by_mesh(plan).items()):
        transfers.append((mesh_name, kind, f"{calls:,.0f}", in_words(sent), ""))
    lines += _rows(transfers) if len(transfers) > 1 else ["  nothing"]
    time = plan.time
    lines += [
        "",
        f"Arithmetic of a rank in a step ({FLOPS_CONVENTION})",
        *_rows(
            [
                (
                    f"{kind}{' again' if again else ''}",
                    f"{number / 1e12:,.2f} TFLOP"
                    if number >= 1e10
                    else f"{number / 1e6:,.2f} MFLOP",
                    "",
                )
                for (kind, again), number in sorted(plan.profile.flops.items())
            ]
        ),
        "",
        "Estimated step"
        f": {_seconds(time.total)}, {plan.tokens_per_second:,.0f} tokens/s a device, MFU {time.mfu:.1%}"
        f" (products and attention {_seconds(time.compute)}, memory-bound operators {_seconds(time.memory)},"
        f" waiting for other ranks {_seconds(time.waiting)}, overlapped {_seconds(time.overlapped)})",
    ]
    lines += [f"Note: {note}." for note in plan.notes]
    return "\n".join(lines)


def _of(needed: float, memory: float) -> str:
    fit = "fits" if needed <= memory else f"DOES NOT FIT: {in_words(needed - memory)} too much"
    return f"of {in_words(memory)}: {fit}"


def _host_rows(plan: Plan) -> list[tuple[str, ...]]:
    tensors = max(profile.host_peak for profile in plan.ranks.values())
    rows: list[tuple[str, ...]] = [
        ("tensors of a rank", in_words(tensors), "to the byte"),
        ("pinned memory", in_words(plan.host_tensors - tensors), "lost, as torch rounds it"),
        *((name, in_words(count), "estimate") for name, count in plan.host_estimates.items()),
    ]
    limit = plan.cluster.host_memory
    host_limit = (
        _of(plan.host_node, limit) if math.isfinite(limit) else "not checked: --host-memory"
    )
    ranks = plan.cluster.on_a_node
    rows.append(("a node", in_words(plan.host_node), f"{ranks} ranks; {host_limit}"))
    return rows


def sent_by_mesh(plan: Plan) -> dict[tuple[str, str], tuple[float, float]]:
    """Bytes and calls of the planned rank, by mesh dimension and collective."""
    totals: dict[tuple[str, str], tuple[float, float]] = {}
    for transfer, (sent, calls) in plan.profile.transfers.items():
        key = transfer.mesh, transfer.kind
        before = totals.get(key, (0.0, 0.0))
        totals[key] = before[0] + sent, before[1] + calls
    return totals


def as_dict(plan: Plan, seq_source: str) -> dict[str, Any]:
    """The plan for programs: plain values, bytes, operations and seconds.

    Args:
        plan: The plan.
        seq_source: Where its sequence length comes from.
    """
    device, time = plan.cluster.device, plan.time
    return {
        "world_size": plan.cluster.size,
        "ranks_per_node": plan.cluster.per_node,
        "device": device.name,
        "device_bytes": device.memory if math.isfinite(device.memory) else None,
        "mesh": plan.degrees,
        "seq_len": plan.seq_len,
        "seq_len_from": seq_source,
        "tokens_per_step": plan.tokens,
        "fits": plan.fits,
        "needed_bytes": plan.needed,
        "estimates_bytes": plan.estimates,
        "host_bytes_of_a_node": limit if math.isfinite(limit := plan.cluster.host_memory) else None,
        "host_needed_bytes_of_a_node": plan.host_node,
        "host_estimates_bytes": plan.host_estimates,
        "rank": plan.rank,
        "ranks": {
            str(rank): {
                "peak_bytes": profile.peak.total,
                "peak_at": profile.peak.location._asdict(),
                "peak_parts_bytes": profile.peak.device,
                "host_peak_bytes": profile.host_peak,
                "host_needed_bytes": profile.host_needed,
                "sent": [
                    {**transfer._asdict(), "bytes": sent, "calls": calls}
                    for transfer, (sent, calls) in profile.transfers.items()
                ],
                "flops": [
                    {"kind": kind, "again": again, "flops": number}
                    for (kind, again), number in profile.flops.items()
                ],
                "model_flops": model_flops(profile),
                "memory_bound_bytes": profile.moved,
                "memory_bound_bytes_on_host": profile.host_moved,
                "copied_to_host_and_back_bytes": profile.copied,
            }
            for rank, profile in plan.ranks.items()
        },
        "estimated_step_seconds": time.total,
        "estimated_tokens_per_second_per_device": plan.tokens_per_second,
        "estimated_mfu": time.mfu,
        "estimated_seconds": {
            "compute": time.compute,
            "memory_bound": time.memory,
            "waiting": time.waiting,
            "overlapped": time.overlapped,
        },
        "flops_convention": FLOPS_CONVENTION,
        "notes": plan.notes,
    }
