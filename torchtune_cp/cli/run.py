"""``tune run``: check a config, then start a recipe on every process of this node."""

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_cp.cli.launcher import RunFailed, RunSettings, launch, world_size_of
from torchtune_cp.cli.parser import OneLineParser, Subparsers
from torchtune_cp.config import schema, tensor_parallel_problems
from torchtune_cp.config.entry_point import TRACEBACK_VARIABLE, trust_recipe_folder
from torchtune_cp.config.load import load, split_argv
from torchtune_cp.config.locate import find_config, find_recipe, recipes_dir
from torchtune_cp.errors import ConfigError, UserError

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
    """Add ``tune run``; its arguments are read by :func:`run_command`."""
    parser = subparsers.add_parser(
        "run", help="run a recipe; takes every torchrun option", add_help=False
    )
    parser.set_defaults(run=run_command)


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
    return parser


def run_command(argv: Sequence[str], log_level: str | None = None) -> None:
    """Run ``tune run`` with its arguments.

    Args:
        argv: What stands after ``run``.
        log_level: The level given before ``run``.

    Raises:
        ConfigError: The command or the config is refused; nothing was started.
        RunFailed: The run was started and failed.
    """
    parser = _torchrun_parser()
    args = parser.parse_args(list(argv))
    if "DEBUG" in (log_level, args.log_level):
        os.environ[TRACEBACK_VARIABLE] = "1"
    source, overrides = split_argv(args.training_script_args)
    recipe = _locate_recipe(args)
    world_size = world_size_of(args)
    settings = RunSettings()
    if source is not None:
        config_path = find_config(source)
        _refuse_torchrun_options(overrides, parser)
        if recipe is not None:
            trust_recipe_folder(recipe.path)
            sys.path.append(str(recipe.path.parent))
        cfg = load(config_path, overrides)
        _check_before_start(cfg, recipe, args, world_size)
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
    """Read what the launcher needs; a config of the user's own kind need not have any of it."""

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
    )


def _restart_point(output_dir: Path, resume_from_checkpoint: bool | str) -> str:
    from torchtune_cp.checkpointing.earlier_runs import noted_earlier
    from torchtune_cp.checkpointing.resume_point import CHECKPOINTS_NAME
    from torchtune_cp.checkpointing.training_state_store import list_checkpoints

    folder = output_dir.expanduser() / CHECKPOINTS_NAME
    others = noted_earlier(folder)
    own = [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.name not in others]
    if own:
        return f"; it continues from {own[0]}"
    if isinstance(resume_from_checkpoint, str):
        return f"; it continues from {resume_from_checkpoint}"
    return "; it starts at the beginning, as there is no checkpoint yet"


@dataclass(frozen=True)
class _Recipe:
    path: Path

    @property
    def is_shipped(self) -> bool:
        return self.path.parent.resolve() == recipes_dir().resolve()

    def schema(self) -> type[schema.FullFinetuneConfig] | None:
        """Return the config class that ``@config.parse(schema=...)`` names in the recipe's source.

        The source is read, not run: a recipe may import anything. None means a raw config, or a
        class of the recipe's own, which the recipe itself checks.
        """
        for node in ast.walk(ast.parse(self.path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                name = _schema_name(decorator)
                found = getattr(schema, name, None) if name else None
                if isinstance(found, type):
                    return found
        return None


def _schema_name(decorator: ast.expr) -> str | None:
    if not isinstance(decorator, ast.Call):
        return None
    for keyword in decorator.keywords:
        if keyword.arg == "schema":
            value = keyword.value
            if isinstance(value, ast.Name):
                return value.id
            if isinstance(value, ast.Attribute):
                return value.attr
    return None


def _locate_recipe(args: argparse.Namespace) -> _Recipe | None:
    if args.module or args.no_python:
        return None  # a module name or a program: torchrun finds it
    return _Recipe(find_recipe(args.training_script))


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
    cfg: DictConfig, recipe: _Recipe | None, args: argparse.Namespace, world_size: int | None
) -> None:
    """Refuse what can be known to fail, with every problem, before any process is started."""
    if str(cfg.get("log_level")).upper() == "DEBUG":
        os.environ[TRACEBACK_VARIABLE] = "1"
    config_class = _schema_of(recipe)
    if config_class is None:
        checkpointer: Any = OmegaConf.select(cfg, "checkpointer", throw_on_resolution_failure=False)
    else:
        typed = schema.to_typed(cfg, config_class, world_size)
        problems = schema.component_problems(typed) + _device_problems(typed, args)
        if problems:
            raise ConfigError(problems)
        checkpointer = typed.checkpointer
    if isinstance(checkpointer, DictConfig) and checkpointer.get("checkpoint_dir") is not None:
        _check_checkpoint(checkpointer)
    if config_class is not None:
        _check_model(typed)


def _schema_of(recipe: _Recipe | None) -> type[schema.FullFinetuneConfig] | None:
    if recipe is None:
        return None
    try:
        return recipe.schema()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe.path} is no Python file: {error}") from None


def _device_problems(cfg: schema.FullFinetuneConfig, args: argparse.Namespace) -> list[str]:
    if cfg.device != "cuda":
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


def _check_model(cfg: schema.FullFinetuneConfig) -> None:
    from torchtune_cp.cli.model_check import build_on_meta
    from torchtune_cp.models import TransformerDecoder

    model = build_on_meta(cfg)
    if not isinstance(model, TransformerDecoder) or cfg.tensor_parallel_dim == 1:
        return  # the recipe says what it takes
    problems = tensor_parallel_problems(vars(model.config), cfg.tensor_parallel_dim)
    if problems:
        raise ConfigError(problems)


def _check_checkpoint(checkpointer: DictConfig) -> None:
    from torchtune_cp.checkpointing import check_folder

    tree = OmegaConf.to_container(checkpointer, resolve=True)
    assert isinstance(tree, dict)
    try:
        check_folder(tree["checkpoint_dir"], checkpoint_files=tree.get("checkpoint_files"))
    except UserError as error:
        raise ConfigError(f"checkpointer: {error}") from None
