"""Components that a test's config names: they stop, fail or dawdle at a known place of a real run.

Every rank leaves a small file when it reads a sample or writes a checkpoint, so that a test knows
where the run is, and waits there for the file ``go``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torchtune_cp.checkpointing import training_state_store

#: Seconds after which a rank goes on without ``go``.
LONGEST_WAIT_S = 60


def mark(folder: Path, name: str) -> None:
    """Leave the file ``name.RANK.START`` (0 for a first start, 1 after a restart, ...)."""
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    (folder / f"{name}.{os.environ.get('RANK', '0')}.{start}").write_text(str(os.getpid()))


def wait_for_go(folder: Path) -> None:
    """Wait for the file ``go``."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("row 3 is malformed")
    if how == "memory":
        raise MemoryError("the host has no memory left")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "suspend":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "loop":
        pass


class _Samples:
    def __init__(self, folder: Path, name: str, wait_at: int | None, fail_at: int | None, how: str):
        self.vocab = 200
        self.folder, self.name, self.wait_at = folder, name, wait_at
        self.fail_at, self.how = fail_at, how

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        mark(self.folder, f"{self.name}{index}")
        if index == self.wait_at:
            wait_for_go(self.folder)
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if index == self.fail_at and os.environ.get("RANK") == "1" and first_start:
            _fail(self.how)
        tokens = [(7 * index + 3 * i) % self.vocab for i in range(24)]
        return {"tokens": tokens, "labels": tokens}


def samples(
    tokenizer: Any,
    *,
    folder: str,
    name: str = "train",
    wait_at: int | None = None,
    fail_at: int | None = None,
    how: str = "",
    slow_save: bool = False,
    vocab: int = 200,
) -> _Samples:
    """Six samples of 24 tokens, in this order: with ``batch_size: 1`` step ``n`` reads sample ``n - 1``.

    Args:
        tokenizer: Not used.
        folder: Where the files lie by which the test follows the run.
        name: Of the files that are left when a sample is read.
        wait_at: The sample at which every rank waits for ``go``.
        fail_at: The sample at which rank 1 fails, in its first start.
        how: ``raise``, ``memory``, ``kill``, ``suspend`` or ``loop``.
        slow_save: Let every write of a checkpoint leave the file ``save`` and wait for ``go``.
        vocab: Tokens are below it.
    """
    where = Path(folder)
    if slow_save:
        complete = training_state_store._complete

        def slowly(*args: Any, **kwargs: Any) -> Any:
            mark(where, "save")
            wait_for_go(where)
            return complete(*args, **kwargs)

        training_state_store._complete = slowly
    made = _Samples(where, name, wait_at, fail_at, how)
    made.vocab = vocab
    return made
