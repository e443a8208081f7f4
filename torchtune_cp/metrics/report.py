"""All reports of a run through one object: metrics file, configured logger, progress display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchtune_cp.metrics.interface import MetricLogger
from torchtune_cp.metrics.jsonl import MetricsFile
from torchtune_cp.metrics.progress import Progress


class RunReport:
    """Reports on rank 0 for all; on every other rank each method does nothing."""

    def __init__(
        self,
        output_dir: str | Path,
        logger: MetricLogger | None,
        total_steps: int,
        *,
        world_size: int,
        enabled: bool,
        log_every_n_steps: int = 1,
        log_memory: bool = False,
        resume_step: int | None = None,
    ) -> None:
        """Open the metrics file and the progress display.

        Args:
            output_dir: Where `metrics.jsonl` is written.
            logger: What the config names, or None.
            total_steps: Optimizer steps of the whole run.
            world_size: Number of processes.
            enabled: True on rank 0 only.
            log_every_n_steps: Interval of logger and progress output; the metrics file
                contains every step.
            log_memory: Whether the logger also gets the memory statistics.
            resume_step: Steps that a continued run has done: the metrics file keeps their lines. None
                replaces it.
        """
        self._file = MetricsFile(output_dir, resume_step) if enabled else None
        self._logger = logger if enabled else None
        self._progress = Progress(
            total_steps, enabled=enabled, initial=resume_step or 0, every=log_every_n_steps
        )
        self._world_size = world_size
        self._every = log_every_n_steps
        self._log_memory = log_memory

    def step(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        seconds: float,
        peak_memory_bytes: int,
        memory: Mapping[str, float],
        attention_imbalance: float | None = None,
        nonfinite_steps: int | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Report an optimizer step.

        Args:
            step: Optimizer steps done, from 1 on.
            epoch: Number of the epoch, from 0 on.
            loss: Mean over the label tokens of the global step, in nats.
            grad_norm: Before clipping.
            lr: Learning rate of this step.
            tokens: Label tokens of the global step.
            seconds: Duration of the step.
            peak_memory_bytes: Of the rank with the most.
            memory: Further memory statistics by name, bytes.
            attention_imbalance: Largest over mean attention FLOPs of the ranks, where it is known.
            nonfinite_steps: Steps left out so far because their loss or gradient was not finite, if
                this is one of them.
            extra: Further numbers of a recipe's own, by name.
        """
        if self._file is None:
            return
        rate = tokens / seconds
        self._file.write_step(
            step=step,
            epoch=epoch,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_second=rate,
            step_time_s=seconds,
            peak_memory_bytes=peak_memory_bytes,
            attention_imbalance=attention_imbalance,
            nonfinite_steps=nonfinite_steps,
            extra=extra,
        )
        self._progress.update(step, loss, rate)
        if self._logger is not None and (step % self._every == 0 or nonfinite_steps is not None):
            payload = {
                "loss": loss,
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": tokens,
                "tokens_per_second": rate,
                "tokens_per_second_per_gpu": rate / self._world_size,
                "step_time_s": seconds,
                "peak_memory_bytes": peak_memory_bytes,
            }
            payload.update(extra or {})
            if attention_imbalance is not None:
                payload["attention_imbalance"] = attention_imbalance
            if nonfinite_steps is not None:
                payload["nonfinite_steps"] = nonfinite_steps
            self._logger.log_dict(payload | dict(memory if self._log_memory else {}), step)

    def validation(
        self, *, step: int, loss: float, tokens: int, extra: Mapping[str, float] | None = None
    ) -> None:
        """Report a validation.

        Args:
            step: Optimizer steps done before it.
            loss: Mean over the label tokens of the validation set, in nats.
            tokens: Their number.
            extra: Further numbers of a recipe's own, by name.
        """
        if self._file is None:
            return
        self._progress.note(f"validation after {step} steps: loss {loss:.4f} on {tokens} tokens")
        self._file.write_validation(step=step, val_loss=loss, val_tokens=tokens, extra=extra)
        if self._logger is not None:
            numbers = {"val_loss": loss, "val_tokens": tokens} | dict(extra or {})
            self._logger.log_dict(numbers, step)

    def close(self) -> None:
        """Finish the files and the display."""
        self._progress.close()
        if self._file is not None:
            self._file.close()
        if self._logger is not None:
            self._logger.close()
