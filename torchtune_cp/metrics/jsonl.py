"""``metrics.jsonl``: one JSON object a line, the run's own record whatever logger is chosen."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import Scalar, to_number

METRICS_NAME = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, float | int | None]]:
    """Read a metrics file; a last line torn by a crash is left out.

    Args:
        path: The file.
    """
    lines = []
    for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            lines.append(record)
    return lines


class MetricsFile:
    """Appends to ``metrics.jsonl``; every line is complete and on its way to the disk when written.

    NaN and infinity are written as ``null``: JSON has no such numbers.
    """

    def __init__(self, output_dir: str | Path, resume_step: int | None = None) -> None:
        """Start the file anew, or continue it.

        Args:
            output_dir: Folder, made if needed.
            resume_step: None deletes an earlier run's lines; a number keeps those up to this step
                (lines that a crashed run wrote beyond it will be written again).

        Raises:
            UserError: The file cannot be written.
        """
        self.path = Path(output_dir).expanduser() / METRICS_NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = []
            if resume_step is not None and self.path.exists():
                kept = [
                    record
                    for record in read_metrics(self.path)
                    if isinstance(step := record.get("step"), int) and step <= resume_step
                ]
            # A crash here must not lose the lines to keep.
            fresh = self.path.with_name(METRICS_NAME + ".tmp")
            fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
            os.replace(fresh, self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"output_dir: cannot write {self.path}: {error}") from error

    def write(self, record: Mapping[str, Scalar | None]) -> None:
        """Append one line.

        Args:
            record: Field to number, one-element tensor or None; must have ``step``.
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
            peak_memory_bytes: See :func:`torchtune_cp.metrics.memory.peak_memory_bytes`.
            attention_imbalance: Largest over mean attention FLOPs of the ranks; None leaves it out.
            nonfinite_steps: Steps left out so far, if this is one of them: the line's ``loss`` or
                ``grad_norm`` is then ``null``. Other lines do not have the field.
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
        self.write(record)

    def write_validation(self, *, step: int, val_loss: Scalar, val_tokens: int) -> None:
        """Append the line of one validation.

        Args:
            step: Optimizer steps done before it; 0 before the first.
            val_loss: Sum of token losses / number of label tokens, over the validation set.
            val_tokens: Label tokens of the validation set.
        """
        self.write({"step": step, "val_loss": val_loss, "val_tokens": val_tokens})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
