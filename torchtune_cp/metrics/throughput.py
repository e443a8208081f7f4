"""Times optimizer steps."""

import time
from collections.abc import Callable

import torch


class StepTimer:
    """Measures the time of each optimizer step and the tokens it has seen.

    The clock stands still between :meth:`stop` and :meth:`start`, so validation and saving do not
    count.
    """

    def __init__(
        self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Keep the device; nothing runs yet.

        Args:
            device: On a GPU the step ends when the work queued on it is done.
            clock: Gives seconds.
        """
        self._device = torch.device(device)
        self._clock = clock
        self._started: float | None = None
        self._tokens = 0

    def start(self) -> None:
        """Begin a step."""
        self._tokens = 0
        self._started = self._clock()

    def add_tokens(self, count: int) -> None:
        """Count tokens of this step (of all ranks, for a global rate)."""
        self._tokens += count

    def stop(self) -> tuple[float, float]:
        """End the step.

        Returns:
            Seconds, and tokens per second.
        """
        assert self._started is not None, "stop() without start()"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = self._clock() - self._started
        self._started = None
        return seconds, self._tokens / seconds if seconds > 0 else 0.0
