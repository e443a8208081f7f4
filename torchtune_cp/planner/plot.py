"""A picture of a rank's memory over the step."""

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
    """Draw the most bytes of each layer's visits, in their order, by what they are.

    Args:
        plan: The plan.
        path: Where the picture goes; its suffix says the format.

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
    axes.annotate(
        f"{moments[peak].total / GIB:.1f} GiB: {moments[peak].place.describe()}",
        (peak, moments[peak].total / GIB),
        xytext=(0.02, 0.96),
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "->"},
    )
    if plan.world.device.memory < 4 * moments[peak].total:
        axes.axhline(plan.world.device.memory / GIB, color="black", linestyle="--", linewidth=1)
    starts = [
        i for i in positions if i == 0 or moments[i].place.phase != moments[i - 1].place.phase
    ]
    axes.set_xticks(starts, [moments[i].place.phase for i in starts], rotation=30, ha="right")
    axes.set_ylabel("GiB on the device")
    axes.set_title(
        f"rank {plan.rank} of {plan.world.size}, {plan.seq_len:,} tokens: tensors of one step"
    )
    axes.legend(loc="upper right", fontsize="small")
    axes.margins(x=0)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
