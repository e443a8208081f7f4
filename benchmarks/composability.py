"""Every option of the recipe alone and with every other, under context parallelism, against one process.

python -m benchmarks.composability            # all rows: about an hour on two cores
python -m benchmarks.composability fp8 TP     # only the rows whose name contains a word, the others stay
python -m benchmarks.composability --missing  # only rows without figures: new ones, a broken-off run's
python -m benchmarks.composability --render   # only write the tables of the pages

A row is an option (`OPTIONS`); adding one is adding a line there. Each row, and each pair of rows, runs
on two processes (cp 2) and on four, is compared with the plain single process, and is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from benchmarks.common import RESULTS, llama_config, machine
from benchmarks.recipe_ranks import run_recipe
from benchmarks.refusals import render_refusals
from benchmarks.tables import CHECKOUT, with_tables
from torchtune_cp.config import ConfigError, to_typed
from torchtune_cp.metrics import read_metrics

#: The page with the measured tables, and the page with the list of refused combinations.
MEASUREMENTS_PAGE = CHECKOUT / "docs" / "measurements" / "composability.md"
REFUSALS_PAGE = CHECKOUT / "docs" / "composability.md"
#: In a subfolder, because docs/measurements/performance.md shows every file of the folder itself.
FIGURES = RESULTS / "composability" / "figures.json"

#: A global batch, on every mesh: the same samples in every optimizer step.
SAMPLES_PER_STEP = 4
STEPS = 10
SGD_LR = 1.0
MEMORY_TOKENS = 8192


@dataclass(frozen=True)
class Option:
    """A row: something the recipe offers.

    Attributes:
        name: For the tables.
        overrides: The config keys that switch it on.
        kind: Options of one kind exclude each other.
        rounds: The precision that it changes to: such a row is compared with a single process of the
            same precision. Empty for an exact option.
        paired: Whether it is run with every other row; the page says where else its pairs are tested.
    """

    name: str
    overrides: Mapping[str, Any]
    kind: str = ""
    rounds: str = ""
    paired: bool = True


@dataclass(frozen=True)
class Mesh:
    """A split of the processes; the first of its size serves the pairs.

    Attributes:
        name: For the tables.
        world: Number of processes.
        overrides: The degrees.
    """

    name: str
    world: int
    overrides: Mapping[str, Any]

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.overrides.get("data_parallel_shard_dim", 1) * self.overrides.get(
            "data_parallel_replicate_dim", 1
        )


ONE = Mesh("one process", 1, {})
MESHES = (
    Mesh("cp 2", 2, {"context_parallel_dim": 2}),
    Mesh("cp 2 x FSDP 2", 4, {"context_parallel_dim": 2, "data_parallel_shard_dim": 2}),
    Mesh("cp 4", 4, {"context_parallel_dim": 4}),
    Mesh("cp 2 x replicas 2", 4, {"context_parallel_dim": 2, "data_parallel_replicate_dim": 2}),
    Mesh("cp 2 x TP 2", 4, {"context_parallel_dim": 2, "tensor_parallel_dim": 2}),
)
PAIR_MESHES = MESHES[:2]

OPTIONS = (
    Option(
        "checkpointing, every layer", {"enable_activation_checkpointing": True}, "checkpointing"
    ),
    Option(
        "checkpointing, every 2nd layer", {"ac_mode": "selective", "ac_option": 2}, "checkpointing"
    ),
    Option("checkpointing, op", {"ac_mode": "selective", "ac_option": "op"}, "checkpointing"),
    Option(
        "checkpointing, op and KV", {"ac_mode": "selective", "ac_option": "op_kv"}, "checkpointing"
    ),
    Option("activation offloading", {"enable_activation_offloading": True}),
    Option("tiled MLP", {"mlp_tile_tokens": 48}),
    Option("attention over head chunks", {"attention_head_chunks": 2}),
    Option("parameters on the CPU", {"fsdp_cpu_offload": True}),
    Option("optimizer in backward", {"optimizer_in_bwd": True}, "optimizer"),
    Option("optimizer on the host", {"optimizer_on_host": True}, "optimizer"),
    Option("accumulation 2", {"gradient_accumulation_steps": 2}),
    Option("bf16", {"dtype": "bf16"}, "dtype", rounds="bf16"),
    Option(
        "fp8 tensorwise",
        {"enable_fp8_training": True, "fp8_recipe_name": "tensorwise", "fp8_emulate": True},
        "fp8",
        rounds="fp8",
    ),
    Option(
        "fp8 rowwise",
        {"enable_fp8_training": True, "fp8_recipe_name": "rowwise", "fp8_emulate": True},
        "fp8",
        rounds="fp8",
    ),
    Option("compile", {"compile": True}),
    Option("method allgather", {"context_parallel_method": "allgather"}, paired=False),
    Option("method ulysses", {"context_parallel_method": "ulysses"}, paired=False),
)


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that pass.

    Attributes:
        loss: Of any of the ten losses.
        weights: Of any weight after one SGD step, in parts of the largest of its tensor.
        grad_norm: Of the gradient norm of that step.
    """

    loss: float
    weights: float
    grad_norm: float


#: Float32 sums in another order: 1e-6 and less after one step; Adam lets it grow over ten.
EXACT = Tolerance(loss=1e-5, weights=1e-5, grad_norm=1e-5)
#: bfloat16 keeps 8 bits, an error of up to 0.4 % in every operation. The weights' figure is the worst
#: single one, after an update as large as the weights.
BF16 = Tolerance(loss=5e-3, weights=5e-2, grad_norm=1e-2)
#: float8 keeps 3 bits of a value and 2 of a gradient, an error of up to 6 and 12 %, less where many add up;
#: and a slice's scale is not that of the whole sequence.
FP8 = Tolerance(loss=1e-2, weights=1e-1, grad_norm=5e-2)


@dataclass
class Cell:
    """What became of one combination on one mesh.

    Attributes:
        loss, weights, grad_norm: Differences, as in `Tolerance`; no gradient norm where the
            recipe has none.
        graphs: Compiled graphs of a rank.
        refused: The recipe's own words.
        failed: An error that should not be.
    """

    loss: float | None = None
    weights: float | None = None
    grad_norm: float | None = None
    graphs: int = 0
    refused: str | None = None
    failed: str | None = None

    def passes(self, tolerance: Tolerance) -> bool:
        """Whether it is refused with a reason, or within the tolerance."""
        if self.refused is not None:
            return True
        return self.failed is None and all(
            value is None or value <= limit
            for value, limit in (
                (self.loss, tolerance.loss),
                (self.weights, tolerance.weights),
                (self.grad_norm, tolerance.grad_norm),
            )
        )


# --- configs --------------------------------------------------------------------------------------

MODEL = {
    "vocab_size": 272,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "intermediate_dim": 192,
    "max_seq_len": MEMORY_TOKENS,
}


def save_base(folder: Path) -> None:
    """Write the small llama that all rows start from, with transformers."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(MODEL, initializer_range=0.1)).save_pretrained(folder)


#: Beginnings of the standard library's files: real text, some files shorter than the limit.
DATASET = {
    "_component_": "torchtune_cp.datasets.text_folder_dataset",
    "path": None,
    "glob": ["*/__*.py", "[a-d]*.py"],
    "max_seq_len": 251,
    "overlong": "truncate",
    "min_tokens": 8,
}


def config_for(
    base: Path, output: Path, mesh: Mesh, options: tuple[Option, ...], **more: Any
) -> DictConfig:
    """The config of a run of `options` on `mesh`.

    Args:
        base: The model to start from.
        output: Where the run writes.
        mesh: The split.
        options: Switched on.
        more: Further keys, above all others.
    """
    keys: dict[str, Any] = {
        "output_dir": str(output),
        "device": "cpu",
        "dtype": "fp32",
        "shuffle": False,
        "log_level": "ERROR",
        "model": {"_component_": "torchtune_cp.models.auto_model", "checkpoint_dir": str(base)},
        "checkpointer": {
            "_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
        },
        "tokenizer": {"_component_": "torchtune_cp.data.byte_tokenizer"},
        "dataset": DATASET,
    }
    for option in options:
        keys |= option.overrides
    keys |= mesh.overrides
    accumulation = keys.get("gradient_accumulation_steps", 1)
    keys["batch_size"] = SAMPLES_PER_STEP // (mesh.dp * accumulation)
    return OmegaConf.create(keys | more)


def sgd_step(base: Path, output: Path, mesh: Mesh, options: tuple[Option, ...]) -> DictConfig:
    """One step of SGD, which hides no wrong gradient scale."""
    optimizer = {"_component_": "torch.optim.SGD", "lr": SGD_LR}
    return config_for(base, output, mesh, options, optimizer=optimizer, max_steps_per_epoch=1)


def ten_steps(base: Path, output: Path, mesh: Mesh, options: tuple[Option, ...]) -> DictConfig:
    """Ten steps of AdamW."""
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
    return config_for(base, output, mesh, options, optimizer=optimizer, max_steps_per_epoch=STEPS)


def memory_step(base: Path, output: Path, mesh: Mesh, options: tuple[Option, ...]) -> DictConfig:
    """One step on a long sequence, its bytes counted."""
    return config_for(
        base,
        output,
        mesh,
        options,
        optimizer={"_component_": "torch.optim.SGD", "lr": SGD_LR},
        max_steps_per_epoch=1,
        batch_size=1,
        dataset={**DATASET, "glob": "typing.py", "max_seq_len": MEMORY_TOKENS, "overlong": "split"},
        profiler={"_component_": "benchmarks.recipe_ranks.StepPeak"},
        # Four layers, so that what is done to every second one shows.
        model={"_component_": "torchtune_cp.models.llama3.llama3", **MODEL, "num_layers": 4},
        checkpointer={
            "_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer",
            "checkpoint_dir": None,
        },
    )


# --- references -----------------------------------------------------------------------------------


@dataclass
class Reference:
    """What a combination is compared with.

    Attributes:
        losses: Of ten steps of AdamW, by the recipe on one process.
        weights: After one step of SGD.
        grad_norm: Of that step.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    grad_norm: float


def plain_step(base: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Make the SGD step in a plain loop with transformers' model, sample by sample.

    Returns:
        The weights after it and the gradient norm.
    """
    from transformers import LlamaForCausalLM

    from torchtune_cp.data import byte_tokenizer
    from torchtune_cp.datasets import text_folder_dataset

    arguments = {k: v for k, v in DATASET.items() if k != "_component_"}
    dataset = text_folder_dataset(byte_tokenizer(), **arguments)
    samples = [dataset[i] for i in range(SAMPLES_PER_STEP)]
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    count = sum(label != -100 for s in samples for label in s["labels"][1:])
    for s in samples:
        logits = model(torch.tensor([s["tokens"]])).logits[0, :-1]
        labels = torch.tensor(s["labels"][1:])
        (F.cross_entropy(logits, labels, reduction="sum") / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    torch.optim.SGD(model.parameters(), lr=SGD_LR).step()
    return {name: p.detach() for name, p in model.named_parameters()}, norm


# --- running --------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Runs combinations and compares them; keeps the references.

    Attributes:
        folder: Empty; for models and runs.
    """

    folder: Path
    _references: dict[tuple[str, ...], Reference] = field(default_factory=dict)
    _runs: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.base = self.folder / "base"
        save_base(self.base)

    def run(self, make: Any, mesh: Mesh, options: tuple[Option, ...]) -> dict[str, Any]:
        """Run a config; `refused` also where it is refused before any process would start."""
        output = self.folder / f"run{next(self._runs)}"
        cfg = make(self.base, output, mesh, options)
        try:
            to_typed(cfg, world_size=mesh.world)
        except ConfigError as error:
            return {"refused": "; ".join(error.problems), "failed": None}
        return run_recipe(cfg, mesh.world) | {"output": output}

    def reference(self, options: tuple[Option, ...]) -> Reference:
        """The reference of a combination: the plain process of its precision."""
        rounding = tuple(o for o in options if o.rounds)
        key = tuple(o.name for o in rounding)
        if key not in self._references:
            curve = self.run(ten_steps, ONE, rounding)
            assert curve["refused"] is None, curve["refused"]
            assert curve["failed"] is None, curve["failed"]
            losses = [line["loss"] for line in read_metrics(curve["output"] / "metrics.jsonl")]
            if not rounding:
                weights, norm = plain_step(self.base)
            else:
                step = self.run(sgd_step, ONE, rounding)
                weights, norm = _weights(step["output"]), _grad_norm(step["output"])
                assert norm is not None
            self._references[key] = Reference(losses, weights, norm)
        return self._references[key]

    def cell(self, mesh: Mesh, options: tuple[Option, ...]) -> Cell:
        """Run a combination on a mesh and compare."""
        step = self.run(sgd_step, mesh, options)
        if step["refused"] or step["failed"]:
            return Cell(refused=step["refused"], failed=step["failed"])
        curve = self.run(ten_steps, mesh, options)
        if curve["refused"] or curve["failed"]:
            return Cell(refused=curve["refused"], failed=curve["failed"])
        reference = self.reference(options)
        weights, norm = _weights(step["output"]), _grad_norm(step["output"])
        losses = [line["loss"] for line in read_metrics(curve["output"] / "metrics.jsonl")]
        assert len(losses) == len(reference.losses) == STEPS
        return Cell(
            loss=max(abs(a / b - 1) for a, b in zip(losses, reference.losses, strict=True)),
            weights=max(
                ((weights[name] - w).abs().max() / w.abs().max()).item()
                for name, w in reference.weights.items()
            ),
            grad_norm=None if norm is None else abs(norm / reference.grad_norm - 1),
            graphs=curve["graphs"],
        )

    def peak(self, cp: int, options: tuple[Option, ...]) -> int | None:
        """Peak bytes of a rank in a step on `MEMORY_TOKENS` tokens over `cp` ranks."""
        mesh = Mesh(f"cp {cp}", cp, {"context_parallel_dim": cp})
        outcome = self.run(memory_step, mesh, options)
        if outcome["failed"]:
            raise RuntimeError(f"{[o.name for o in options]} on cp {cp}: {outcome['failed']}")
        return outcome.get("peak")


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "final" / "model.safetensors")


def _grad_norm(output: Path) -> float | None:
    (line,) = read_metrics(output / "metrics.jsonl")
    return line.get("grad_norm")


def name_of(options: tuple[Option, ...]) -> str:
    """The name of a combination."""
    return " + ".join(o.name for o in options) or "nothing else"


def tolerance_of(options: tuple[Option, ...]) -> Tolerance:
    """That of the coarsest precision among the options."""
    rounds = {o.rounds for o in options}
    return FP8 if "fp8" in rounds else BF16 if "bf16" in rounds else EXACT


def pairs() -> Iterator[tuple[Option, Option]]:
    """All pairs of options that do not exclude each other by being of one kind."""
    for a, b in itertools.combinations([o for o in OPTIONS if o.paired], 2):
        if not a.kind or a.kind != b.kind:
            yield a, b


def combinations_on() -> Iterator[tuple[Mesh, tuple[Option, ...]]]:
    """Everything that is run: each row on each mesh, each pair on two and on four processes."""
    for mesh in (ONE, *MESHES):
        yield mesh, ()
        for option in OPTIONS:
            if mesh is not ONE or not option.rounds:  # one process that rounds is the reference
                yield mesh, (option,)
    for mesh in PAIR_MESHES:
        for pair in pairs():
            yield mesh, pair


def measurable(options: tuple[Option, ...]) -> bool:
    """Whether bytes can be counted: the counter switches compilation off."""
    return not any("compile" in o.overrides for o in options)


# --- the page -------------------------------------------------------------------------------------


def _digits(value: float | None) -> str:
    if value is None:
        return "none"
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


class _Notes:
    """Numbers the reasons as they come up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, reason: str) -> int:
        return self.numbers.setdefault(reason, len(self.numbers) + 1)


def _shown(cell: Cell | None, options: tuple[Option, ...], notes: _Notes) -> str:
    if cell is None:
        return "not run"
    if cell.failed is not None:
        return f"**failed** [{notes.number(cell.failed)}]"
    if cell.refused is not None:
        return f"refused [{notes.number(cell.refused)}]"
    text = " / ".join(_digits(v) for v in (cell.loss, cell.weights, cell.grad_norm))
    return text if cell.passes(tolerance_of(options)) else f"**{text}**"


def _key(mesh: Mesh, options: tuple[Option, ...]) -> str:
    return f"{mesh.name} | {name_of(options)}"


def _differences(
    figures: Mapping[str, Any],
    rows: list[tuple[Option, ...]],
    meshes: tuple[Mesh, ...],
    notes: _Notes,
) -> list[str]:
    cells = figures["cells"]
    lines = ["| | " + " | ".join(m.name for m in meshes) + " |", "| --- |" + " --- |" * len(meshes)]
    for options in rows:
        shown = []
        for mesh in meshes:
            found = cells.get(_key(mesh, options))
            if mesh is ONE and tolerance_of(options) is not EXACT:
                shown.append("the reference")
            else:
                shown.append(_shown(found and Cell(**found), options, notes))
        lines.append(f"| {name_of(options)} | " + " | ".join(shown) + " |")
    return lines


def _memory(figures: Mapping[str, Any]) -> list[str]:
    lines = ["| | cp 1 | cp 2 | cp 4 | cp 4 / cp 1 |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, peaks in figures["memory"].items():
        mib = [f"{peaks[cp] / 2**20:.1f}" if peaks[cp] else "refused" for cp in ("1", "2", "4")]
        ratio = f"{peaks['4'] / peaks['1']:.2f}" if peaks["1"] and peaks["4"] else ""
        lines.append(f"| {name} | " + " | ".join([*mib, ratio]) + " |")
    return lines


def render(figures: Mapping[str, Any]) -> str:
    """Lay out the figures: alone, in pairs, memory, and the reasons of what is refused."""
    notes = _Notes()
    alone = [(), *((o,) for o in OPTIONS)]
    lines = [
        "### Each option on each mesh",
        "",
        *_differences(figures, alone, (ONE, *MESHES), notes),
        "",
        "### Each pair of options",
        "",
        *_differences(figures, list(pairs()), PAIR_MESHES, notes),
        "",
        "### Peak activation bytes of a rank, in MiB",
        "",
        *_memory(figures),
        "",
    ]
    if notes.numbers:
        lines += ["### Reasons", ""]
        lines += [f"{number}. {reason}" for reason, number in notes.numbers.items()]
        lines.append("")
    where = ", ".join(f"{k} {v}" for k, v in figures["machine"].items() if k != "command")
    return "\n".join([f"Measured on {where}.", "", *lines])


def _write_table(page: Path, table: str, name: str) -> None:
    page.write_text(with_tables(page.read_text(encoding="utf-8"), table, name), encoding="utf-8")
    print(f"written: {page}")


def write_pages() -> None:
    """Write the figures and the refused combinations into their pages, between the markers."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    _write_table(MEASUREMENTS_PAGE, render(figures), "tables")
    _write_table(REFUSALS_PAGE, render_refusals(), "refusals")


def _wanted(words: list[str], key: str) -> bool:
    return not words or any(word in key for word in words)


def _load_figures() -> dict[str, Any]:
    if not FIGURES.exists():
        return {"machine": {}, "cells": {}, "memory": {}}
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return figures


def _save_figures(figures: dict[str, Any]) -> None:
    figures["machine"] = machine()
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(words: list[str], missing: bool = False) -> int:
    """Run rows; figures are kept as they come.

    Args:
        words: Only rows whose names contain one of these; none for all.
        missing: Only rows without figures.

    Returns:
        How many of those that were run do not pass.
    """
    figures, wrong = _load_figures(), 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        # Compilation takes longest: last.
        for mesh, options in sorted(combinations_on(), key=lambda c: not measurable(c[1])):
            key = _key(mesh, options)
            if not _wanted(words, key) or (missing and key in figures["cells"]):
                continue
            cell = bench.cell(mesh, options)
            figures["cells"][key] = asdict(cell)
            wrong += not cell.passes(tolerance_of(options))
            print(key, asdict(cell), flush=True)
            _save_figures(figures)
        for options in filter(measurable, [(), *((o,) for o in OPTIONS)]):
            name = name_of(options)
            if _wanted(words, f"memory | {name}") and not (missing and name in figures["memory"]):
                peaks = {str(cp): bench.peak(cp, options) for cp in (1, 2, 4)}
                figures["memory"][name] = peaks
                print(name, peaks, flush=True)
                _save_figures(figures)
    return wrong


def main() -> int:
    """Measure and write the pages; 1 when a row is out of tolerance or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only rows whose name contains one of these")
    parser.add_argument("--render", action="store_true", help="run nothing, write the pages")
    parser.add_argument("--missing", action="store_true", help="only rows without figures")
    args = parser.parse_args()
    wrong = 0 if args.render else measure(args.words, args.missing)
    write_pages()
    if wrong:
        print(f"{wrong} combinations are off or failed: bold on the page", file=sys.stderr)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
