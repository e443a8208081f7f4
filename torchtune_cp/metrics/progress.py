"""Shows the progress of a run on rank 0: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Progress of a run with loss, tokens/s and time left.

    On a terminal it is one tqdm bar; a log file or pipe gets one whole line per shown step instead
    of control characters.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        enabled: bool = True,
        initial: int = 0,
        every: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the display.

        Args:
            total_steps: Optimizer steps of the whole run.
            enabled: False on every rank but 0: then nothing is ever printed.
            initial: Steps done before this start.
            every: Without a terminal, print every `every` steps and the last one.
            stream: Where to; default standard error.
            clock: Gives seconds; for tests.
        """
        self._total = total_steps
        self._initial = initial
        self._done = initial
        self._every = max(1, every)
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._enabled = enabled
        self._bar: tqdm | None = None
        if enabled and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=initial,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
            )

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show one more optimizer step.

        Args:
            step: Optimizer steps done, over all epochs.
            loss: Its loss.
            tokens_per_second: Over all ranks.
        """
        if not self._enabled:
            return
        advance, self._done = step - self._done, step
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False
            )
            self._bar.update(advance)
        elif step % self._every == 0 or step >= self._total:
            passed = self._clock() - self._start
            left = passed / max(1, step - self._initial) * max(0, self._total - step)
            self._print(
                f"step {step}/{self._total}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  "
                f"elapsed {_duration(passed)}  left {_duration(left)}"
            )

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the display; the bar stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
