"""The tokens of all documents of a dataset, made once and read from disk by every rank.

Packing has to know the length of every document, so all of them are tokenised before the first step.
Their tokens are kept, not their lengths alone: a piece of a long document could otherwise only be had by
tokenising all of it again, and every rank would tokenise on its own. A file that is mapped into memory
costs 4 bytes a token on disk, is shared by the ranks of a node, and is there at the next start.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from torchtune_cp.data.packing import Int64
from torchtune_cp.errors import UserError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TUNE_CACHE_DIR"

#: Raise it when the files change; old folders are then not looked at any more.
FORMAT = 1
_TOKENS, _LABELS, _LENGTHS, _META = "tokens.i32", "labels.i32", "lengths.i64", "meta.json"
_TYPES = {_TOKENS: "<i4", _LABELS: "<i4", _LENGTHS: "<i8"}
_CHUNK = 1 << 24  # bytes, for checksums


class Documents(Protocol):
    """A map-style dataset of `{"tokens", "labels"}`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class DamagedStore(Exception):
    """The files of a store are not what was written."""


class TokenStore:
    """Tokens and labels of documents, one behind the other.

    Attributes:
        lengths: int64 [documents], tokens of each.
    """

    def __init__(self, files: Mapping[str, Any], folder: Path | None = None) -> None:
        """Take over the contents.

        Args:
            files: Arrays by file name; labels are left out where they are the tokens everywhere.
            folder: Where the arrays are mapped from; None when they are in memory.
        """
        self.lengths: Int64 = np.asarray(files[_LENGTHS], dtype=np.int64)
        self.folder = folder
        self._tokens = files[_TOKENS]
        self._labels = files.get(_LABELS, self._tokens)
        self._begin = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    def read(self, document: int, start: int, length: int) -> tuple[Any, Any]:
        """(tokens, labels), int32 [length] each, of a part of a document."""
        begin = int(self._begin[document]) + start
        return self._tokens[begin : begin + length], self._labels[begin : begin + length]

    def __reduce__(self) -> Any:
        # A loader's worker maps the files too, instead of being sent their contents.
        if self.folder is None:
            return super().__reduce__()
        return _map, (self.folder,)


def cache_dir() -> Path:
    """`TUNE_CACHE_DIR`, or `torchtune_cp` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchtune_cp"


def stored_tokens(
    make_documents: Callable[[], Documents],
    *,
    name: str,
    key: str | None,
    folder: Path | None = None,
    progress: bool = True,
) -> TokenStore:
    """The tokens of a dataset: from the cache, or made by one process while the others wait.

    The first process that comes holds a lock on a file while it works, so the ranks of a run, and runs
    that start together, do the work once. Nobody waits in a collective, so no time-out can end it, and
    the lock of a process that dies is free at once.

    Args:
        make_documents: Makes the dataset; called where it has to be read.
        name: What messages call the data.
        key: Names the content (see `fingerprint`): what was made under it is used again. None makes the
            tokens anew, in memory.
        folder: Of the cache; None = `cache_dir()`. Where it cannot be written, the tokens are made in
            memory, with a warning.
        progress: Show a bar where it takes more than a few seconds.

    Raises:
        UserError: A malformed row, or a dataset that gives no tokens.
    """
    if key is None:
        return _in_memory(make_documents, name, progress)
    root = (folder or cache_dir()) / "tokens"
    target = root / key
    store = _from_cache(target)
    if store is not None:
        return store
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("another process tokenises %s; waiting for it", name)
            lock.acquire()
        try:
            store = _from_cache(target, damaged_is_removed=True)
            for left in root.glob(f"{key}.*.scratch"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            if store is None:
                _make(target, make_documents, name, progress)
                store = _map(target)
        finally:
            lock.release()
        return store
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        logger.warning(
            "%s: the tokens cannot be kept in %s (%s); every process makes its own, in memory "
            "(%s chooses another folder)",
            *(name, root, error, CACHE_VARIABLE),
        )
        return _in_memory(make_documents, name, progress)


def _from_cache(target: Path, damaged_is_removed: bool = False) -> TokenStore | None:
    if not target.is_dir():
        return None
    try:
        _verify(target)
        return _map(target)
    except DamagedStore as error:
        if damaged_is_removed:
            logger.warning("%s is damaged (%s) and is made again", target, error)
            shutil.rmtree(target)
        return None


def _make(target: Path, make_documents: Callable[[], Documents], name: str, progress: bool) -> None:
    """Write the files into a folder beside `target` and give it that name when it is complete."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".scratch", dir=target.parent))
    try:
        files: dict[str, IO[bytes]] = {}
        for file in _TYPES:
            files[file] = (scratch / file).open("wb")
        try:
            labels_differ = _tokenise(make_documents(), files, name, progress)
        finally:
            for opened in files.values():
                opened.close()
        if not labels_differ:
            (scratch / _LABELS).unlink()
        meta = {
            "format": FORMAT,
            "files": {f.name: [f.stat().st_size, _checksum(f)] for f in sorted(scratch.iterdir())},
        }
        (scratch / _META).write_text(json.dumps(meta), encoding="utf-8")
        scratch.chmod(0o755)  # a temporary folder is its owner's alone
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _in_memory(make_documents: Callable[[], Documents], name: str, progress: bool) -> TokenStore:
    files: dict[str, IO[bytes]] = {file: io.BytesIO() for file in _TYPES}
    labels_differ = _tokenise(make_documents(), files, name, progress)
    arrays = {
        file: np.frombuffer(files[file].getbuffer(), dtype=kind)  # type: ignore[attr-defined]
        for file, kind in _TYPES.items()
        if labels_differ or file != _LABELS
    }
    return TokenStore(arrays)


def _tokenise(
    documents: Documents, files: Mapping[str, IO[bytes]], name: str, progress: bool
) -> bool:
    """Write all documents; returns whether a label is another than its token."""
    labels_differ, total = False, 0
    # disable=None: no bar where standard error is not a terminal.
    bar = tqdm(
        range(len(documents)),
        desc=f"tokenising {name}",
        unit="doc",
        delay=2,
        disable=None if progress else True,
    )
    for index in bar:
        sample = documents[index]
        tokens = np.asarray(sample["tokens"], dtype="<i4")
        labels = np.asarray(sample["labels"], dtype="<i4")
        if len(tokens) != len(labels):
            raise UserError(
                f"sample {index} of {name} has {len(tokens)} tokens but {len(labels)} labels; a "
                "dataset must give one label for each token"
            )
        labels_differ = labels_differ or not np.array_equal(tokens, labels)
        files[_TOKENS].write(tokens.tobytes())
        files[_LABELS].write(labels.tobytes())
        files[_LENGTHS].write(np.int64(len(tokens)).astype("<i8").tobytes())
        total += len(tokens)
    if total == 0:
        raise UserError(f"no samples in {name}: {len(documents)} documents without a token")
    return labels_differ


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
        if meta["format"] != FORMAT or not {_TOKENS, _LENGTHS} <= set(said) <= set(_TYPES):
            raise DamagedStore(f"{_META} does not describe it")
        for name, (size, check) in said.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise DamagedStore(f"{name} has {found} bytes instead of {size}")
            if _checksum(folder / name) != check:
                raise DamagedStore(f"{name} has changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedStore(f"{type(error).__name__}: {error}") from error


def _map(folder: Path) -> TokenStore:
    files = {
        name: np.memmap(folder / name, dtype=kind, mode="r")
        for name, kind in _TYPES.items()
        if (folder / name).exists()
    }
    return TokenStore(files, folder)
