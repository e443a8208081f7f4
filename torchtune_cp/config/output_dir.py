"""Checks the output paths of a run before it trains: kind, permission, and the owner of the folder.

`tune run` does this before it starts a process, and the process that writes for all ranks does it again
when it takes the folder for itself (it may have been started without `tune run`). Nothing that is there
is changed by either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_cp.config.output_lock import LOCK_NAME, OutputLock, Owner
from torchtune_cp.config.overrides import COMPONENT
from torchtune_cp.config.path_checks import (
    Kind,
    as_path,
    cannot_write,
    expand_home,
    kind_problem,
    write_and_delete,
)
from torchtune_cp.errors import ConfigError

#: What a run writes into its `output_dir` (and the loggers' notes, and the lock).
CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
CHECKPOINTS_NAME = "checkpoints"
FINAL_NAME = "final"
NOTES_NAME = "logger_run.json"

_held: OutputLock | None = None


@dataclass(frozen=True)
class RunOutput:
    """Where a run writes, read from a config of any kind.

    Attributes:
        folder: Its `output_dir`.
        resume: `resume_from_checkpoint`.
        overwrite: Whether it may replace an existing run.
        logs: Further folders and files that it makes or writes into: config key, path and kind.
    """

    folder: Path
    resume: bool | str
    overwrite: bool
    logs: tuple[tuple[str, Path, Kind], ...]

    @classmethod
    def of(cls, cfg: DictConfig) -> RunOutput | None:
        """Read the keys; None for a config without an `output_dir`: there is nothing to know.

        Args:
            cfg: The config as it was loaded; one of the user recipe may have any keys.

        Raises:
            ConfigError: A path is empty or cannot be a path.
        """
        given = _value(cfg, "output_dir")
        if not isinstance(given, str):
            return None
        resume = _value(cfg, "resume_from_checkpoint")
        return cls(
            folder=as_path("output_dir", given),
            resume=resume if isinstance(resume, bool | str) else False,
            overwrite=_value(cfg, "overwrite") is True,
            logs=tuple(_log_paths(cfg)),
        )

    def check(self) -> None:
        """Look at the kind of every path that will be written; nothing is opened or made.

        Raises:
            ConfigError: With every path that cannot be written, one line each.
        """
        folder = self.folder
        wanted: list[tuple[str, Path, Kind]] = [("output_dir", folder, "a folder")]
        names = [CONFIG_NAME, NOTES_NAME, LOCK_NAME]
        if not self.resume:
            names.append(METRICS_NAME)  # a resumed run moves a damaged one aside
        if kind_problem(folder, "a folder") is None:
            wanted += [("output_dir", folder / name, "a file") for name in names]
            subfolders = (CHECKPOINTS_NAME, FINAL_NAME)
            wanted += [("output_dir", folder / name, "a folder") for name in subfolders]
        wanted += self.logs
        problems = [
            f"{key}: {problem}"
            for key, path, kind in wanted
            if (problem := kind_problem(path, kind))
        ]
        final = folder / FINAL_NAME
        if os.path.ismount(final):
            problems.append(f"output_dir: {final} is a mount point, which cannot be replaced")
        if problems:
            raise ConfigError(problems)

    def refuse_start_over(self, last: Owner | None) -> None:
        """Refuse to begin where a run is that this start does not continue.

        A `config.yaml` alone may have been left by a start that failed before its first step; where no
        run has ever written, it belongs to the user.

        Args:
            last: Who wrote here before.

        Raises:
            ConfigError: With the ways out.
        """
        found = list(self._of_a_run())
        if (found or last is None) and (self.folder / CONFIG_NAME).exists():
            found.insert(0, CONFIG_NAME)
        if self.overwrite or not found or self._continues():
            return
        what = "this start does not continue it"
        if self.resume is True:
            what = "it left no checkpoint to continue from"
        elif self.resume:
            what = f"resume_from_checkpoint={self.resume} does not continue it"
        raise ConfigError(
            f"output_dir: {self.folder} holds a run already ({', '.join(found)}), and {what}:"
            " resume_from_checkpoint=true continues a run from its newest checkpoint, another output_dir"
            " keeps both, overwrite=true replaces it"
        )

    def _of_a_run(self) -> Iterator[str]:
        metrics, final = self.folder / METRICS_NAME, self.folder / FINAL_NAME
        if os.path.lexists(metrics) and not (metrics.is_file() and metrics.stat().st_size == 0):
            yield METRICS_NAME
        if self._has_checkpoints():
            yield CHECKPOINTS_NAME
        if _is_model(final):
            yield FINAL_NAME

    def _has_checkpoints(self) -> bool:
        folder = self.folder / CHECKPOINTS_NAME
        return folder.is_dir() and any(not name.startswith(".") for name in os.listdir(folder))

    def _continues(self) -> bool:
        """Whether this start continues the run in its folder, or one that never saved."""
        if self.resume is True:
            return self._has_checkpoints() or not _is_model(self.folder / FINAL_NAME)
        if not self.resume:
            return False
        given = Path(os.path.realpath(expand_home(str(self.resume))))
        own = Path(os.path.realpath(self.folder))
        checkpoints = Path(os.path.realpath(self.folder / CHECKPOINTS_NAME))
        return self._has_checkpoints() and (
            given in (own, checkpoints) or given.parent == checkpoints
        )

    def try_to_write(self) -> None:
        """Write and delete a hidden file in every folder, and open every file that is there.

        Raises:
            ConfigError: With every path that cannot be written, one line each.
            UserError: A disk is full.
        """
        paths: list[tuple[str, Path, Kind]] = [("output_dir", self.folder, "a folder"), *self.logs]
        for name in (CHECKPOINTS_NAME, FINAL_NAME):
            if (self.folder / name).is_dir():
                paths.append(("output_dir", self.folder / name, "a folder"))
        for name in (CONFIG_NAME, NOTES_NAME, METRICS_NAME):
            paths.append(("output_dir", self.folder / name, "a file"))
        problems = []
        for key, path, kind in paths:
            try:
                if kind == "a folder":
                    path.mkdir(parents=True, exist_ok=True)
                    write_and_delete(path)
                elif path.is_file():
                    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
            except OSError as error:
                problems.append(cannot_write(key, path, error))
        if problems:
            raise ConfigError(problems)


def check_output(
    cfg: DictConfig, nodes: int = 1, node_rank: int = 0, job: str | None = None
) -> None:
    """Refuse, before any process starts, what a run could not write, or would destroy.

    Args:
        cfg: The config as it was loaded.
        nodes: Nodes of the run: with several, one of them writes.
        node_rank: Which of them this is, where that is known.
        job: What torchrun names the run on all of its nodes.

    Raises:
        ConfigError: Every path that cannot be written; or another run uses the folder; or a run is there
            that this one does not continue.
        UserError: A disk is full.
    """
    output = RunOutput.of(cfg)
    if output is None:
        return
    output.check()
    if node_rank == 0:
        lock = _take(output, Owner.here(os.getpid()), let_pass=job if nodes > 1 else None)
        try:
            if lock.taken:
                output.refuse_start_over(lock.last)
        finally:
            lock.release()
    output.try_to_write()


def hold_output(cfg: DictConfig, launcher: int | None, *, restarted: bool) -> None:
    """Take the run's folder for this process until it ends; called where rank 0 starts.

    Args:
        cfg: The config as it was loaded.
        launcher: The process that started this one and would start it again; None without one.
        restarted: Whether it has done so: what is in the folder is the run's own.

    Raises:
        ConfigError: As `check_output`.
        UserError: A disk is full.
    """
    global _held
    output = RunOutput.of(cfg)
    if output is None:
        return
    me = Owner.here(launcher)
    output.check()
    lock = _take(output, me)
    try:
        if not restarted and not (lock.last is not None and lock.last.is_same_run(me)):
            output.refuse_start_over(lock.last)
        output.try_to_write()
        lock.hold(me)
    except BaseException:
        lock.release()
        raise
    _held = lock


def release_output() -> None:
    """Say that the run which `hold_output` took a folder for is done; without one nothing happens.

    A process that fails need not: its lock ends with it, and its launcher may start it again.
    """
    if _held is not None:
        _held.release()


def _take(output: RunOutput, me: Owner, let_pass: str | None = None) -> OutputLock:
    lock: OutputLock | None = None
    try:
        output.folder.mkdir(parents=True, exist_ok=True)
        lock = OutputLock(output.folder)
        lock.take(me, let_pass=let_pass)
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, OSError):
            raise ConfigError(cannot_write("output_dir", output.folder, error)) from None
        raise
    return lock


def _value(cfg: DictConfig, key: str) -> Any:
    return OmegaConf.select(cfg, key, throw_on_resolution_failure=False)


def _log_paths(cfg: DictConfig) -> Iterator[tuple[str, Path, Kind]]:
    """What the metric logger and the profiler write into, where the config names it."""
    logger = _value(cfg, "metric_logger")
    if isinstance(logger, DictConfig):
        name = str(logger.get(COMPONENT)).rpartition(".")[2]
        # What another logger takes is let pass, and written to by none.
        keys = {"StdoutLogger": (), "WandBLogger": ("dir", "log_dir")}.get(name, ("log_dir",))
        for key in [f"metric_logger.{key}" for key in keys if isinstance(logger.get(key), str)][:1]:
            folder = as_path(key, _value(cfg, key))
            yield key, folder, "a folder"
            filename = _value(cfg, "metric_logger.filename")
            if name == "DiskLogger" and isinstance(filename, str):
                yield "metric_logger.filename", folder / filename, "a file"
    if _value(cfg, "profiler.enabled") is True:
        given = _value(cfg, "profiler.output_dir")
        text = given if isinstance(given, str) else "profiling_outputs"
        yield "profiler.output_dir", as_path("profiler.output_dir", text), "a folder"


def _is_model(folder: Path) -> bool:
    return folder.is_dir() and any(
        name == "config.json" or name.endswith(".safetensors") for name in os.listdir(folder)
    )
