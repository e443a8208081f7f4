"""Two runs of the ESM-2 recipe on real proteins, with and without context parallelism: what is learned.

python -m benchmarks.esm2_curves [FASTA]

`frequencies`: a small model from scratch reaches the entropy of its proteins' residues, which is what
knowing how often each occurs is worth. `four`: four proteins are learned by heart. Writes
`benchmarks/results/esm2/curves.json`, `docs/figures/esm2_curves.svg` and the table in `docs/esm2.md`.
With a FASTA file, `frequencies` runs on it and only its figures are printed.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import write_results
from benchmarks.tables import render_table, with_tables
from torchtune_cp.datasets.example_proteins import EXAMPLE_PROTEINS
from torchtune_cp.datasets.fasta import read_fasta
from torchtune_cp.metrics import read_metrics

CHECKOUT = Path(__file__).resolve().parents[1]
FIGURE = CHECKOUT / "docs" / "figures" / "esm2_curves.svg"
PAGE = CHECKOUT / "docs" / "esm2.md"
#: Steps at the end whose mean loss is compared with the goal.
LAST = 20
SHORTEST = 4

#: Keys of each run, on top of the config tiny/esm2_cpu.
RUNS: dict[str, dict[str, Any]] = {
    "frequencies": {
        "model.embed_dim": 64,
        "model.initializer_range": 0.125,
        "optimizer.lr": 0.003,
        "batch_size": 8,
        "epochs": 13,
    },
    "four": {
        "model.num_layers": 3,
        "model.num_heads": 8,
        "model.embed_dim": 128,
        "model.initializer_range": 0.09,
        "optimizer.lr": 0.002,
        "batch_size": SHORTEST,
        "epochs": 300,
    },
}


def unigram_entropy(fasta: Path = EXAMPLE_PROTEINS) -> float:
    """Nats per residue of a model that knows only how often each residue occurs."""
    counts = collections.Counter("".join(sequence for _, sequence in read_fasta(fasta)))
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def _shortest(folder: Path) -> Path:
    """The four shortest of the proteins that come with the package, as a separate file."""
    records = sorted(read_fasta(EXAMPLE_PROTEINS), key=lambda record: len(record[1]))[:SHORTEST]
    path = folder / "four.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    return path


def train(name: str, cp: int, folder: Path, fasta: Path | None = None, **keys: Any) -> list[float]:
    """Run the recipe through the command line.

    Args:
        name: Of `RUNS`.
        cp: Processes, all of them context-parallel.
        folder: An empty one, for what the run writes.
        fasta: Other proteins for `frequencies`.
        keys: Further config keys.

    Returns:
        The loss of each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if name == "four":
        fasta = _shortest(folder)
    dataset = {
        "dataset._component_": "torchtune_cp.datasets.protein_dataset",
        "dataset.path": fasta or EXAMPLE_PROTEINS,
    }
    settings = {
        "output_dir": folder / "out",
        "context_parallel_dim": cp,
        "dataset_val": "null",
        "run_val_every_n_steps": "null",
        "max_steps_per_epoch": "null",
        "lr_scheduler.num_warmup_steps": 20,
        **dataset,
        **RUNS[name],
        **keys,
    }
    command = ["-m", "torchtune_cp", "run", "--nproc_per_node", str(cp), "esm2_mlm_distributed"]
    ended = subprocess.run(
        [sys.executable, *command, "--config", "tiny/esm2_cpu"]
        + [f"{key}={value}" for key, value in settings.items()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    return [line["loss"] for line in read_metrics(folder / "out" / "metrics.jsonl")]


def summary(name: str, goal: float, one: list[float], two: list[float]) -> dict[str, Any]:
    """A row of the table.

    Args:
        name: Of the run.
        goal: Nats that it was to reach.
        one: The losses at cp 1.
        two: Those at cp 2.
    """
    differences = [abs(a - b) for a, b in zip(one, two, strict=True)]
    reached = [
        next((i for i in range(LAST, len(c) + 1) if statistics.mean(c[i - LAST : i]) <= goal), None)
        for c in (one, two)
    ]
    return {
        "run": name,
        "steps": len(one),
        "goal": round(goal, 3),
        "first step": round(two[0], 3),
        f"mean of the last {LAST} steps, cp 1": round(statistics.mean(one[-LAST:]), 3),
        f"mean of the last {LAST} steps, cp 2": round(statistics.mean(two[-LAST:]), 3),
        f"steps until the mean of {LAST} is at the goal, cp 1": reached[0],
        f"steps until the mean of {LAST} is at the goal, cp 2": reached[1],
        "largest difference of a step, first 50": float(f"{max(differences[:50]):.1g}"),
        "largest difference of a step": float(f"{max(differences):.1g}"),
    }


def draw(rows: list[dict[str, Any]], curves: dict[str, dict[str, list[float]]]) -> str:
    """The figure as SVG.

    Args:
        rows: Of `summary`, one a run.
        curves: Losses by run and `cp 1` or `cp 2`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    titles = {"frequencies": "128 proteins from scratch", "four": "four proteins by heart"}
    # Text as text, and the same file from the same figures.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "esm2", "font.size": 9}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        for axes, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
            name = row["run"]
            for label, style in (("cp 1", "-"), ("cp 2", "--")):
                losses = curves[name][label]
                axes.plot(range(1, len(losses) + 1), losses, style, label=label, linewidth=1)
            word = "unigram entropy" if name == "frequencies" else "goal"
            axes.axhline(row["goal"], color="#444", linewidth=0.8, linestyle=":")
            axes.annotate(f"{word} {row['goal']}", (1, row["goal"]), va="top", fontsize=8)
            axes.set(xlabel="optimizer step", ylabel="masked-LM loss (nats)", title=titles[name])
            axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(_short(line.rstrip()) + "\n" for line in text.getvalue().splitlines())


def _short(line: str) -> str:
    """A line of an SVG; those of a path without decimals that nobody sees."""
    return re.sub(r"(\.\d)\d+", r"\1", line) if re.match(r"\s*[LM] ", line) else line


def render() -> str:
    """The page's table, from the result file."""
    content = json.loads((CHECKOUT / "benchmarks/results/esm2/curves.json").read_text())
    where = ", ".join(f"{k} {v}" for k, v in content["machine"].items() if k != "command")
    return "\n".join([*render_table(content["results"]["rows"]), "", f"On {where}.", ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if len(sys.argv) > 1:
            fasta = Path(sys.argv[1])
            steps = {"epochs": 1, "max_steps_per_epoch": 200}
            both = [train("frequencies", cp, folder / f"{cp}", fasta, **steps) for cp in (1, 2)]
            print(json.dumps(summary("frequencies", unigram_entropy(fasta), *both), indent=1))
            return
        rows, curves = [], {}
        for run, goal in (("frequencies", unigram_entropy()), ("four", 1.0)):
            both = [train(run, cp, folder / f"{run}_{cp}") for cp in (1, 2)]
            rows.append(summary(run, goal, *both))
            print(json.dumps(rows[-1], indent=1))
            curves[run] = {
                f"cp {cp}": [round(loss, 4) for loss in losses]
                for cp, losses in zip((1, 2), both, strict=True)
            }
    write_results("esm2/curves", {"rows": rows, "curves": curves})
    FIGURE.write_text(draw(rows, curves), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, render(), "curves"), encoding="utf-8")


if __name__ == "__main__":
    main()
