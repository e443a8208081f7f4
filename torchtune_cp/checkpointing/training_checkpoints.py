"""A run's checkpoints: saved asynchronously or synchronously, pruned, and found again.

One code path writes them. With `asynchronous` the shards are first copied to host buffers, which
are kept from save to save, and a thread then writes them while training continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtune_cp.checkpointing.manifest import is_misnamed
from torchtune_cp.checkpointing.plain_json import to_plain
from torchtune_cp.checkpointing.rank_sync import RankSync, RemoteError
from torchtune_cp.checkpointing.resume_point import (
    ResumePoint,
    find_resume_point,
    not_continued,
)
from torchtune_cp.checkpointing.stale_checkpoints import note_stale, set_aside
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.checkpointing.training_state_store import (
    list_checkpoints,
    load_tensors,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    write_checkpoint,
)
from torchtune_cp.config.output_dir import CHECKPOINTS_NAME
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.distributed.process_group import restart_count
from torchtune_cp.errors import UserError

_LOG = logging.getLogger(__name__)


class TrainingCheckpoints:
    """Saves a run's state under `output_dir/checkpoints/step_N`; every rank makes the same calls.

    At most one save is in flight: the next one waits for it. A save that failed is never passed over:
    its error is raised by the next call of any method here, at the latest of `close`.

    Attributes:
        folder: The folder that contains them.
        last_saved: The step of the last save that is known to be complete; None before.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        asynchronous: bool = False,
        keep_last_n: int | None = None,
        keep_best: bool = False,
        on_save_error: str = "raise",
    ) -> None:
        """Make the meeting point of the ranks; nothing is written yet.

        Args:
            output_dir: The run's folder.
            asynchronous: Write in the background, from a copy in host memory.
            keep_last_n: Keep only this number of the newest checkpoints, once a new one is complete;
                None keeps all.
            keep_best: Also keep the one with the lowest validation loss.
            on_save_error: `raise` ends the run when a save fails, `continue` logs it.
        """
        assert on_save_error in ("raise", "continue"), on_save_error
        self.folder = expand_home(output_dir) / CHECKPOINTS_NAME
        self._keep_last_n = keep_last_n
        self._keep_best = keep_best
        self._raises = on_save_error == "raise"
        self._rank_sync = RankSync()
        self._stager: DefaultStager | None = None
        self._executor: ThreadPoolExecutor | None = None
        if asynchronous:
            on_gpu = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,  # the next step may change the weights at once
                    use_non_blocking_copy=on_gpu,
                )
            )
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="save-checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._others: list[Path] = []
        self.last_saved: int | None = None
        #: The newest complete checkpoint of this run: written by it, or the one it continues from.
        self.newest: Path | None = None

    def find(self, resume_from_checkpoint: bool | str) -> ResumePoint | None:
        """Decide where the run starts; half-written saves of killed runs are deleted.

        Complete checkpoints of the run's folder that it does not continue (those of an earlier run, or
        later than the one it resumes from) are moved to a sibling folder at the first save, so that
        the newest one is always of this run.

        Args:
            resume_from_checkpoint: The config key.

        Returns:
            Where to continue from; None for a new run.

        Raises:
            UserError: On every rank: there is nothing at the given path, or nothing that is whole.
        """
        problem: str | None = None
        if self._rank_sync.rank == 0:
            try:
                remove_leftovers(self.folder)
            except OSError as error:
                problem = f"output_dir: cannot clear {self.folder}: {error}"
        self._raise_first(problem)
        found = find_resume_point(resume_from_checkpoint, self.folder, self._rank_sync)
        if self._rank_sync.rank == 0:
            try:
                self._others = not_continued(self.folder, found, restarted=restart_count() > 0)
                if self.folder.is_dir():
                    note_stale(self.folder, self._others)
            except OSError as error:
                problem = f"output_dir: cannot write in {self.folder}: {error}"
        self._raise_first(problem)
        if found is not None and found.manifest is not None:
            self.newest = found.path
        return found

    def load(self, found: ResumePoint, tensors: dict[str, Tensor]) -> None:
        """Read a checkpoint's tensors into `tensors`, in place, on any mesh.

        Args:
            found: Of a training checkpoint.
            tensors: From `TrainingState.tensors` or by its names.

        Raises:
            UserError: Names, shapes or types are not those of the checkpoint.
        """
        load_tensors(found.path, tensors, self._rank_sync)

    def save(
        self,
        state: TrainingState,
        *,
        step: int,
        record: Mapping[str, Any],
        val_loss: float | None = None,
    ) -> None:
        """Save everything at a step boundary; with `asynchronous` returns once it is copied.

        Args:
            state: What to save.
            step: Optimizer steps done; names the folder.
            record: Plain JSON to keep with it.
            val_loss: Of the validation at this step, if there was one.

        Raises:
            UserError: This save, or with `asynchronous` the one before, failed and
                `on_save_error` is `raise`.
        """
        self.wait()
        started = time.monotonic()
        tensors = state.tensors()
        record = {**record, **state.record(), "val_loss": to_plain(val_loss)}
        if self._executor is None:
            try:
                self._write(step, tensors, record, started)
                self.last_saved = step
            except (OSError, RemoteError, UserError) as error:
                self._failed(step, error)
            return
        assert self._stager is not None
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)  # not a promise of one: staging is not asynchronous
        self._pending = (
            step,
            self._executor.submit(self._write, step, staged, record, started),
        )

    @property
    def is_saving(self) -> bool:
        """Whether this rank is writing in the background."""
        return self._pending is not None and not self._pending[1].done()

    def check(self) -> None:
        """Let an error of a finished background save out; does not wait.

        Raises:
            UserError: The save failed and `on_save_error` is `raise`.
        """
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            UserError: It failed and `on_save_error` is `raise`.
        """
        if self._pending is None:
            return
        (step, saved), self._pending = self._pending, None
        try:
            saved.result()
            self.last_saved = step
        except (OSError, RemoteError, UserError) as error:
            self._failed(step, error)

    def close(self) -> None:
        """Wait for the last save and give the group back.

        Raises:
            UserError: The save failed and `on_save_error` is `raise`.
        """
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()
        if self._stager is not None:
            self._stager.close()
        self._rank_sync.close()

    def _write(
        self, step: int, tensors: dict[str, Tensor], record: Mapping[str, Any], started: float
    ) -> None:
        self._set_others_aside(self.folder / f"step_{step}")
        path = write_checkpoint(self.folder, step, tensors, record, self._rank_sync)
        self.newest = path
        _LOG.info("saved %s in %.1f s", path, time.monotonic() - started)
        if self._rank_sync.rank == 0:
            self._prune()

    def _set_others_aside(self, next_one: Path) -> None:
        error: OSError | None = None
        if self._rank_sync.rank == 0 and next_one.exists() and is_misnamed(next_one):
            self._others.append(
                next_one
            )  # renamed while the run continued: it must not be replaced
        if self._others:  # rank 0 only
            try:
                set_aside(self.folder, self._others)
                self._others = []
            except OSError as caught:
                error = caught
        self._rank_sync.raise_together(error)

    def _prune(self) -> None:
        """Delete the checkpoints that are not to be kept; the newest one is complete by now."""
        if self._keep_last_n is None:
            return
        folders = [path for path in list_checkpoints(self.folder) if not is_misnamed(path)]
        kept = set(folders[: self._keep_last_n])
        if self._keep_best:
            losses = {path: loss for path in folders if (loss := _val_loss(path)) is not None}
            # Of equal ones the newest: the list begins with it.
            kept.update(sorted(losses, key=lambda path: losses[path])[:1])
        for path in folders:
            if path not in kept:
                try:
                    remove_checkpoint(path)
                except OSError as error:
                    _LOG.warning("cannot delete the old checkpoint %s: %s", path, error)

    def _failed(self, step: int, error: Exception) -> None:
        what = f"could not save checkpoint step_{step} in {self.folder}: {error}"
        if self._raises:
            raise UserError(f"{what}; on_save_error=continue would continue without it") from error
        # A failure on one rank is one on all, and rank 0 knows its cause: it is said once.
        level = logging.ERROR if self._rank_sync.rank == 0 else logging.DEBUG
        _LOG.log(level, "%s; continuing without it (on_save_error=continue)", what)

    def _raise_first(self, problem: str | None) -> None:
        for note in self._rank_sync.gather(problem):
            if note is not None:
                raise UserError(note)


def _val_loss(path: Path) -> float | None:
    try:
        loss = read_manifest(path).state.get("val_loss")
    except UserError:
        return None  # damaged: not the best of anything
    return loss if isinstance(loss, float) else None
