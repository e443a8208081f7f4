"""One run, one folder: a lock in `output_dir` that ends with the process that holds it.

The process that writes for all ranks (rank 0) holds it. The kernel's lock on the file ends with that
process in any case, on NFS too; but some file systems have no such locks, or none that reach another
node, and between two starts of torch's elastic agent no rank exists to hold one. So the file also records
who holds it, and its time is renewed every few seconds. A process of this host is identified by its id and
start time. One of another host cannot be: it counts as running as long as its file is renewed, and after some
time without that it counts as ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtune_cp.errors import ConfigError
from torchtune_cp.launch.run_folder import is_running

LOCK_NAME = ".run.lock"

#: Seconds between two renewals, and those without one after which a process of another host counts as ended.
_RENEWED_EVERY_S = 5.0
_PATIENCE_S = 45.0
_LONGEST_RECORD = 4096
# What file systems answer that have no locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class Owner:
    """Who writes, or wrote, into a folder.

    Attributes:
        host: Its host's name.
        namespace: Tells apart containers that share a name: process ids mean nothing in another one.
        pid: The process that writes.
        started: When it started, in the kernel's count; None where that is not known.
        launcher: The process that started it and would start it again; None without one.
        launcher_started: When that one started.
        job: torchrun's `--rdzv-id`, the same on all nodes of a run; None without torchrun.
        ended: Whether it has recorded its end.
    """

    host: str
    namespace: str
    pid: int
    started: int | None = None
    launcher: int | None = None
    launcher_started: int | None = None
    job: str | None = None
    ended: bool = False

    @classmethod
    def here(cls, launcher: int | None = None) -> Owner:
        """Describe this process.

        Args:
            launcher: The process that started it and would start it again.
        """
        return cls(
            host=socket.gethostname(),
            namespace=_namespace(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            launcher=launcher,
            launcher_started=None if launcher is None else _start_of(launcher),
            job=os.environ.get("TORCHELASTIC_RUN_ID"),
        )

    def is_near(self, other: Owner) -> bool:
        """Whether the other one's process ids can be looked up where this one runs."""
        return (self.host, self.namespace) == (other.host, other.namespace)

    def is_same_run(self, other: Owner) -> bool:
        """Whether both were started by one launcher, one after the other."""
        return (
            self.launcher is not None
            and self.is_near(other)
            and (self.launcher, self.launcher_started) == (other.launcher, other.launcher_started)
        )

    def is_alive(self) -> bool:
        """Whether it, or the launcher that would start it again, runs; for one of this host."""
        return _runs(self.pid, self.started) or (
            self.launcher is not None and _runs(self.launcher, self.launcher_started)
        )

    def __str__(self) -> str:
        """Name its processes and its host."""
        if self.launcher is None:
            return f"process {self.pid} on host {self.host}"
        return f"process {self.launcher} (its rank 0: {self.pid}) on host {self.host}"


class OutputLock:
    """The lock of one folder, not taken yet.

    Attributes:
        last: Who held it before; None without an earlier holder.
        taken: Whether this process has it.
    """

    def __init__(self, folder: Path) -> None:
        """Open (and make, if need be) the lock's file.

        Args:
            folder: An existing folder.

        Raises:
            ConfigError: The file is of another kind.
            OSError: It cannot be made or opened.
        """
        self._folder = folder
        self._path = folder / LOCK_NAME
        self.last: Owner | None = None
        self.taken = False
        self._done = threading.Event()
        self._me: Owner | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise ConfigError(f"output_dir: {self._path} is not a regular file; move it away")

    def take(self, me: Owner, *, let_pass: str | None = None) -> None:
        """Take the lock, waiting for those that are about to end.

        Args:
            me: This process.
            let_pass: A `Owner.job` of several nodes that this process belongs to: a lock that is
                held for it is in order, and is not taken.

        Raises:
            ConfigError: Another run uses the folder; the message names the run and what to do.
        """
        began, first_sign, warned = time.monotonic(), os.fstat(self._file).st_mtime_ns, False
        while True:
            locked = self._try_lock()
            owner = self._read()
            waited = time.monotonic() - began
            there = owner is not None and not owner.ended and not owner.is_same_run(me)
            if owner is not None and there:
                if let_pass is not None and owner.job == let_pass and not locked:
                    return
                near = owner.is_near(me)
                if owner.is_alive() if near else self._sign() != first_sign:
                    raise self._in_use(str(owner))
                if locked and (near or waited > _PATIENCE_S):
                    break
                if not warned and not near:
                    warned = True
                    print(
                        f"output_dir: {self._folder} was last used by {owner},  which has not released it"
                        f" it ended: waiting {_PATIENCE_S:g} s for a sign of life",
                        file=sys.stderr,
                    )
            elif locked:
                break
            if waited > _PATIENCE_S:
                who = "an unknown process" if owner is None else str(owner)
                raise self._in_use(who, f"; if it has ended, delete {self._path}")
            if locked:  # whoever the folder belongs to may have it meanwhile
                fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(0.1)
        self.last, self.taken = owner, True

    def hold(self, me: Owner) -> None:
        """Say who has the taken lock, and renew that until `release`."""
        assert self.taken
        self._me = me
        self._write(me)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._renew, name="output-lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock and record that: a later start on any host need not wait."""
        if self._file < 0:
            return
        self._done.set()
        ended = self._me or self.last
        if self.taken and ended is not None:
            with contextlib.suppress(OSError):  # the disk is unavailable: the next start waits
                self._write(replace(ended, ended=True))
        self._forget()

    def _forget(self) -> None:
        # In a forked child the parent keeps the lock; the child must not outlive it with the file open.
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def _in_use(self, who: str, hint: str = "") -> ConfigError:
        return ConfigError(
            f"output_dir: {self._folder} is in use by the run of {who}: wait for its end or stop it,"
            f" or give another output_dir{hint}"
        )

    def _sign(self) -> int:
        # Opened again: NFS then asks the server instead of its cache.
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return os.fstat(self._file).st_mtime_ns

    def _read(self) -> Owner | None:
        try:
            owner = Owner(**json.loads(os.pread(self._file, _LONGEST_RECORD, 0)))
        except (ValueError, TypeError, RecursionError):
            return None  # empty, half-written or not ours: the kernel's lock alone decides
        ids = (owner.pid, owner.pid if owner.launcher is None else owner.launcher)
        return owner if all(type(pid) is int and 0 < pid < 2**31 for pid in ids) else None

    def _write(self, owner: Owner) -> None:
        text = (json.dumps(asdict(owner)) + "\n").encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)

    def _renew(self) -> None:
        while not self._done.wait(_RENEWED_EVERY_S):
            with contextlib.suppress(OSError):  # the next renewal may reach the disk again
                os.utime(self._file)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""  # a system without them


def _start_of(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _runs(pid: int, started: int | None) -> bool:
    """Whether that very process runs: ids are given out again."""
    return is_running(pid) and (started is None or _start_of(pid) in (None, started))
