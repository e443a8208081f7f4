"""Loggers that write one line of text per step: to standard output, or to a file."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.config.secrets import write_private
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import (
    Scalar,
    loggable_config,
    refuse_unknown_keys,
    to_number,
    unknown_keys,
)


def _line(payload: Mapping[str, Scalar], step: int) -> str:
    return f"Step {step} | " + " ".join(f"{name}:{to_number(v)}" for name, v in payload.items())


@checked_by(unknown_keys)
class StdoutLogger:
    """Writes `Step 3 | loss:2.1 lr:0.0002` to standard output."""

    def __init__(self, **other: object) -> None:
        """Accept and ignore keys of other loggers."""
        refuse_unknown_keys("StdoutLogger", other, set())

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Write one value."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Write the values of one step in one line."""
        print(_line(payload, step), flush=True)

    def log_config(self, config: Any) -> None:
        """Do nothing: the run's `config.yaml` contains the config."""

    def close(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()


def _filename_errors(filename: object) -> Iterator[UserError]:
    """Say that a file's name leads out of its folder, if it does."""
    if filename is None:
        return
    name = str(filename)
    if not name.strip() or name in (".", "..") or any(part in name for part in ("/", "\\", "\0")):
        yield UserError(
            f"filename: {name!r} is not the name of a file in log_dir, without a folder"
        )


def _check_disk_logger(arguments: Mapping[str, Any], named: frozenset[str]) -> Iterator[UserError]:
    yield from _filename_errors(arguments.get("filename"))
    yield from unknown_keys(arguments, named)


@checked_by(_check_disk_logger)
class DiskLogger:
    """Writes the same lines to a file, or one JSON object per line; flushed after every step."""

    def __init__(
        self,
        log_dir: str | Path,
        output_fmt: Literal["txt", "jsonl"] = "txt",
        filename: str | None = None,
        **other: object,
    ) -> None:
        """Open the file; an existing one is continued.

        Args:
            log_dir: Folder, created if needed.
            output_fmt: `txt` writes lines as `StdoutLogger` does, `jsonl` JSON objects.
            filename: A name in that folder. Default `log_<unix time>.<output_fmt>`.
            **other: Keys of other loggers, which are ignored.

        Raises:
            UserError: A key is unknown, or the file is outside the folder or cannot be written.
        """
        refuse_unknown_keys("DiskLogger", other, {"log_dir", "output_fmt", "filename"})
        if output_fmt not in ("txt", "jsonl"):
            raise UserError(f"metric_logger.output_fmt={output_fmt!r}; allowed: txt, jsonl")
        for error in _filename_errors(filename):
            raise UserError(f"metric_logger.{error}")
        self._as_json = output_fmt == "jsonl"
        name = filename or f"log_{int(time.time())}.{output_fmt}"
        self._path = expand_home(log_dir) / name
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"metric_logger.log_dir: cannot write {self._path}: {error}") from error

    def path_to_log_file(self) -> Path:
        """Return the file's path."""
        return self._path

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Write one value."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Write the values of one step in a line."""
        line = _line(payload, step)
        if self._as_json:
            # As in metrics.jsonl: JSON has no NaN and no infinity.
            numbers = {name: to_number(value) for name, value in payload.items()}
            finite = {n: v if math.isfinite(v) else None for n, v in numbers.items()}
            line = json.dumps({"step": step, **finite}, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def log_config(self, config: Any) -> None:
        """Write the resolved config, secrets masked, to `<log name>.config.yaml`."""
        path = self._path.with_suffix(".config.yaml")
        write_private(path, yaml.safe_dump(loggable_config(config), sort_keys=False))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
