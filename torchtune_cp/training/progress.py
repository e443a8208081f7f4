"""The progress of a run and its length: steps, epochs, and where a checkpoint left them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from torchtune_cp.checkpointing.resume_point import ResumePoint
from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.data import ResumableLoader


@dataclass
class TrainingProgress:
    """Counts a run's optimizer steps; starts at the beginning or where a checkpoint was taken.

    Attributes:
        loader: Knows the place in the data, in samples.
        accumulation: Micro-batches per optimizer step.
        epochs: Of the whole run.
        max_steps_per_epoch: Optimizer steps after which an epoch ends early, or None.
        validate_every: Optimizer steps between two validations, or None.
        step: Optimizer steps done, over all epochs.
        epoch: The epoch that the next step belongs to, from 0 on.
        step_in_epoch: Optimizer steps done in this epoch.
        save_every: Optimizer steps between two checkpoints, or None.
        save_every_epoch: Whether an epoch ends with a checkpoint.
        validated: Whether the validation of this step has been done, before the checkpoint was taken.
        total_steps: Optimizer steps of the whole run.
    """

    loader: ResumableLoader
    accumulation: int
    epochs: int
    max_steps_per_epoch: int | None = None
    validate_every: int | None = None
    save_every: int | None = None
    save_every_epoch: bool = False
    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    validated: bool = False

    @classmethod
    def start(
        cls, cfg: FullFinetuneConfig, loader: ResumableLoader, resumed: ResumePoint | None
    ) -> TrainingProgress:
        """Stand at the beginning of a run, or move the loader and the counts to a saved place.

        The place in the data is kept in samples, so it also holds for another global batch size.
        A place at an epoch's end continues with the next epoch.

        Args:
            cfg: The run's config.
            loader: The training data.
            resumed: A checkpoint whose state holds `record`, or nothing, or weights alone.

        Raises:
            UserError: The data is not that of the checkpoint.
        """
        position = cls(
            loader=loader,
            accumulation=cfg.gradient_accumulation_steps,
            epochs=cfg.epochs,
            max_steps_per_epoch=cfg.max_steps_per_epoch,
            validate_every=cfg.run_val_every_n_steps,
            save_every=cfg.save_every_n_steps,
            save_every_epoch=cfg.save_every_epoch,
        )
        saved = None if resumed is None else resumed.state
        if saved is not None:
            loader.load_state_dict(dict(saved["loader"]))
            position.step = saved["step"]
            position.epoch = loader.epoch
            if loader.epoch == saved["epoch"]:
                position.step_in_epoch = saved["step_in_epoch"]
            position.validated = saved["val_loss"] is not None
            if position._steps_left_in_epoch() == 0:
                position._next_epoch()
        loader.set_epoch(position.epoch)
        position.total_steps = position.step + position.steps_left()
        return position

    def __post_init__(self) -> None:
        self.total_steps = self.steps_left()
        self._ends_epoch_at = 0

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of this; plain numbers."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "total_steps": self.total_steps,
            "global_batch_size": self.global_batch_size,
            "loader": self.loader.state_dict(),
        }

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks and micro-batches."""
        return self.loader.global_sampler.global_batch_size * self.accumulation

    @property
    def epoch_ends(self) -> bool:
        """Whether the step just done was its epoch's last."""
        return self.step_in_epoch == self._ends_epoch_at

    @property
    def validation_due(self) -> bool:
        """Whether to validate here: before the first step, after the last, and at the configured interval."""
        if self.step in (0, self.total_steps):
            return True
        return self.validate_every is not None and self.step % self.validate_every == 0

    @property
    def save_due(self) -> bool:
        """Whether to save a checkpoint after the step just done."""
        if self.save_every is not None and self.step % self.save_every == 0:
            return True
        return self.save_every_epoch and self.epoch_ends

    def steps_left(self) -> int:
        """Optimizer steps from here to the end of the run."""
        if self.epoch >= self.epochs:
            return 0
        whole = self._limited(-(-len(self.loader) // self.accumulation))
        return self._steps_left_in_epoch() + (self.epochs - self.epoch - 1) * whole

    def rest_of_epoch(self, epoch: int) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the micro-batches of each optimizer step that an epoch still has.

        Args:
            epoch: Its number: this one, or the next.
        """
        if epoch != self.epoch:
            self._next_epoch()
        assert epoch == self.epoch, (epoch, self.epoch)
        self.loader.set_epoch(epoch)
        left = self._steps_left_in_epoch()
        self._ends_epoch_at = self.step_in_epoch + left
        return islice(_micro_batches(self.loader, self.accumulation), left)

    def advance(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.step_in_epoch += 1
        self.validated = False

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.step_in_epoch = 0

    def _limited(self, steps: int, done: int = 0) -> int:
        if self.max_steps_per_epoch is None:
            return steps
        return max(0, min(steps, self.max_steps_per_epoch - done))

    def _steps_left_in_epoch(self) -> int:
        steps = -(-self.loader.steps_left // self.accumulation)
        return self._limited(steps, self.step_in_epoch)


def _micro_batches(
    loader: Iterable[dict[str, Tensor]], count: int
) -> Iterator[list[dict[str, Tensor]]]:
    """Group a loader's batches into optimizer steps.

    All micro-batches of a step are read before its first forward pass: the number of label tokens in
    the global step is the denominator of every one of them.

    Args:
        loader: Yields batches (token ids: small).
        count: Micro-batches per step. A last, incomplete group is yielded too.
    """
    iterator = iter(loader)
    while group := list(islice(iterator, count)):
        yield group
