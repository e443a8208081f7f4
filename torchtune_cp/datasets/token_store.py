"""The outcomes of all rows of a dataset, made by several processes once and read from disk by every rank.

The samples of a run can be laid out only when the length of every row is known, so all of them are
tokenised before the first step, by `datasets.Dataset.map`. The tokens are kept: files that are mapped
into memory cost 4 bytes a token on disk, are shared by the ranks of a node, and are there at the next
start. Few rows are quicker made than looked up: each process makes them for itself, in memory.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock, Timeout

from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.datasets.fingerprint import fingerprint
from torchtune_cp.datasets.mapping import map_rows
from torchtune_cp.datasets.source import Rows
from torchtune_cp.datasets.token_table import (
    MALFORMED,
    Outcome,
    TokenTable,
    Transform,
    map_files,
    outcome_at,
    table_of,
)
from torchtune_cp.durable import (
    REPLACED_SUFFIX,
    TEMPORARY_SUFFIX,
    hidden_name,
    rename_into_place,
)
from torchtune_cp.errors import UserError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TUNE_CACHE_DIR"

#: Raise it when the files change; old folders are then not looked at any more.
FORMAT = 3
#: Rows and bytes below both of which every process makes the tokens for itself, in memory.
FEW_ROWS = 4000
FEW_BYTES = 8 << 20
#: Rows that are tried before any process is started: a wrong column shows in all of them.
_TRIED_FIRST = 100
#: How long other ranks of a node leave it to the first one to begin, whose log lines and bar are seen.
_HEAD_START_S = 5.0
_META = "meta.json"
_CHUNK = 1 << 24  # bytes, for checksums


class DamagedStore(Exception):
    """The files of a store are not what was written."""


@dataclass(frozen=True)
class Job:
    """Rows, and what is to be made of them.

    Attributes:
        rows: The data.
        transform: Makes the outcome of a row.
        content: All that the outcomes depend on besides the rows and the code, for `fingerprint`; None =
            nothing is kept, and all is done in this process.
        name: What messages call the data.
        num_proc: The most processes; None = one a core.
        refuse: Called with the place and outcome of the first rows before any process is started; raises
            for one that ends the run.
    """

    rows: Rows
    transform: Transform
    content: Any
    name: str
    num_proc: int | None = None
    refuse: Callable[[int, Outcome], None] | None = None

    def few(self, begin: int, end: int) -> bool:
        """Whether so many rows need neither processes nor a cache."""
        return end - begin < FEW_ROWS and bytes_of(self.rows, begin, end) < FEW_BYTES

    def key(self, begin: int, end: int) -> str | None:
        """Names the content of some of the outcomes; None when it cannot be told."""
        if self.content is None:
            return None
        try:
            return fingerprint([self.rows, begin, end, self.content])
        except TypeError as error:
            logger.info("%s: tokens are not kept for the next start: %s", self.name, error)
            return None


def cache_dir() -> Path:
    """`TUNE_CACHE_DIR`, or `torchtune_cp` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return expand_home(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchtune_cp"


def bytes_of(rows: Rows, begin: int, end: int) -> int:
    """About how many bytes some rows have; 0 where it cannot be told without reading them."""
    table = getattr(rows, "data", None)  # of a `datasets.Dataset`
    size = getattr(rows if table is None else table, "nbytes", 0)
    return int(size * (end - begin) / max(1, len(rows if table is None else table)))


def stored_tokens(job: Job, begin: int, end: int) -> TokenTable:
    """The outcomes of rows: from the cache, or made by one rank's processes while the others wait.

    The first process that comes holds a lock on a file while it works, so the ranks of a run, and runs
    that start together, do the work once. Nobody waits in a collective, so no time-out can end it, and
    the lock of a process that dies is free at once.

    Args:
        job: What to make.
        begin: The first row.
        end: Behind the last row.

    Raises:
        UserError: One of the first rows is refused, the cache is full, or a process died.
    """
    key = None if job.few(begin, end) else job.key(begin, end)
    if key is None:
        return _in_memory(job, begin, end)
    root = cache_dir() / "tokens"
    target = root / key
    store = _from_cache(target)
    if store is not None:
        return store
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = root / f"{key}.lock"
        _leave_it_to_the_first_rank(file, target)
        lock = FileLock(file)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("another process tokenises %s; waiting for it", job.name)
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        logger.warning(
            "%s: the tokens cannot be kept in %s (%s); every process makes its own, in memory "
            "(%s chooses another folder)",
            *(job.name, root, error, CACHE_VARIABLE),
        )
        return _in_memory(job, begin, end)
    try:
        store = _from_cache(target, damaged_is_removed=True)
        for left in root.glob(f".{key}.*{TEMPORARY_SUFFIX}"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        if store is None:
            _make(job, begin, end, target)
            store = _map(target)
        return store
    except OSError as error:
        raise UserError(
            f"the tokens of {job.name} cannot be kept in {root}: {error}; make room there or name "
            f"another folder in {CACHE_VARIABLE}"
        ) from error
    finally:
        lock.release()


def _leave_it_to_the_first_rank(lock: Path, target: Path) -> None:
    """Return when somebody has begun, or nobody has for a while: the first rank may not read at all."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return
    give_up = time.monotonic() + _HEAD_START_S
    while not (lock.exists() or target.exists()) and time.monotonic() < give_up:
        time.sleep(0.05)


def _from_cache(target: Path, damaged_is_removed: bool = False) -> TokenTable | None:
    if not target.is_dir():
        return None
    try:
        _verify(target)
        return _map(target)
    except (DamagedStore, pa.ArrowException) as error:
        if damaged_is_removed:
            logger.warning("%s is damaged (%s) and is made again", target, error)
            shutil.rmtree(target)
        return None


def _make(job: Job, begin: int, end: int, target: Path) -> None:
    """Write the files into a folder beside `target` and give it that name when it is complete."""
    if job.refuse is not None and begin == 0:
        tried = _outcomes(job, begin, min(begin + _TRIED_FIRST, end))
        for place, outcome in enumerate(tried, begin):
            job.refuse(place, outcome)
    scratch = hidden_name(target, TEMPORARY_SUFFIX)
    scratch.mkdir()
    try:
        map_rows(
            job.rows,
            job.transform,
            begin=begin,
            end=end,
            name=job.name,
            num_proc=job.num_proc,
            nbytes=bytes_of(job.rows, begin, end),
            file=scratch / "rows.arrow",
            fingerprint=target.name,
        )
        meta = {
            "format": FORMAT,
            "files": {f.name: [f.stat().st_size, _checksum(f)] for f in sorted(scratch.iterdir())},
        }
        (scratch / _META).write_text(json.dumps(meta), encoding="utf-8")
        rename_into_place(scratch, target, hidden_name(target, REPLACED_SUFFIX))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _in_memory(job: Job, begin: int, end: int) -> TokenTable:
    outcomes = _outcomes(job, begin, end)
    tables = []
    while chunk := list(islice(outcomes, 1000)):
        tables.append(table_of(chunk))
    return TokenTable(tables or [table_of([])])


def _outcomes(job: Job, begin: int, end: int) -> Iterator[Outcome]:
    if not isinstance(job.rows, Iterable):
        yield from (outcome_at(job.rows, place, job.transform) for place in range(begin, end))
        return
    in_order = iter(job.rows)  # tables iterate far faster than they index
    for place in range(end):
        try:
            row = next(in_order)
        except UserError as error:  # of this row: the next ones may be had
            outcome = Outcome(cause=MALFORMED, note=str(error))
        else:
            outcome = job.transform(row) if place >= begin else Outcome()
        if place >= begin:
            yield outcome


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _verify(folder: Path) -> None:
    """Raise DamagedStore unless the files are complete and as they were written."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        said = {name: (int(size), int(check)) for name, (size, check) in meta["files"].items()}
        if meta["format"] != FORMAT or not said:
            raise DamagedStore(f"{_META} does not describe it")
        for name, (size, check) in said.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise DamagedStore(f"{name} has {found} bytes instead of {size}")
            if _checksum(folder / name) != check:
                raise DamagedStore(f"{name} has changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedStore(f"{type(error).__name__}: {error}") from error


def _map(folder: Path) -> TokenTable:
    return map_files(sorted(folder.glob("*.arrow")))
