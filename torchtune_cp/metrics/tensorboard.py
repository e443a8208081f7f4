"""Writes TensorBoard event files."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.config.secrets import is_private
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import (
    Scalar,
    loggable_config,
    needs_package,
    refuse_unknown_keys,
    to_number,
    unknown_keys,
)
from torchtune_cp.metrics.run_notes import RunNotes

_NOTE = "tensorboard_folder"


def _check_arguments(arguments: Mapping[str, Any], named: frozenset[str]) -> Iterator[UserError]:
    yield from needs_package("tensorboard")
    yield from unknown_keys(arguments, named)


@checked_by(_check_arguments)
class TensorBoardLogger:
    """Writes scalars to TensorBoard; view them with `tensorboard --logdir <log_dir>`.

    A resumed training run writes to the same folder, and TensorBoard drops events of an earlier start
    beyond the step from which it continues.

    Attributes:
        log_dir: The folder of this run's event file.
    """

    def __init__(
        self,
        log_dir: str | Path,
        organize_logs: bool = True,
        run_notes: RunNotes | None = None,
        **other: object,
    ) -> None:
        """Open the event file.

        Args:
            log_dir: Folder, created if needed.
            organize_logs: Give each run a separate folder below `log_dir`, so that TensorBoard
                shows runs side by side.
            run_notes: Stores the run's folder; passed by the recipe.
            **other: Keys of other loggers, which are ignored.

        Raises:
            UserError: tensorboard is not installed, a key is unknown, or the folder cannot be
                written.
        """
        refuse_unknown_keys("TensorBoardLogger", other, {"log_dir", "organize_logs"})
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "metric_logger: TensorBoardLogger needs the package tensorboard: pip install "
                "tensorboard (or choose StdoutLogger)"
            ) from error
        folder = expand_home(log_dir)
        self.log_dir = folder / f"run_{time.strftime('%Y%m%d-%H%M%S')}" if organize_logs else folder
        # Marks the start: at the second one TensorBoard drops events beyond its step.
        purge_step = None
        if run_notes is not None:
            purge_step = 0 if run_notes.resume_step is None else run_notes.resume_step + 1
        if run_notes is not None and organize_logs:
            earlier = Path(run_notes.get(_NOTE) or "")
            if earlier.parent == folder and earlier.is_dir():
                self.log_dir = earlier
        try:
            self._writer = SummaryWriter(
                log_dir=str(self.log_dir),
                purge_step=purge_step,
            )
        except OSError as error:
            raise UserError(
                f"metric_logger.log_dir: cannot write to {self.log_dir}: {error}"
            ) from error
        if run_notes is not None:
            run_notes.set(_NOTE, str(self.log_dir))

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Write one value."""
        self._writer.add_scalar(name, to_number(data), global_step=step, new_style=True)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Write the values of one step."""
        for name, data in payload.items():
            self.log(name, data, step)

    def log_config(self, config: Any) -> None:
        """Show the resolved config, secrets masked, in TensorBoard's text tab."""
        text = yaml.safe_dump(loggable_config(config), sort_keys=False)
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown's code block
        self._writer.add_text("config", indented, global_step=0)
        self._writer.flush()
        if is_private(text):
            for path in self.log_dir.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
                path.chmod(0o600)

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()
