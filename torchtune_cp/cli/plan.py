"""`tune plan`: what one optimizer step of a config needs, without the devices."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.config.load import load
from torchtune_cp.config.schema import FullFinetuneConfig, component_problems, to_typed
from torchtune_cp.errors import ConfigError, UserError
from torchtune_cp.planner.cluster import Cluster
from torchtune_cp.planner.devices import GIB, device_named

_DESCRIPTION = """\
Runs the recipe's own optimizer step on tensors without memory, as one rank of any mesh sees it, and
predicts its memory by category, communication, floating-point operations and time. No GPU,
weights or data are needed.

examples:
  tune plan --config llama3_1/8B_full --world-size 8 --device h100-80g --seq-len 131072 context_parallel_dim=8
  tune plan --config llama3_1/8B_full --world-size 8 --device h100-80g --max-seq-len context_parallel_dim=8
"""

#: More ranks than this have not been tried.
MOST_RANKS = 1024


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune plan --config CONFIG [options] [key=value ...]`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict memory, communication and time of a run without its devices",
        description=_DESCRIPTION,
    )
    parser.add_argument("--config", required=True, help="a YAML file, or a shipped config")
    parser.add_argument(
        "--world-size", "--world_size", type=int, help="ranks of the run (default: 1)"
    )
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, help="ranks of a node, as for tune run"
    )
    parser.add_argument("--nnodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument(
        "--device",
        help="h100-80g, h200, a100-80g or cpu (default: cpu for device: cpu, else h100-80g)",
    )
    parser.add_argument(
        "--host-memory",
        "--host_memory",
        type=float,
        metavar="GIB",
        help="GiB of host memory of a node, shared by its ranks (default: not checked)",
    )
    parser.add_argument(
        "--seq-len",
        "--seq_len",
        type=int,
        help="tokens of every sequence (default: the tokenizer's max_seq_len, the dataset's, the model's)",
    )
    parser.add_argument(
        "--max-seq-len",
        "--max_seq_len",
        action="store_true",
        help="search the longest sequence that fits",
    )
    parser.add_argument(
        "--suggest", action="store_true", help="rank the meshes and memory options that fit by time"
    )
    parser.add_argument(
        "--exact", action="store_true", help="simulate all layers instead of extrapolating"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, help="draw the memory over the step, for example plan.png"
    )
    parser.add_argument("overrides", nargs="*", help="key=value or ~key, as for tune run")
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class Request:
    """What a command line asks to be planned.

    Attributes:
        cfg: The config with its overrides.
        cluster: Where it would run.
        seq_len: Tokens of a sequence.
        source: Where that number comes from.
    """

    cfg: FullFinetuneConfig
    cluster: Cluster
    seq_len: int
    source: str


def request(args: argparse.Namespace) -> Request:
    """Check the whole command line before anything is simulated.

    Args:
        args: As parsed by `tune plan`.

    Raises:
        ConfigError: One line for each problem.
        UserError: The config's model is no decoder.
    """
    size, per_node = _ranks(args)
    chosen = [f"--{n.replace('_', '-')}" for n in ("suggest", "max_seq_len") if getattr(args, n)]
    if args.seq_len is not None and "--max-seq-len" in chosen:
        raise ConfigError("--seq-len and --max-seq-len: give one of them")
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: give one of them")
    if args.suggest and (args.plot is not None or args.exact):
        raise ConfigError(
            "--suggest: cannot be combined with --plot and --exact, which apply to one plan"
        )
    cfg = to_typed(load(args.config, args.overrides), world_size=None if args.suggest else size)
    problems = component_problems(cfg)
    if problems:
        raise ConfigError(problems)
    device = device_named(args.device or ("cpu" if cfg.device == "cpu" else "h100-80g"))
    if args.host_memory is not None and not args.host_memory > 0:
        raise ConfigError(f"--host-memory: must be above 0 GiB, got {args.host_memory:g}")
    cluster = Cluster(
        size=size,
        per_node=per_node or min(size, device.per_node),
        device=device,
        host_memory=math.inf if args.host_memory is None else args.host_memory * GIB,
    )
    seq_len, source = _sequence(args, cfg)
    return Request(cfg, cluster, seq_len, source)


def _run(args: argparse.Namespace) -> None:
    from torchtune_cp.planner.plan import divisor, make_plan, mesh_degrees
    from torchtune_cp.planner.report import as_dict, as_table

    asked = request(args)
    cfg, cluster, seq_len, source = asked.cfg, asked.cluster, asked.seq_len, asked.source
    if args.suggest:
        _suggest(cfg, cluster, seq_len, source, as_json=args.json)
        return
    if args.max_seq_len:
        from torchtune_cp.planner.search import longest

        degrees = mesh_degrees(cfg, cluster.size)
        plan = longest(
            lambda length: make_plan(cfg, cluster, length, exact=args.exact),
            divisor(degrees),
            start=max(8192 * degrees["cp"], 1),
            notify=_notify,
        )
        source = "the longest that fits"
    else:
        plan = make_plan(cfg, cluster, seq_len, exact=args.exact)
    if args.plot is not None:
        from torchtune_cp.planner.plot import draw

        draw(plan, args.plot)
    print(json.dumps(as_dict(plan, source), indent=2) if args.json else as_table(plan, source))


def _notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ranks(args: argparse.Namespace) -> tuple[int, int | None]:
    """World size, and ranks of a node where they are given."""
    if args.nnodes < 1:
        raise ConfigError(f"--nnodes: must be at least 1, got {args.nnodes}")
    size, per_node = args.world_size, args.nproc_per_node
    if size is None:
        size = (per_node or 1) * args.nnodes
    elif per_node is None:
        per_node = size // args.nnodes if args.nnodes > 1 else None
    if not 1 <= size <= MOST_RANKS:
        raise ConfigError(f"--world-size: must be 1 to {MOST_RANKS}, got {size}")
    whole_nodes = per_node is None or (per_node >= 1 and per_node * args.nnodes == size)
    one_kind = args.nnodes == 1 and per_node is not None and per_node >= 1 and size % per_node == 0
    if not whole_nodes and not one_kind:
        raise ConfigError(
            f"--world-size {size} is not --nnodes {args.nnodes} times --nproc-per-node {per_node}"
        )
    return size, per_node


def _sequence(args: argparse.Namespace, cfg: FullFinetuneConfig) -> tuple[int, str]:
    """Tokens of a sequence, and where the number comes from."""
    if args.seq_len is not None:
        if args.seq_len < 1:
            raise ConfigError(f"--seq-len: must be at least 1, got {args.seq_len}")
        return args.seq_len, "--seq-len"
    if cfg.tokenizer.get("max_seq_len") is not None:
        return int(cfg.tokenizer["max_seq_len"]), "tokenizer.max_seq_len"
    datasets: list[Any] = (
        list(cfg.dataset) if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
    )
    lengths = [d["max_seq_len"] for d in datasets if d.get("max_seq_len") is not None]
    if lengths:
        return int(max(lengths)), "dataset.max_seq_len"
    return int(_model_sizes(cfg)["max_seq_len"]), "the model's max_seq_len"


def _model_sizes(cfg: FullFinetuneConfig) -> Mapping[str, Any]:
    import torch

    from torchtune_cp.config import instantiate
    from torchtune_cp.models.transformer import TransformerDecoder

    with torch.device("meta"):
        model = instantiate(cfg.model)
    if not isinstance(model, TransformerDecoder):
        raise UserError(
            f"model._component_={cfg.model['_component_']} builds a {type(model).__name__};"
            " a plan is made for the decoders of torchtune_cp.models"
        )
    return vars(model.config)


def _suggest(
    cfg: FullFinetuneConfig, cluster: Cluster, seq_len: int, source: str, *, as_json: bool
) -> None:
    from torchtune_cp.planner.report import as_dict
    from torchtune_cp.planner.suggest import as_table, described, suggest

    sizes = _model_sizes(cfg)
    cut = {n: sizes[n] for n in ("num_heads", "num_kv_heads", "intermediate_dim", "vocab_size")}
    found = suggest(cfg, cluster, seq_len, cut, notify=_notify)
    if not found:
        raise UserError(
            f"{seq_len} tokens ({source}) fit on no mesh of {cluster.size} x {cluster.device.name}"
        )
    if as_json:
        print(
            json.dumps(
                [{"overrides": s.overrides, "plan": as_dict(s.plan, source)} for s in found],
                indent=2,
            )
        )
        return
    print(f"{cluster.size} x {cluster.device.name}, sequences of {seq_len:,} tokens ({source})")
    print(as_table(found))
    print(f"Best: {described(found[0].overrides)}")
