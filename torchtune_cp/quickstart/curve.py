"""Draws a run's loss curve."""

from pathlib import Path

from torchtune_cp.errors import UserError
from torchtune_cp.metrics.jsonl import read_metrics


def draw_loss_curve(metrics: str | Path, image: str | Path, *, title: str) -> Path:
    """Draw training and validation loss over the steps of a `metrics.jsonl` to a PNG.

    Args:
        metrics: The metrics file.
        image: The PNG to write.
        title: Stands above the curve.

    Returns:
        The PNG.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UserError(
            "drawing the loss curve needs matplotlib: pip install 'torchtune_cp[quickstart]'"
        ) from error
    records = read_metrics(metrics)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory: no display is needed
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "o-"), ("val_loss", "validation", "s--")):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, style, label=label, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="optimizer step", ylabel="loss per token (nats)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, dpi=150)
    return Path(image)
