"""A YAML file and command-line overrides to one OmegaConf config."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchtune_cp.config.locate import find_config
from torchtune_cp.config.overrides import apply_overrides, none_to_null, parse_overrides
from torchtune_cp.config.plain_yaml import read_mapping
from torchtune_cp.config.secrets import remember_secrets
from torchtune_cp.errors import ConfigError

_NO_FILE = "give a config: --config FILE_OR_NAME (tune ls lists the shipped ones)"


def load(source: str | os.PathLike[str], overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config and apply command-line overrides.

    Interpolations (`${output_dir}/logs`) stay unresolved until a value is read, so that an
    override of `output_dir` reaches them.

    Args:
        source: A YAML file, or the name of a shipped config (`llama3/8B_full`).
        overrides: `key=value`, `~key`, `--key value` tokens; see `parse_overrides`.

    Raises:
        ConfigError: No such config, broken YAML, or an override that cannot be applied.
    """
    path = find_config(source)
    tree = _read_yaml(path)
    apply_overrides(tree, parse_overrides(overrides))
    try:
        cfg = OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    assert isinstance(cfg, DictConfig)
    remember_secrets(cfg)
    return cfg


def _read_yaml(path: Path) -> dict[str, Any]:
    loaded = read_mapping(path)
    bad = [key for key in loaded if not isinstance(key, str)]
    if bad:
        raise ConfigError(f"{path}: keys are strings, got {bad[0]!r}")
    tree = none_to_null(loaded)
    assert isinstance(tree, dict)
    return tree


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def split_argv(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config X` (or `--config=X`) out of a recipe's arguments.

    Returns:
        The config, None when there is none, and the other arguments in order.

    Raises:
        ConfigError: `--config` has no value, or is given more than once.
    """
    found: list[str] = []
    rest: list[str] = []
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        if token == "--config":
            if not queue:
                raise ConfigError(f"--config has no value: {_NO_FILE}")
            found.append(queue.pop(0))
        elif token.startswith("--config="):
            found.append(token.partition("=")[2])
        else:
            rest.append(token)
    if len(found) > 1:
        raise ConfigError(f"--config is given {len(found)} times: give one ({', '.join(found)})")
    return (found[0] if found else None), rest


def load_argv(argv: Sequence[str]) -> DictConfig:
    """Load the config that a recipe's command line names (`--config X key=value ...`).

    Raises:
        ConfigError: As `load`, and when there is no `--config`.
    """
    source, overrides = split_argv(argv)
    if source is None:
        raise ConfigError(_NO_FILE)
    return load(source, overrides)
