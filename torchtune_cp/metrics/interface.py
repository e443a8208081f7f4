"""What every metric logger can do, and the keys that belong to another logger."""

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from omegaconf import DictConfig

from torchtune_cp.config import resolved_dict
from torchtune_cp.config.overrides import COMPONENT
from torchtune_cp.config.secrets import mask_secrets
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import NotFoundHereError, UserError

log = logging.getLogger(__name__)

Scalar = torch.Tensor | int | float

# `metric_logger=WandBLogger` on the command line replaces the component and keeps its other
# sub-keys, so every logger receives keys of the others; a misspelt key belongs to none.
_KEYS = {
    "log_dir",
    "filename",
    "output_fmt",
    "organize_logs",
    "project",
    "entity",
    "group",
    "name",
    "dir",
    "mode",
    "tags",
    "notes",
    "job_type",
    "id",
    "resume",
}

#: Descriptive keys of loggers without further effect: they are passed masked.
LABELS = ("name", "run_name", "notes", "description", "tags", "job_type", "group", "config")


class MetricLogger(Protocol):
    """Takes scalars step by step. Made on rank 0 only."""

    def log(self, name: str, data: Scalar, step: int) -> None:  # pragma: no cover - protocol
        """Record one value."""
        ...

    def log_dict(
        self, payload: Mapping[str, Scalar], step: int
    ) -> None:  # pragma: no cover - protocol
        """Record several values of one step."""
        ...

    def log_config(self, config: Any) -> None:  # pragma: no cover - protocol
        """Record the run's config (secrets masked)."""
        ...

    def close(self) -> None:  # pragma: no cover - protocol
        """Write out what is pending; nothing may be logged afterwards."""
        ...


def to_number(value: Scalar) -> int | float:
    """Turn a one-element tensor or a number into a Python number."""
    return value.item() if isinstance(value, torch.Tensor) else value


def unknown_keys(
    arguments: Mapping[str, Any], named: frozenset[str], more: Iterable[str] = ()
) -> Iterator[UserError]:
    """Check for arguments that belong to no logger, see `checked_by`.

    Args:
        arguments: Arguments from the config.
        named: Names in the logger's signature.
        more: Further names that it accepts.
    """
    known = {*named, *more} | _KEYS
    for key in arguments:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known are {', '.join(sorted(known))}"
            yield UserError(f"{key}: is not a key of this logger{hint}")


def needs_package(package: str) -> Iterator[UserError]:
    """Say that a logger's package is not installed, if it is not."""
    if importlib.util.find_spec(package) is None:
        yield NotFoundHereError(
            f"{COMPONENT}: needs the package {package}: pip install {package} (or choose"
            " torchtune_cp.metrics.StdoutLogger)"
        )


def refuse_unknown_keys(logger: str, keys: Mapping[str, object], own: set[str]) -> None:
    """Let pass what another logger takes, with a warning; refuse the rest with the nearest name.

    Args:
        logger: The logger's class name.
        keys: Keys that the logger does not take.
        own: Keys that it takes.

    Raises:
        UserError: A key belongs to no logger.
    """
    for key in keys:
        if key not in _KEYS:
            names = sorted(own | _KEYS)
            hint = did_you_mean(key, names) or f"; known are {', '.join(names)}"
            raise UserError(f"metric_logger.{key} is not a key of {logger}{hint}")
        log.warning("metric_logger.%s: %s does not use it", key, logger)


def loggable_config(config: Any) -> dict[str, Any]:
    """Give the config as plain containers, resolved, with its secrets masked.

    Args:
        config: A recipe's typed config, an OmegaConf config, or a plain dict.
    """
    if is_dataclass(config) or isinstance(config, DictConfig):
        return resolved_dict(config)  # type: ignore[arg-type]
    masked = mask_secrets(config)
    assert isinstance(masked, dict), type(config)
    return masked
