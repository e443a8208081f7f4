"""Times optimizer steps."""

import time
from collections.abc import Callable

import torch


class StepTimer:
    """Measures the time of each optimizer step.

    The clock is stopped between `stop` and `start`, so validation and saving do not
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

    def start(self) -> None:
        """Begin a step."""
        self._started = self._clock()

    def stop(self) -> float:
        """End the step; returns its seconds."""
        assert self._started is not None, "stop() without start()"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = self._clock() - self._started
        self._started = None
        return seconds
