"""`tune run`: check a config, then start a recipe on every process of this node."""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_cp.cli.before_start import look_over
from torchtune_cp.cli.parser import OneLineParser, Subparsers
from torchtune_cp.cli.recipe import Recipe
from torchtune_cp.config import schema
from torchtune_cp.config.allow import user_prefixes
from torchtune_cp.config.load import load, split_argv
from torchtune_cp.config.locate import find_config, find_recipe
from torchtune_cp.config.output_dir import CHECKPOINTS_NAME, check_output
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.errors import ConfigError
from torchtune_cp.launch.launcher import RunFailed, RunSettings, launch, world_size_of
from torchtune_cp.launch.process import TRACEBACK_VARIABLE, wants_traceback
from torchtune_cp.launch.rendezvous_options import add_options, settle_rendezvous

__all__ = ["RunFailed", "add_parser", "run_command"]

_USAGE = "tune run [TORCHRUN-OPTIONS] RECIPE --config CONFIG [key=value ...]"
_EXAMPLES = """\
examples:
  tune run --nproc_per_node 2 full_finetune_distributed --config tiny/llama_cpu context_parallel_dim=2
  tune run --nproc_per_node 8 my_recipe.py --config my_config.yaml batch_size=2 ~lr_scheduler

RECIPE is a shipped recipe (tune ls) or a path to your own; CONFIG is a shipped config or a YAML
file. Without options one process is started.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune run`; its arguments are read by `run_command`."""
    parser = subparsers.add_parser(
        "run", help="run a recipe; takes every torchrun option", add_help=False
    )
    parser.set_defaults(run=run_command)


def _import_torch_quietly() -> None:
    """Import torch without its C++ log in this process: a store that goes away fills pages of it."""
    variable = (
        "TORCH_CPP_LOG_LEVEL"  # read when torch is imported; the ranks are to have their own log
    )
    if variable in os.environ or wants_traceback():
        return
    os.environ[variable] = "FATAL"
    try:
        import torch.distributed  # noqa: F401
    finally:
        del os.environ[variable]


def _torchrun_parser() -> OneLineParser:
    # Importing torch takes seconds, and only this subcommand needs it.
    from torch.distributed.run import get_args_parser

    parser = OneLineParser(
        prog="tune run",
        usage=_USAGE,
        epilog=_EXAMPLES,
        parents=[get_args_parser()],
        add_help=False,
    )
    parser.add_argument(
        "--log-level", "--log_level", type=str.upper, help="DEBUG shows the tracebacks of errors"
    )
    add_options(parser)
    return parser


def run_command(argv: Sequence[str], log_level: str | None = None) -> None:
    """Run `tune run` with its arguments.

    Args:
        argv: The arguments after `run`.
        log_level: The level given before `run`.

    Raises:
        ConfigError: The command or the config is refused; nothing was started.
        RunFailed: The run was started and failed.
    """
    _import_torch_quietly()
    parser = _torchrun_parser()
    args = parser.parse_args(list(argv))
    if "DEBUG" in (log_level, args.log_level):
        os.environ[TRACEBACK_VARIABLE] = "1"
    source, overrides = split_argv(args.training_script_args)
    recipe = _locate_recipe(args)
    world_size = world_size_of(args)
    settle_rendezvous(args)
    settings = RunSettings(with_current_folder=bool(user_prefixes()))
    if source is not None:
        config_path = find_config(source)
        _refuse_torchrun_options(overrides, parser)
        if recipe is not None:
            recipe.trust()
        cfg = load(config_path, overrides)
        _check_before_start(cfg, config_path, recipe, args, world_size)
        settings = _settings(cfg)
        args.training_script_args = ["--config", str(config_path), *overrides]
    elif recipe is not None and recipe.is_shipped:
        raise ConfigError(
            f"{recipe.path.stem} needs a config: --config FILE_OR_NAME (tune ls lists the shipped ones)"
        )
    if recipe is not None:
        args.training_script = str(recipe.path)
    launch(args, settings)


def _settings(cfg: DictConfig) -> RunSettings:
    """Read what the launcher needs; a config of a custom kind need not have any of it."""

    def value(key: str, otherwise: Any) -> Any:
        found = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
        return otherwise if found is None else found

    output_dir, given = value("output_dir", None), value("resume_from_checkpoint", False)
    point = None
    if output_dir is not None:
        point = partial(_restart_point, Path(output_dir), given)
    return RunSettings(
        stop_grace_s=float(value("stop_grace_s", schema.FullFinetuneConfig.stop_grace_s)),
        collective_timeout_s=float(
            value("collective_timeout_s", schema.FullFinetuneConfig.collective_timeout_s)
        ),
        restart_point=point,
        with_current_folder=bool(user_prefixes()),
    )


def _restart_point(output_dir: Path, resume_from_checkpoint: bool | str) -> str:
    from torchtune_cp.checkpointing.manifest import is_misnamed
    from torchtune_cp.checkpointing.stale_checkpoints import noted_stale
    from torchtune_cp.checkpointing.training_state_store import list_checkpoints

    folder = expand_home(output_dir) / CHECKPOINTS_NAME
    others = noted_stale(folder)
    own = [
        checkpoint
        for checkpoint in list_checkpoints(folder)
        if checkpoint.name not in others and not is_misnamed(checkpoint)
    ]
    if own:
        return f"; it continues from {own[0]}"
    if isinstance(resume_from_checkpoint, str):
        return f"; it continues from {resume_from_checkpoint}"
    return "; it starts from the beginning, because there is no checkpoint yet"


def _locate_recipe(args: argparse.Namespace) -> Recipe | None:
    if args.module or args.no_python:
        return None  # a module name or a program: torchrun finds it
    return Recipe(find_recipe(args.training_script))


def _refuse_torchrun_options(overrides: Sequence[str], parser: OneLineParser) -> None:
    config_keys = {"log_level"}
    for token in overrides:
        name = token.partition("=")[0]
        known = parser._option_string_actions.get(name) if name.startswith("--") else None
        if known is not None and known.dest not in config_keys:
            raise ConfigError(
                f"{name} is an option of torchrun: put it before the recipe ({_USAGE})"
            )


def _check_before_start(
    cfg: DictConfig,
    config_path: Path,
    recipe: Recipe | None,
    args: argparse.Namespace,
    world_size: int | None,
) -> None:
    """Refuse what can be known to fail, with every problem, before any process is started."""
    if str(cfg.get("log_level")).upper() == "DEBUG":
        os.environ[TRACEBACK_VARIABLE] = "1"
    config_class = None if recipe is None else recipe.config_class()
    text = config_path.read_text(encoding="utf-8")
    found = look_over(cfg, config_class, world_size, text=text)
    problems = found.problems + found.not_here
    if config_class is not None:
        problems += _device_problems(cfg, args)
    if problems:
        raise ConfigError(problems)
    _check_output(cfg, args)


def _device_problems(cfg: DictConfig, args: argparse.Namespace) -> list[str]:
    device = OmegaConf.select(cfg, "device", throw_on_resolution_failure=False)
    if str(device or schema.FullFinetuneConfig.device).lower() != "cuda":
        return []
    import torch

    if not torch.cuda.is_available():
        return ["device: cuda, but torch sees no CUDA device here; device=cpu runs on the CPU"]
    from torch.distributed.run import determine_local_world_size

    processes, devices = determine_local_world_size(args.nproc_per_node), torch.cuda.device_count()
    if processes > devices:
        return [
            f"--nproc_per_node: {processes} processes, but this node has {devices} CUDA devices"
        ]
    return []


def _check_output(cfg: DictConfig, args: argparse.Namespace) -> None:
    """Look at what the run will write, last: from here on the output folder is there."""
    from torch.distributed.run import parse_min_max_nnodes

    nodes = parse_min_max_nnodes(args.nnodes)[1]
    node_rank = args.node_rank if nodes > 1 and args.rdzv_backend == "static" else 0
    check_output(cfg, nodes=nodes, node_rank=node_rank, job=args.rdzv_id)
