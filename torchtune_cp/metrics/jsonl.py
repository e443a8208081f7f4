"""`metrics.jsonl`: one JSON object per line, the run's own record with every logger."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from torchtune_cp.config.output_dir import METRICS_NAME
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.durable import first_free, whole_file
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import Scalar, to_number
from torchtune_cp.metrics.metrics_lines import copy_lines, read_metrics

__all__ = ["METRICS_NAME", "MetricsFile", "read_metrics", "set_metrics_aside"]

_LOG = logging.getLogger(__name__)


def set_metrics_aside(output_dir: str | Path, why: str) -> Path | None:
    """Rename an existing metrics file that is not empty, to keep it.

    Args:
        output_dir: The run's folder.
        why: Becomes part of the new name.

    Returns:
        Where it is now; None when there was nothing to keep.

    Raises:
        OSError: It cannot be moved.
    """
    path = expand_home(output_dir) / METRICS_NAME
    if not os.path.lexists(path) or (path.is_file() and path.stat().st_size == 0):
        return None
    aside = first_free(lambda number: path.with_name(f"metrics.{why}_{number}.jsonl"))
    path.rename(aside)
    return aside


class MetricsFile:
    """Appends to `metrics.jsonl`; every line is complete and on its way to the disk when written.

    NaN and infinity are written as `null`: JSON has no such numbers.
    """

    def __init__(self, output_dir: str | Path, resume_step: int | None = None) -> None:
        """Replace the file, or continue it.

        Args:
            output_dir: Folder, made if needed.
            resume_step: None replaces an earlier run's lines; a number keeps those up to this step,
                byte for byte (lines that a crashed run wrote beyond it will be written again). A damaged
                file is kept under another name, and one line reports what is lost.

        Raises:
            UserError: The file cannot be written.
        """
        self.path = expand_home(output_dir) / METRICS_NAME
        damage = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A crash here must not lose the lines to keep.
            with whole_file(self.path) as file:
                if resume_step is not None and os.path.lexists(self.path):
                    damage = copy_lines(self.path, file, resume_step)
                    file.flush()  # a full disk shows here, before anything is moved
                if damage is not None:
                    aside = set_metrics_aside(output_dir, "damaged") if damage.leaves_out else None
                    kept = f"; the file as it was is now {aside.name}" if aside else ""
                    _LOG.warning("%s is damaged: %s%s", self.path, damage.description, kept)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"output_dir: cannot write {self.path}: {error}") from error

    def write(self, record: Mapping[str, Scalar | None]) -> None:
        """Append one line.

        Args:
            record: Field to number, one-element tensor or None; must have `step`.
        """
        assert "step" in record, record
        numbers = {name: None if v is None else to_number(v) for name, v in record.items()}
        finite = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in numbers.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def write_step(
        self,
        *,
        step: int,
        epoch: int,
        loss: Scalar,
        grad_norm: Scalar,
        lr: float,
        tokens: int,
        tokens_per_second: float,
        step_time_s: float,
        peak_memory_bytes: int,
        attention_imbalance: float | None = None,
        nonfinite_steps: int | None = None,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Append the line of one optimizer step.

        Args:
            step: Optimizer steps done, from 1 on, over all epochs.
            epoch: Number of the epoch.
            loss: Sum of token losses / number of label tokens, over the global step.
            grad_norm: Norm of all gradients before clipping.
            lr: Learning rate of this step.
            tokens: Label tokens of the global step.
            tokens_per_second: Over all ranks.
            step_time_s: Seconds.
            peak_memory_bytes: See `torchtune_cp.metrics.memory.peak_memory_bytes`.
            attention_imbalance: Largest over mean attention FLOPs of the ranks; None omits it.
            nonfinite_steps: Steps left out so far, if this is one of them: the line's `loss` or
                `grad_norm` is then `null`. Other lines do not have the field.
            extra: Further fields of a recipe's own.
        """
        record: dict[str, Scalar | None] = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "tokens_per_second": tokens_per_second,
            "step_time_s": step_time_s,
            "peak_memory_bytes": peak_memory_bytes,
        }
        if attention_imbalance is not None:
            record["attention_imbalance"] = attention_imbalance
        if nonfinite_steps is not None:
            record["nonfinite_steps"] = nonfinite_steps
        self.write(record | dict(extra or {}))

    def write_validation(
        self,
        *,
        step: int,
        val_loss: Scalar,
        val_tokens: int,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Append the line of one validation.

        Args:
            step: Optimizer steps done before it; 0 before the first.
            val_loss: Sum of token losses / number of label tokens, over the validation set.
            val_tokens: Label tokens of the validation set.
            extra: Further fields of a recipe's own.
        """
        record = {"step": step, "val_loss": val_loss, "val_tokens": val_tokens}
        self.write(record | dict(extra or {}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
