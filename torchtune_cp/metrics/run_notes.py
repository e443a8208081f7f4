"""What a logger stores about its run, so that a resumed run continues the same one."""

import json
import logging
from pathlib import Path

from torchtune_cp.config.output_dir import NOTES_NAME
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.durable import write_text
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.jsonl import METRICS_NAME, read_metrics

_LOG = logging.getLogger(__name__)


class RunNotes:
    """Notes of loggers in `output_dir/logger_run.json`: one string under each name.

    A logger whose constructor has a parameter `run_notes` is given them.

    Attributes:
        resume_step: Optimizer steps done, in a run that continues; None in a new one.
        logged_step: The last step that an earlier start of this run has reported, at or beyond
            `resume_step`; None in a new run.
    """

    def __init__(self, output_dir: str | Path, resume_step: int | None = None) -> None:
        """Read what there is; call it before the metrics file is opened, which cuts that file.

        Args:
            output_dir: The run's folder.
            resume_step: None forgets the notes of an earlier run.
        """
        folder = expand_home(output_dir)
        self.resume_step = resume_step
        self.logged_step: int | None = None
        self._path = folder / NOTES_NAME
        self._notes: dict[str, str] = {}
        if resume_step is None:
            return
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._notes = {str(name): str(note) for name, note in found.items()}
        except FileNotFoundError:
            self._notes = {}
        except (OSError, ValueError, AttributeError, RecursionError):
            _LOG.warning("%s is damaged: the loggers do not continue their runs", self._path)
        metrics = folder / METRICS_NAME
        lines = read_metrics(metrics) if metrics.is_file() else []
        steps = [line["step"] for line in lines if "loss" in line]
        self.logged_step = max([resume_step, *steps])

    def get(self, name: str) -> str | None:
        """Return a note of the run that is continued, None when there is none."""
        return self._notes.get(name)

    def set(self, name: str, note: str) -> None:
        """Keep a note for a later start.

        Raises:
            UserError: The file cannot be written.
        """
        self._notes[name] = note
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(self._notes) + "\n")
        except OSError as error:
            raise UserError(f"output_dir: cannot write {self._path}: {error}") from error
