"""How `tune run` handles a signal: the ranks save and exit, and are killed if they do not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from torchtune_cp.launch.run_folder import ONE_SIGNAL_S, STOP_SIGNALS, RunFolder, is_running

#: What the ranks are sent; the reason is in the run's folder.
_REQUEST = signal.SIGUSR1
#: The ranks exit immediately on this signal; seconds after which one that does not (it was suspended, or its
#: interpreter is stuck) is killed.
_LAST_SECONDS = 3.0


class SignalRelay:
    """The launcher's handlers of SIGTERM, SIGINT and SIGUSR1.

    Attributes:
        ended_by: The signal because of which all ranks were ended, None as long as they were not.
        overdue: Whether that was because they did not leave within the time of grace.
    """

    def __init__(
        self,
        folder: RunFolder,
        grace_s: float,
        end_run: Callable[[signal.Signals], BaseException],
    ) -> None:
        """Keep what is needed to handle a signal.

        Args:
            folder: Where the ranks announce that they can save and leave.
            grace_s: How long they may take for it.
            end_run: Makes the exception that ends the agent, which then sends its processes that signal.
        """
        self.ended_by: signal.Signals | None = None
        self.overdue = False
        self._folder = folder
        self._grace_s = grace_s
        self._end_run = end_run
        self._received_at: float | None = None  # the first signal to this process
        self._asked_at: float | None = None  # the same, or the first one to a rank

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals for the time of the run."""
        before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def tick(self) -> None:
        """End the run when the ranks have taken longer than the time of grace; called ten times a second.

        Raises:
            BaseException: What `end_run` made.
        """
        asked = self._folder.asked()
        if asked is None:
            return
        if self._asked_at is None:
            self._asked_at = (
                time.monotonic()
            )  # a rank was sent the signal itself: all of them leave
        elif time.monotonic() - self._asked_at > self._grace_s:
            self.overdue = True
            self._end_all(asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if self.ended_by is not None:
            return  # already in progress
        if self._received_at is None:
            self._received_at = now
            if not any(is_running(pid) for pid in self._folder.ready()):
                self._end_all(received)  # no rank has anything to save yet
            self._asked_at = self._asked_at or now
            self._folder.ask(received)  # before looking who is there: see StopRequest
            _signal_all(self._folder.ready(), _REQUEST)
            # Not through sys.stderr: the handler may have interrupted a write to it.
            line = (
                f"{received.name}: the ranks save a checkpoint and exit, within"
                f" stop_grace_s={self._grace_s:g}; a second signal kills them immediately\n"
            )
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        elif now - self._received_at > ONE_SIGNAL_S:
            self._end_all(received)

    def _end_all(self, number: signal.Signals) -> NoReturn:
        self.ended_by = number
        self._folder.end()
        ranks = self._folder.ready()
        _signal_all(ranks, _REQUEST)
        deadline = time.monotonic() + _LAST_SECONDS
        while any(is_running(pid) for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        _signal_all([pid for pid in ranks if is_running(pid)], signal.SIGKILL)
        # A rank that is still starting takes SIGUSR1 as it takes SIGTERM; a program of the user's
        # own may have other uses for it.
        raise self._end_run(signal.SIGTERM if number == signal.SIGUSR1 else number)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
