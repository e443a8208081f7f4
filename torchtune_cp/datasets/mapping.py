"""Rows through `datasets.Dataset.map`: batches of them, in several processes, with a bar."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchtune_cp.datasets.source import Rows, quiet
from torchtune_cp.datasets.token_table import SCHEMA, Outcome, Transform, outcome_at, table_of
from torchtune_cp.distributed.process_group import is_rank_zero
from torchtune_cp.errors import UserError
from torchtune_cp.launch.process import usable_cores

logger = logging.getLogger(__name__)

#: Starting a process takes as long as so many rows, or bytes of rows.
_ROWS_A_PROCESS = 2000
_BYTES_A_PROCESS = 4 << 20
#: At most so many rows, and about so many bytes, are held at a time by each process.
_ROWS_A_BATCH = 1000
_BYTES_A_BATCH = 8 << 20

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
#: The thread that has processes start, and the one that starts one.
_mapping_thread: int | None = None
_forking_thread: int | None = None


class _OutcomesOfBatch:
    """What `map` calls with some rows; pickled for the processes."""

    def __init__(self, transform: Transform, rows: Rows | None, name: str) -> None:
        # None: the batch holds the rows themselves; else their places in `rows`.
        self._transform = transform
        self._rows = rows
        self._name = name

    def __call__(self, batch: Mapping[str, Sequence[Any]], places: Sequence[int]) -> pa.Table:
        return table_of(self._outcomes(batch, places))

    def _outcomes(
        self, batch: Mapping[str, Sequence[Any]], places: Sequence[int]
    ) -> Iterator[Outcome]:
        rows: Iterator[Any] = zip(*batch.values(), strict=True)
        for place, values in zip(places, rows, strict=True):
            try:
                if self._rows is not None:
                    yield outcome_at(self._rows, values[0], self._transform)
                else:
                    yield self._transform(dict(zip(batch, values, strict=True)))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"row {place} of {self._name}: {what}") from error


def map_rows(
    rows: Rows,
    transform: Transform,
    *,
    begin: int,
    end: int,
    name: str,
    num_proc: int | None,
    nbytes: int,
    file: Path,
    fingerprint: str,
) -> None:
    """Write the outcomes of rows to disk, in their order whatever the number of processes.

    Args:
        rows: The data.
        transform: Makes the outcome of a row.
        begin: The first row.
        end: Behind the last row.
        name: What messages call the data.
        num_proc: The most processes; None = one a core.
        nbytes: About how many bytes the rows have.
        file: Where to write; several processes put their numbers into the name.
        fingerprint: Of the outcomes, for the library.

    Raises:
        UserError: A process died.
        OSError: The file cannot be written.
    """
    import datasets

    count = end - begin
    processes = processes_for(count, nbytes, num_proc)
    if isinstance(rows, datasets.Dataset):
        table = rows.select(range(begin, end))
        function = _OutcomesOfBatch(transform, None, name)
    else:
        table = datasets.Dataset.from_dict({"row": np.arange(begin, end)})
        function = _OutcomesOfBatch(transform, rows, name)
    batch_size = max(1, min(_ROWS_A_BATCH, _BYTES_A_BATCH * count // max(1, nbytes)))
    # Not on a terminal a bar is a line of control characters: there, two lines tell.
    bar = is_rank_zero() and sys.stderr.isatty()
    logger.info("tokenising %s: %d rows, %d processes", name, count, processes)
    start = time.monotonic()
    try:
        with nullcontext() if bar else quiet(), _own_environment(), _children_die_with_us():
            table.map(
                function,
                with_indices=True,
                batched=True,
                batch_size=batch_size,
                writer_batch_size=batch_size,
                remove_columns=table.column_names,
                features=datasets.Features.from_arrow_schema(SCHEMA),
                num_proc=processes if processes > 1 else None,
                cache_file_name=str(file),
                load_from_cache_file=False,
                new_fingerprint=fingerprint,
                desc=f"tokenising {name}",
            )
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise UserError(
            f"a process that tokenised {name} was killed, maybe for want of memory; dataset.num_proc "
            f"sets how many there are (now {processes})"
        ) from error
    took = time.monotonic() - start
    logger.info("tokenised %s in %.0f s (%.0f rows/s)", name, took, count / max(took, 1e-9))


def processes_for(rows: int, nbytes: int, num_proc: int | None) -> int:
    """How many processes are worth their start, at most `num_proc`, or one a core."""
    worth = max(rows // _ROWS_A_PROCESS, nbytes // _BYTES_A_PROCESS)
    return max(1, min(usable_cores() if num_proc is None else num_proc, worth, rows))


@contextmanager
def _own_environment() -> Iterator[None]:
    """`map` leaves another `os.environ` behind, and switches the tokenizers' threads off."""
    environment, name = os.environ, "TOKENIZERS_PARALLELISM"
    threads = environment.get(name)
    try:
        yield
    finally:
        os.environ = environment  # noqa: B003  (the object that was there)
        if threads is None:
            environment.pop(name, None)
        else:
            environment[name] = threads


@contextmanager
def _children_die_with_us() -> Iterator[None]:
    """Processes that are started here end when this one does, and by the signals that end any."""
    global _mapping_thread
    _mapping_thread = threading.get_ident()
    try:
        yield
    finally:
        _mapping_thread = None


def _before_a_new_process() -> None:
    global _forking_thread
    _forking_thread = threading.get_ident()


def _in_a_new_process() -> None:
    if _mapping_thread is None:
        return
    # A rank's own handlers would make a request to save of the signal that ends a process.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    # The kernel means the thread, not the process: what takes a killed process's place is started by
    # another, which ends earlier, and would be killed with a lock in its hands.
    if _LIBC is not None and _forking_thread == _mapping_thread:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_a_new_process, after_in_child=_in_a_new_process)
