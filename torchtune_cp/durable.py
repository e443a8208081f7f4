"""Files and folders that appear under their name only when complete, and disappear in one step.

Everything that others may read is written under a hidden name next to its final one and renamed when
it is complete; so what has a final name is always complete, even after a crash of the process or the
machine.
"""

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)

#: How the hidden name of an incomplete folder ends.
TEMPORARY_SUFFIX = ".tmp"
#: How the hidden name of a complete folder ends that was moved aside to make room for its successor.
REPLACED_SUFFIX = ".replaced"
# What file systems answer that cannot sync a folder (some network and FUSE ones).
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Args:
        path: The file or folder.

    Raises:
        OSError: The disk could not take it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


@contextmanager
def whole_file(final: Path, *, mode: int = 0o666, synced: bool = True) -> Iterator[BinaryIO]:
    """Open a file to be written; it takes its name, and another's place, when the block has ended.

    An error in the block leaves what was there as it was.

    Args:
        final: The file's final place.
        mode: Who may read it, within what the process's mask allows.
        synced: Whether to wait until it is on the disk: so that a power cut leaves the old file or the
            new one. Without it that holds for the end of the process only.

    Raises:
        OSError: The disk could not take it.
    """
    temporary = hidden_name(final, TEMPORARY_SUFFIX)
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if synced:
        sync(final.parent)


def write_text(path: Path, text: str, *, mode: int = 0o666, synced: bool = True) -> None:
    """Write a file in one step, as `whole_file` does.

    Args:
        path: The file; an earlier one is replaced.
        text: Its content, written as UTF-8.
        mode: Who may read it, within what the process's mask allows.
        synced: Whether to wait until it is on the disk.

    Raises:
        OSError: The disk could not take it.
    """
    with whole_file(path, mode=mode, synced=synced) as file:
        file.write(text.encode())


def make_folders(path: Path) -> None:
    """Make a folder and those above it, and wait until their names are on the disk.

    Args:
        path: The folder; it may exist.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def hidden_name(final: Path, suffix: str) -> Path:
    """Return an unused hidden name next to `final`.

    Args:
        final: The folder's final place.
        suffix: `TEMPORARY_SUFFIX` or `REPLACED_SUFFIX`.
    """
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}{suffix}")


def first_free(named: Callable[[int], Path]) -> Path:
    """Return the first of some numbered paths that is not in use.

    Args:
        named: Gives the path of a number, from 1 on.
    """
    return next(path for path in map(named, count(1)) if not os.path.lexists(path))


def rename_into_place(temporary: Path, final: Path, replaced: Path) -> None:
    """Give a complete folder its final name; an earlier folder of that name is moved aside.

    Args:
        temporary: The complete folder, every file of it on the disk.
        final: Its final place in the same parent.
        replaced: Where an earlier folder goes, in the same parent; must not exist.

    Raises:
        OSError: The rename failed, or the final path is not a folder; what
            was there is unchanged.
    """
    earlier = os.path.lexists(final)
    if earlier:
        if not final.is_dir():
            raise FileExistsError(errno.EEXIST, "it exists and is not a folder", str(final))
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if earlier:
            replaced.rename(final)
        raise
    sync(final.parent)


def remove_folder(folder: Path, final: Path | None = None) -> None:
    """Delete a folder; it loses its name in one step, so that a partial folder is never visible.

    What cannot be deleted is left under a hidden temporary name and logged: a lack of tidiness must
    not end a run.

    Args:
        folder: The folder to delete.
        final: The visible name that its hidden name is made of; its own by default.

    Raises:
        OSError: The folder could not be renamed; it is untouched.
    """
    doomed = hidden_name(final or folder, TEMPORARY_SUFFIX)
    folder.rename(doomed)
    delete_hidden(doomed)


def delete_hidden(folder: Path) -> None:
    """Delete a folder that has a hidden name already; log what stays behind.

    Args:
        folder: The folder.
    """
    try:
        if folder.is_symlink():
            folder.unlink()  # its target belongs to another owner
        else:
            shutil.rmtree(folder)
    except (FileNotFoundError, NotADirectoryError):  # the latter: the parent folder is gone too
        return
    except OSError as error:
        _log.warning("could not delete %s (%s); delete it by hand", folder, error)
