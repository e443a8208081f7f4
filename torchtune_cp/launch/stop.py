"""Turns signals into a request to save and exit, on which all ranks agree at a step boundary.

Schedulers announce the end of a job with a signal (Slurm, Kubernetes: SIGTERM; Slurm's `--signal`:
SIGUSR1; a terminal: SIGINT). The first one is recorded until all ranks are at the same step boundary; the
second ends the process immediately, even while its main thread is blocked in a collective: Python runs a
signal's handler in the main thread only, but the number of the signal reaches another thread immediately
through `signal.set_wakeup_fd`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import weakref
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torchtune_cp.launch.process import end_by_signal
from torchtune_cp.launch.run_folder import ONE_SIGNAL_S, STOP_SIGNALS, RunFolder, is_running

_log = logging.getLogger(__name__)


class StopRequest:
    """The signals that this rank has received, and whether any rank has received one.

    From its construction on signals no longer end the process; `close` gives them back.
    Outside the main thread no handlers can be installed: the other ranks' requests still count.
    """

    def __init__(self) -> None:
        """Handle signals, and notify the launcher that this rank can save and exit."""
        self._asked = 0
        self._first_at: float | None = None
        self._forwarded = False
        self._announced = False
        self._folder = RunFolder.from_environment()
        self._earlier: dict[signal.Signals, Any] = {}
        self._group_on = _device_of_the_flag()
        if threading.current_thread() is threading.main_thread():
            self._listen()

    def agreed(self) -> str | None:
        """Return whether any rank was asked to exit, the same result on all ranks.

        Every rank must call it at the same point of the step: it is one all-reduce of one number over all
        ranks.

        Returns:
            The signal's name, for example `"SIGTERM"`, or None.
        """
        number = self._asked
        if self._group_on is not None:
            flag = torch.tensor([number], dtype=torch.int32, device=self._group_on)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            number = int(flag.item())
        if not number:
            return None
        name = signal.Signals(number).name
        if not self._announced:
            self._announced = True
            _log.warning("%s: saving a checkpoint, then exiting", name)
            if self._folder is not None:
                self._folder.note_asked(number)
        return name

    def close(self) -> None:
        """Give the signals back to whoever had them before; may be called more than once."""
        if not self._earlier:
            return
        if self._folder is not None:
            self._folder.withdraw()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}
        signal.set_wakeup_fd(-1)
        self._writer.close()  # the watcher reads the end of the stream, and ends

    # --- listening -----------------------------------------------------------------------------
    def _listen(self) -> None:
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._earlier[number] = signal.signal(number, _leave_it_to_the_watcher)
            # Calls of the system that a library is in go on: not all of them expect to be cut short.
            signal.siginterrupt(number, False)
        _listening.add(self)
        threading.Thread(
            target=self._watch, args=(reader,), name="stop-request", daemon=True
        ).start()
        if self._folder is None:
            return
        # In this order: the launcher writes its note first and then looks who is there.
        self._folder.announce()
        if self._folder.is_ending():
            end_by_signal(self._folder.asked_by_launcher() or signal.SIGTERM, lost_peer=True)
        asked = self._folder.asked_by_launcher()
        if asked is not None:
            self._asked = asked

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            while received := reader.recv(64):
                for number in received:
                    if number in STOP_SIGNALS:
                        self._heard(signal.Signals(number))

    def _heard(self, number: signal.Signals) -> None:
        folder = self._folder
        if folder is not None:
            if folder.is_ending() or _another_rank_died(folder):
                # Sent by the launcher's agent: no step boundary will come any more.
                end_by_signal(number, lost_peer=True)
            asked = folder.asked_by_launcher()
            if number == signal.SIGUSR1 and asked is not None and not self._forwarded:
                self._forwarded = True  # the launcher passed on what it was sent itself
                self._asked = self._asked or asked
                return
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._asked = self._asked or number
            if folder is not None:
                folder.note_asked(number)
        elif now - self._first_at > ONE_SIGNAL_S:
            end_by_signal(number, lost_peer=False)

    def _forget_in_child(self) -> None:
        # A data-loader worker: it must not report its signals to its parent's watcher. Its parent
        # ends it with SIGTERM; what a terminal or scheduler sends to all processes of a job is for
        # the ranks. What it executes has no handlers at all.
        if self._earlier:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_listening: weakref.WeakSet[StopRequest] = weakref.WeakSet()


def _forget_in_children() -> None:
    for stop in _listening:
        stop._forget_in_child()


os.register_at_fork(after_in_child=_forget_in_children)


def _leave_it_to_the_watcher(number: int, frame: FrameType | None) -> None:
    """Keep the signal from ending the process; its number has been passed to the watcher already."""


def _another_rank_died(folder: RunFolder) -> bool:
    return any(not is_running(pid) for pid in folder.ready() if pid != os.getpid())


def _device_of_the_flag() -> torch.device | None:
    """Return the device of the flag for the all-reduce, None without other ranks.

    On the CPU wherever the group has a backend for it, so that it does not wait for the GPU's work.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if "cpu:" in dist.get_backend_config() or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
