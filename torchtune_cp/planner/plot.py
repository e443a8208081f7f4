"""Plots a rank's memory over the step."""

from __future__ import annotations

from pathlib import Path

from torchtune_cp.errors import UserError
from torchtune_cp.planner.devices import GIB
from torchtune_cp.planner.plan import Plan
from torchtune_cp.planner.trace import CATEGORIES

_COLOURS = {
    "parameters": "#4c72b0",
    "optimizer": "#8172b3",
    "gradients": "#c44e52",
    "activations": "#55a868",
    "gathered": "#64b5cd",
    "attention": "#dd8452",
    "loss": "#ccb974",
    "working": "#937860",
    "batch": "#8c8c8c",
}


def draw(plan: Plan, path: Path) -> None:
    """Plot the peak bytes of each layer's visits, in their order, by category.

    Args:
        plan: The plan.
        path: Output file; its suffix determines the format.

    Raises:
        UserError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    moments = plan.profile.moments
    positions = range(len(moments))
    shown = [c for c in (*_COLOURS,) if any(m.device[c] for m in moments)]
    assert set(shown) <= set(CATEGORIES)
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    axes.stackplot(
        positions,
        [[m.device[c] / GIB for m in moments] for c in shown],
        labels=shown,
        colors=[_COLOURS[c] for c in shown],
        step="mid",
    )
    peak = max(positions, key=lambda i: moments[i].total)
    top = moments[peak].total / GIB
    left_half = peak < len(moments) / 2
    axes.annotate(
        f"{top:.1f} GiB: {moments[peak].location.describe()}",
        (peak, top),
        xytext=(20 if left_half else -20, 20),
        textcoords="offset points",
        ha="left" if left_half else "right",
        arrowprops={"arrowstyle": "->"},
    )
    axes.set_ylim(0, 1.2 * top)
    memory = plan.cluster.device.memory / GIB
    if memory < 2 * top:
        axes.set_ylim(0, 1.15 * max(memory, top))
        axes.axhline(memory, color="black", linestyle="--", linewidth=1)
        axes.text(0, memory, f"{plan.cluster.device.name}: {memory:.1f} GiB", va="bottom")
    # A phase's name is below its centre if the phase is wide enough.
    phases = [moment.location.phase for moment in moments]
    spans = {phase: [i for i in positions if phases[i] == phase] for phase in dict.fromkeys(phases)}
    wide = {phase: span for phase, span in spans.items() if len(span) >= 0.06 * len(moments)}
    axes.set_xticks([(span[0] + span[-1]) / 2 for span in wide.values()], list(wide))
    for span in spans.values():
        axes.axvline(span[0] - 0.5, color="white", linewidth=0.8)
    axes.set_ylabel("GiB on the device")
    axes.set_title(
        f"rank {plan.rank} of {plan.cluster.size}, {plan.seq_len:,} tokens: tensors of one step"
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    axes.margins(x=0)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
