"""Writes configs/long_context: what each length needs on given GPUs, by plan, and how it is set up.

python -m benchmarks.long_context             # plan every config: about half an hour on two cores
python -m benchmarks.long_context 1M 8xH100   # only those whose names contain all of these
python -m benchmarks.long_context --check     # plan, and compare with the figures in the files
python -m benchmarks.long_context --table     # only write docs/measurements/long_context.md from the files

Each file is the base config of its model with a few keys changed (`CHOICES`); its header has the plan's
figures. Nothing here was run on these GPUs: the figures are those of `tune plan`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.tables import CHECKOUT, with_tables
from torchtune_cp.config import FullFinetuneConfig, to_typed
from torchtune_cp.planner.cluster import Cluster
from torchtune_cp.planner.devices import DEVICES, GIB
from torchtune_cp.planner.plan import Plan, make_plan
from torchtune_cp.planner.report import sent_by_mesh

CONFIGS = CHECKOUT / "configs"
FOLDER = CONFIGS / "long_context"
PAGE = CHECKOUT / "docs" / "measurements" / "long_context.md"
K, M = 2**10, 2**20


@dataclass(frozen=True)
class Hardware:
    """GPUs and the host memory of their nodes.

    Attributes:
        name: In file names.
        text: For people.
        device: As `tune plan` names it.
        gpus: Of all nodes.
        host_gib: Of a node.
    """

    name: str
    text: str
    device: str
    gpus: int
    host_gib: int

    @property
    def nodes(self) -> int:
        """Of up to eight GPUs."""
        return -(-self.gpus // 8)

    @property
    def cluster(self) -> Cluster:
        """For the planner."""
        return Cluster(
            size=self.gpus,
            per_node=min(self.gpus, 8),
            device=DEVICES[self.device],
            host_memory=self.host_gib * GIB,
        )

    @property
    def launch(self) -> str:
        """The options of `tune run`."""
        nodes = f"--nnodes {self.nodes} " if self.nodes > 1 else ""
        return f"{nodes}--nproc_per_node {min(self.gpus, 8)}"


#: 1.5 TB and 2 TB of host memory.
H200 = Hardware("1xH200", "one H200 (141 GB), 1.5 TB of host memory", "h200", 1, 1397)
H100_8 = Hardware("8xH100", "8 x H100 (80 GB), 2 TB of host memory", "h100-80g", 8, 1862)
H100_32 = Hardware(
    "32xH100", "4 nodes of 8 x H100 (80 GB), 2 TB of host memory each", "h100-80g", 32, 1862
)


@dataclass(frozen=True)
class Model:
    """A model and the base config of its long-context configs.

    Attributes:
        name: In file names.
        text: For people.
        base: Below `configs`.
        positions: What its weights were trained for.
    """

    name: str
    text: str
    base: str
    positions: int


MODELS = (
    Model("llama3_1_8B", "Llama 3.1 8B", "llama3_1/8B_full", 128 * K),
    Model("qwen3_8B", "Qwen3 8B", "qwen3/8B_full", 40 * K),
)

#: What all have: long documents packed, every layer checkpointed.
COMMON: Mapping[str, Any] = {
    "dataset": {
        "_component_": "torchtune_cp.datasets.text_completion_dataset",
        "source": "json",
        "data_files": "/data/documents.jsonl",
        "column": "text",
        "packed": True,
        "packing_strategy": "best_fit",
        "split_across_pack": True,
    },
}
#: A layer's input on the host, tiles along the sequence: nearly free at these lengths.
TILES = {"mlp_tile_tokens": 8192, "loss.reuse_hidden": True}
BY_OP = {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": "op"}
OFFLOAD = {"enable_activation_offloading": True}
HOST_OPTIMIZER = {"optimizer_on_host": True, "clip_grad_norm": None}
HOST_SHARDS = HOST_OPTIMIZER | {"fsdp_cpu_offload": True}
CHUNKS = {"attention_head_chunks": 8}


def cp(degree: int, method: str = "ring", rotate: str = "alltoall") -> dict[str, Any]:
    """The keys of a context-parallel mesh."""
    keys: dict[str, Any] = {"context_parallel_dim": degree, "context_parallel_method": method}
    return keys | ({"context_parallel_rotate_method": rotate} if method == "ring" else {})


def _choices() -> Iterator[tuple[str, Hardware, dict[str, int], dict[str, Any]]]:
    """Name of a length, hardware, tokens by model, keys."""
    same = lambda tokens: dict.fromkeys((m.name for m in MODELS), tokens)  # noqa: E731
    on_one = TILES | OFFLOAD | HOST_OPTIMIZER
    yield "128K", H200, same(128 * K), on_one | BY_OP
    yield "512K", H200, same(512 * K), on_one
    yield "1M", H200, same(M), on_one | CHUNKS
    yield "longest", H200, LONGEST[H200.name], on_one | HOST_SHARDS | CHUNKS
    by_op = TILES | OFFLOAD | BY_OP
    yield "128K", H100_8, same(128 * K), cp(2, rotate="allgather") | TILES | BY_OP
    yield "512K", H100_8, same(512 * K), cp(8, "ulysses") | by_op
    yield "1M", H100_8, same(M), cp(8, "ulysses") | TILES | OFFLOAD
    yield "longest", H100_8, LONGEST[H100_8.name], cp(8) | TILES | OFFLOAD | CHUNKS
    yield "128K", H100_32, same(128 * K), cp(2, rotate="allgather") | TILES | BY_OP
    yield "512K", H100_32, same(512 * K), cp(8, "ulysses") | by_op
    yield "1M", H100_32, same(M), cp(16, "ulysses") | by_op
    yield "longest", H100_32, LONGEST[H100_32.name], cp(32) | TILES | OFFLOAD | CHUNKS


#: Multiples of 64K tokens that leave 5 to 7 % of the memory that runs out; on 32 GPUs up to where
#: positions are exact.
LONGEST = {
    H200.name: dict.fromkeys(("llama3_1_8B", "qwen3_8B"), 40 * 64 * K),
    H100_8.name: {"llama3_1_8B": 112 * 64 * K, "qwen3_8B": 100 * 64 * K},
    H100_32.name: dict.fromkeys(("llama3_1_8B", "qwen3_8B"), 16 * M),
}


@dataclass(frozen=True)
class Entry:
    """One config.

    Attributes:
        model: Of what.
        length: The length's name.
        hardware: On what.
        tokens: Of a sequence.
        keys: The keys that differ from the base's; a `.` leads to an argument.
    """

    model: Model
    length: str
    hardware: Hardware
    tokens: int
    keys: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of the file, without its ending."""
        return f"{self.model.name}_{self.length}_{self.hardware.name}"

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / f"{self.name}.yaml"


ENTRIES = tuple(
    Entry(model, length, hardware, tokens[model.name], keys)
    for model in MODELS
    for length, hardware, tokens, keys in _choices()
)

# --- the files ------------------------------------------------------------------------------------

BEGIN, END = "# Planned, not measured:", "# (end of the plan)"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with_key(text: str, key: str, value: Any) -> str:
    """A config's text with a key set, where it stands or behind the keys it belongs to."""
    node, _, argument = key.partition(".")
    block = re.compile(rf"^{node}:\n(?:  .*\n)+", re.MULTILINE)
    if argument:
        line = f"  {argument}: {_yaml(value)}\n"
        found = block.search(text)
        assert found is not None, f"{node} is no component"
        inside = re.sub(rf"^  {argument}: .*\n", "", found[0], flags=re.MULTILINE)
        return text[: found.start()] + inside + line + text[found.end() :]
    if isinstance(value, Mapping):
        lines = "".join(f"  {name}: {_yaml(v)}\n" for name, v in value.items())
        return block.sub(f"{node}:\n{lines}", text, count=1)
    line = f"{key}: {_yaml(value)}\n"
    if re.search(rf"^{key}: ", text, re.MULTILINE):
        return re.sub(rf"^{key}: .*\n", line, text, count=1, flags=re.MULTILINE)
    behind = "context_parallel_dim" if key.startswith("context_") else "enable_activation_check"
    return re.sub(rf"^({behind}.*\n)", rf"\g<1>{line}", text, count=1, flags=re.MULTILINE)


def body(entry: Entry) -> str:
    """The config without its header."""
    text = (CONFIGS / f"{entry.model.base}.yaml").read_text(encoding="utf-8")
    text = text.partition("\n\n")[2]
    keys = {
        "output_dir": f"/tmp/torchtune_cp/{entry.name}",
        "tokenizer.max_seq_len": entry.tokens,
        **COMMON,
        **entry.keys,
    }
    for key in reversed(keys):  # new keys come to stand in their order
        text = _with_key(text, key, keys[key])
    return text


def _download(entry: Entry) -> list[str]:
    """How to get the weights, as the base config says it."""
    text = (CONFIGS / f"{entry.model.base}.yaml").read_text(encoding="utf-8")
    lines = text.partition("\n\n")[0].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("# Get the weights"))
    return lines[first : first + 2]


def head(entry: Entry) -> list[str]:
    """The header without the plan."""
    hardware = entry.hardware
    config = f"long_context/{entry.name}"
    rendezvous = " --rdzv_backend c10d --rdzv_endpoint HOST:29500" if hardware.nodes > 1 else ""
    each = ", on each of the nodes" if hardware.nodes > 1 else ""
    lines = [
        f"# {entry.model.text} on sequences of {entry.tokens:,} tokens, {hardware.text}",
        "#",
        *_download(entry),
        f"# Then{each}:",
        f"#   tune run {hardware.launch}{rendezvous} full_finetune_distributed --config {config}",
        "# Documents: a JSON object with a text in each line of dataset.data_files. Long ones are cut at the",
        "# length of a sequence, short ones packed; no token sees another document.",
    ]
    if entry.tokens > entry.model.positions:
        lines += [
            f"# The weights were made for {entry.model.positions:,} positions. Rotary frequencies stay as",
            "# they are: how well the model reads beyond that is what this training is for.",
        ]
    return [*lines, "#"]


def plan_command(entry: Entry) -> str:
    """The plan's own command."""
    hardware = entry.hardware
    nodes = f" --nproc-per-node 8 --nnodes {hardware.nodes}" if hardware.nodes > 1 else ""
    return (
        f"tune plan --config long_context/{entry.name} --world-size {hardware.gpus}{nodes}"
        f" --device {hardware.device} --host-memory {hardware.host_gib}"
    )


def planned(entry: Entry) -> Plan:
    """Plan a config as its file says."""
    cfg = to_typed(
        OmegaConf.create(body(entry)), FullFinetuneConfig, world_size=entry.hardware.gpus
    )
    return make_plan(cfg, entry.hardware.cluster, entry.tokens)


def figures(plan: Plan) -> dict[str, str]:
    """A plan's figures as text, by name."""
    sent = sum(count for count, _ in sent_by_mesh(plan).values())
    device, cluster = plan.cluster.device, plan.cluster
    return {
        "device": f"{plan.needed / GIB:.1f} of {device.memory / GIB:.1f} GiB,"
        f" most in {plan.peak.location.describe()}",
        "host": f"{plan.host_node / GIB:,.0f} of {cluster.host_memory / GIB:,.0f} GiB of a node",
        "sent": f"{sent / GIB:,.1f} GiB by a GPU in a step",
        "step": f"{plan.time.total:,.0f} s, {plan.tokens_per_second:,.0f} tokens/s a GPU,"
        f" MFU {plan.time.mfu:.1%} (estimates)",
    }


def header(entry: Entry, found: Mapping[str, str]) -> str:
    """The whole header.

    Args:
        entry: The config.
        found: From `figures`.
    """
    rows = [f"#   {name:<7} {text}" for name, text in found.items()]
    return "\n".join([*head(entry), BEGIN, f"#   {plan_command(entry)}", *rows, END, "", ""])


def written_figures(entry: Entry) -> dict[str, str]:
    """The figures in a config's header."""
    text = entry.path.read_text(encoding="utf-8")
    rows = text.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    return dict(re.fullmatch(r"#   (\w+) +(.+)", row).groups() for row in rows)  # type: ignore[union-attr, misc]


# --- the page -------------------------------------------------------------------------------------


def table() -> str:
    """All configs with their figures, as their files have them."""
    lines = [
        "| config | tokens | device memory | host memory of a node | estimated step | tokens/s a GPU | MFU |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in ENTRIES:
        found = written_figures(entry)
        device, host = found["device"].partition(",")[0], found["host"].partition(" of a")[0]
        seconds, speed, mfu = found["step"].removesuffix(" (estimates)").split(", ")
        cells = [
            f"`{entry.name}`",
            f"{entry.tokens:,}",
            device,
            host,
            seconds,
            speed.partition(" ")[0],
            mfu.removeprefix("MFU "),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def write_table() -> None:
    """Write it into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, table(), "long-context"), encoding="utf-8")
    print(f"written: {PAGE}")


def _handle(entry: Entry, check: bool) -> str | None:
    """Plan one, write or compare; returns what is wrong."""
    plan = planned(entry)
    found = figures(plan)
    print(f"{entry.name}: {'; '.join(found.values())}", flush=True)
    if not plan.fits:
        return f"{entry.name}: does not fit"
    text = header(entry, found) + body(entry)
    if check:
        same = entry.path.read_text(encoding="utf-8") == text
        return None if same else f"{entry.name}: the file differs from its plan"
    FOLDER.mkdir(exist_ok=True)
    entry.path.write_text(text, encoding="utf-8")
    return None


def main() -> None:
    """Plan, write, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only configs whose names contain all of these")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--table", action="store_true", help="only write the page")
    args = parser.parse_args()
    problems: list[str | None] = []
    if not args.table:
        chosen = [e for e in ENTRIES if all(word in e.name for word in args.words)]
        with ThreadPoolExecutor(2) as pool:  # each plan runs in separate processes
            problems = list(pool.map(lambda entry: _handle(entry, args.check), chosen))
    if not args.check and all(entry.path.exists() for entry in ENTRIES):
        write_table()
    wrong = [problem for problem in problems if problem is not None]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
