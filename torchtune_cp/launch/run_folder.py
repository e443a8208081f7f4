"""Files through which `tune run` and the ranks of its node communicate during a run.

A signal carries only a number, without sender or reason. The rest is in small files in a folder of the run,
whose path the ranks inherit in an environment variable.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import stat
import tempfile
from pathlib import Path

from torchtune_cp.durable import write_text

#: Set by `tune run` for its workers: the folder with the notes of this run.
RUN_FOLDER_VARIABLE = "TUNE_RUN_FOLDER"

#: The signals that ask a run to save and leave.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
#: A scheduler may signal a process once by its id and once as one of its group: seconds within which
#: that counts as one signal.
ONE_SIGNAL_S = 0.2

_PREFIX = "tune_run_"
#: The owner is part of the name, so that a folder always has one.
_WITH_OWNER = re.compile(
    rf"{_PREFIX}[0-9a-f]{{16}}_(?P<pid>[0-9]+)_(?P<began>[0-9]+)_[a-z0-9_]{{8}}"
)

_ASKED_BY_LAUNCHER = "asked_by_launcher"
_ENDING = "ending"


class RunFolder:
    """The folder of one run on one node.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use the folder at `path`."""
        self.path = Path(path)

    @classmethod
    def create(cls) -> RunFolder:
        """Make a new one, readable by this user alone, and remove those that killed launchers left."""
        prefix, namespace = _PREFIX, _namespace()
        if namespace is not None:
            _remove_those_of_the_dead(namespace)
            prefix = f"{_PREFIX}{namespace}_{os.getpid()}_{_began(os.getpid())}_"
        return cls(tempfile.mkdtemp(prefix=prefix))

    @classmethod
    def from_environment(cls) -> RunFolder | None:
        """Return the one of the launcher that started this process; None without a launcher."""
        path = os.environ.get(RUN_FOLDER_VARIABLE)
        return None if path is None or not os.path.isdir(path) else cls(path)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    # --- what the launcher writes --------------------------------------------------------------
    def ask(self, number: int) -> None:
        """Note that the launcher asks all ranks to save and leave, because of this signal."""
        self._write(_ASKED_BY_LAUNCHER, str(int(number)))

    def end(self) -> None:
        """Note that all ranks end immediately: from now on any signal means that."""
        self._write(_ENDING, "")

    def forget_ranks(self) -> None:
        """Remove the notes of ended ranks and the request to end, before others start."""
        for kind in ("ready", "asked", "stopped"):
            for note in self.path.glob(f"{kind}.*"):
                note.unlink(missing_ok=True)
        (self.path / _ENDING).unlink(missing_ok=True)

    # --- what the ranks write ------------------------------------------------------------------
    def announce(self) -> None:
        """Note that this process takes SIGTERM, SIGINT and SIGUSR1 as a request to save and leave."""
        self._write(f"ready.{os.getpid()}", "")

    def withdraw(self) -> None:
        """Take `announce` back: this process has finished."""
        (self.path / f"ready.{os.getpid()}").unlink(missing_ok=True)

    def note_asked(self, number: int) -> None:
        """Note that this process was sent a signal by a process other than the launcher."""
        self._write(f"asked.{os.getpid()}", str(int(number)))

    def note_stopped(self, line: str) -> None:
        """Note that this process left as asked, after a complete save; `line` is for the user."""
        self._write(f"stopped.{os.getpid()}", line)

    # --- what both read ------------------------------------------------------------------------
    def asked_by_launcher(self) -> signal.Signals | None:
        """Return the signal because of which the launcher asks the ranks to leave."""
        text = self._read(_ASKED_BY_LAUNCHER)
        return None if text is None else signal.Signals(int(text))

    def asked(self) -> signal.Signals | None:
        """Return the signal that the launcher or a rank of this node was sent, if any."""
        found = self.asked_by_launcher()
        texts = (self._read(note.name) for note in sorted(self.path.glob("asked.*")))
        return found or next((signal.Signals(int(text)) for text in texts if text), None)

    def is_ending(self) -> bool:
        """Whether all ranks are to end immediately."""
        return (self.path / _ENDING).exists()

    def ready(self) -> list[int]:
        """Return the process ids that announced themselves and did not withdraw, running or not."""
        return [int(note.suffix[1:]) for note in sorted(self.path.glob("ready.*"))]

    def stopped(self) -> str | None:
        """Return the line of a rank that left after a complete save, if any did."""
        lines = (self._read(note.name) for note in sorted(self.path.glob("stopped.*")))
        return next((line for line in lines if line), None)

    def _write(self, name: str, text: str) -> None:
        try:
            # Of use while the launcher lives only: no wait for a disk that checkpoints keep busy.
            write_text(self.path / name, text, synced=False)
        except FileNotFoundError:
            # The launcher has exited and removed the folder: no process is left to read the note.
            return

    def _read(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


def _namespace() -> str | None:
    """Name what process ids count in: this machine since its start, and the namespace.

    None on a system without `/proc`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:16]


def _began(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; None if it has ended.

    Raises:
        OSError: It cannot be determined.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = status.rpartition(")")[2].split()
    return None if state in ("Z", "X") else fields[18]


def _remove_those_of_the_dead(namespace: str) -> None:
    """Remove this user's folders whose launcher, of this machine and namespace, has certainly exited."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{namespace}_*"):
        match = _WITH_OWNER.fullmatch(folder.name)
        try:
            info = folder.lstat()
            exited = match is not None and _began(int(match["pid"])) != match["began"]
        except OSError:
            continue  # another launcher removes it too, or it cannot be determined
        if exited and stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)


def is_running(pid: int) -> bool:
    """Say whether a process runs; one that has ended and was not collected yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        # It ended just now, or this system has no /proc and the signal's word counts.
        return not os.path.isdir("/proc/self")
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
