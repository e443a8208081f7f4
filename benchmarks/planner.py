"""Compares predictions of `tune plan` with real steps, in docs/measurements/planner.md.

python -m benchmarks.planner            # runs everything, writes results/planner/prediction.json and the page
python -m benchmarks.planner --render   # writes the page from that file
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common import RESULTS, machine
from benchmarks.planner_cases import (
    FOUR,
    MORE_OF_FOUR,
    MORE_OF_TWO,
    SEQ_LEN,
    TWO,
    small_config,
)
from benchmarks.planner_measured import measured_steps
from benchmarks.tables import CHECKOUT, with_tables
from torchtune_cp.config import to_typed
from torchtune_cp.planner.plan import mesh_degrees, planned_ranks
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.profile import Profile
from torchtune_cp.planner.simulate import rank_profile

PAGE = CHECKOUT / "docs" / "measurements" / "planner.md"
FILE = RESULTS / "planner" / "prediction.json"

#: Calls a function with arguments on ranks joined in a gloo group; gives what each returned.
RunRanks = Callable[..., list[Any]]


class Comparison(NamedTuple):
    """One rank of one case.

    Attributes:
        case: The name of its options.
        mesh: Ranks along each dimension.
        rank: Which of the ranks.
        profile: What the planner says.
        measured: What `measured_steps` counted.
    """

    case: str
    mesh: dict[str, int]
    rank: int
    profile: Profile
    measured: dict[str, Any]

    @property
    def sent(self) -> dict[str, float]:
        """Predicted bytes sent, by kind of collective."""
        total: dict[str, float] = {}
        for transfer, (count, _) in self.profile.transfers.items():
            total[transfer.kind] = total.get(transfer.kind, 0) + count
        return total


def compare(world: int, cases: dict[str, dict[str, Any]], run_ranks: RunRanks) -> list[Comparison]:
    """Predict and run each case.

    Args:
        world: Number of ranks.
        cases: Overrides by name.
        run_ranks: How a function is run on that many ranks.

    Returns:
        The ranks that a plan looks at, of each case.
    """
    trees = {name: small_config(**overrides) for name, overrides in cases.items()}
    measured = run_ranks(world, measured_steps, list(trees.values()), SEQ_LEN)
    rows, tasks = [], []
    for i, (name, tree) in enumerate(trees.items()):
        cfg = to_typed(tree, world_size=world)
        mesh = mesh_degrees(cfg, world)
        for rank in planned_ranks(mesh):
            tasks.append(
                {
                    "cfg": cfg,
                    "rank": rank,
                    "world_size": world,
                    "seq_len": SEQ_LEN,
                    "gpu": False,
                    "separate_host": True,
                }
            )
            rows.append((name, mesh, rank, measured[rank][i]))
    predicted = run_apart(rank_profile, tasks)
    return [
        Comparison(name, mesh, rank, profile, counted)
        for (name, mesh, rank, counted), profile in zip(rows, predicted, strict=True)
    ]


def _worker(rank: int, world: int, folder: str, function: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    torch.save(function(*args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run_ranks(world: int, function: Any, *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (world, folder, function, args), nprocs=world)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _rows() -> Iterator[dict[str, Any]]:
    for world, cases in ((2, TWO | MORE_OF_TWO), (4, FOUR | MORE_OF_FOUR)):
        for one in compare(world, cases, _run_ranks):
            yield {
                "case": one.case,
                "mesh": " x ".join(f"{name} {n}" for name, n in one.mesh.items() if n > 1),
                "rank": one.rank,
                "peak_predicted": one.profile.peak.total,
                "peak_measured": one.measured["peak"],
                "host_predicted": one.profile.host_peak,
                "host_measured": one.measured["host"],
                "sent_predicted": one.sent,
                "sent_measured": one.measured["sent"],
            }


def render(path: Path = FILE) -> str:
    """Lay out the results as the page's table.

    Args:
        path: A file that this script has written.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    about = dict(content["machine"])
    about.pop("command", None)
    lines = [
        f"`python -m benchmarks.planner` on {', '.join(f'{k} {v}' for k, v in about.items())}:",
        "",
        "| case | mesh | rank | peak, predicted | measured | off by | host, predicted | measured"
        " | sent, predicted | measured |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in content["results"]:
        off = row["peak_predicted"] / row["peak_measured"] - 1
        sent = [sum(row[f"sent_{kind}"].values()) for kind in ("predicted", "measured")]
        lines.append(
            f"| {row['case']} | {row['mesh'] or 'one rank'} | {row['rank']}"
            f" | {row['peak_predicted']:,} | {row['peak_measured']:,} | {off:+.3%}"
            f" | {row['host_predicted']:,} | {row['host_measured']:,}"
            f" | {sent[0]:,.0f} | {sent[1]:,.0f} |"
        )
    return "\n".join([*lines, ""])


#: Each lever by two cases that differ in it alone.
SAVINGS = {
    "`enable_activation_checkpointing`": ("cp2", "cp2_full"),
    "`enable_activation_offloading`, nothing checkpointed": (
        "cp2_alltoall",
        "cp2_offload_alltoall",
    ),
    "`mlp_tile_tokens`, checkpointed": ("cp2_full", "cp2_tiles"),
    "`mlp_tile_tokens`, nothing checkpointed": ("cp2", "cp2_tiles_kept"),
    "`attention_head_chunks`": ("cp2_tiles", "cp2_tiles_chunks"),
    "`attention_head_chunks`, ulysses": ("cp2_tiles_ulysses", "cp2_tiles_chunks_ulysses"),
    "`loss.reuse_hidden`, the logits in one chunk": (
        "cp2_one_loss_chunk",
        "cp2_one_loss_chunk_reuse",
    ),
    "`optimizer_on_host`": ("cp2_full", "cp2_full_host_optimizer"),
    "`fsdp_cpu_offload`": ("cp2_full", "cp2_full_shards_on_host"),
    "`fsdp_cpu_offload` and `optimizer_on_host`": ("cp2_full", "cp2_full_all_on_host"),
    "`fsdp_cpu_offload` and `optimizer_on_host`, two replicas": (
        "hsdp_cp2_full",
        "hsdp_cp2_full_all_on_host",
    ),
    "all of them, `loss.reuse_hidden`, `optimizer_in_bwd`": ("cp2", "cp2_all_levers"),
}


def render_savings(path: Path = FILE) -> str:
    """Lay out what each lever saves at the peak of the first rank, measured and predicted.

    Args:
        path: A file that this script has written.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    peaks = {row["case"]: row for row in rows if row["rank"] == 0}
    lines = [
        "| option | peak without | with | saved, measured | saved, predicted |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for lever, (without, with_it) in SAVINGS.items():
        before, after = peaks[without], peaks[with_it]
        saved = [before[f"peak_{k}"] - after[f"peak_{k}"] for k in ("measured", "predicted")]
        lines.append(
            f"| {lever} | {before['peak_measured']:,} | {after['peak_measured']:,}"
            f" | {saved[0]:,} | {saved[1]:,} |"
        )
    return "\n".join([*lines, ""])


def rendered(page: str) -> str:
    """The page's text with the tables of the results."""
    page = with_tables(page, render(), "prediction")
    return with_tables(page, render_savings(), "savings")


def main() -> int:
    """Run everything unless only the page is to be written."""
    if "--render" not in sys.argv[1:]:
        results = list(_rows())
        about = machine() | {"command": "python -m benchmarks.planner"}
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(rendered(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
