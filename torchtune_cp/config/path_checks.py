"""Checks a path before anything depends on it: what exists there, and whether it can be written."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

from torchtune_cp.errors import ConfigError, UserError

#: What may be asked of a path.
Kind = Literal["a folder", "a file"]
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)
# A full disk is no mistake in a config: the run has failed.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Replace a leading `~` or `~user`.

    Unlike `Path.expanduser`, it raises nothing for a user who is not there: the path stays as it is, and is
    missed under its name like any other.

    Args:
        path: As a user wrote it.
    """
    return Path(os.path.expanduser(path))


def as_path(key: str, text: str) -> Path:
    """Turn a config's value into an absolute path, its `~` replaced.

    Args:
        key: The config key, for messages.
        text: Its value.

    Raises:
        ConfigError: It is empty, or would be interpreted differently than written.
    """
    if not text.strip():
        raise ConfigError(f"{key}: is empty: name a folder")
    if "\0" in text:
        raise ConfigError(f"{key}: {text!r} is no path: it holds a NUL character")
    if os.path.expandvars(text) != text:
        raise ConfigError(
            f"{key}: {text!r} uses the shell's syntax for a variable, which is not expanded"
            " here: write ${oc.env:NAME}"
        )
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{key}: {text!r}: {error}") from None


def kind_problem(path: Path, wanted: Kind) -> str | None:
    """Report what exists at a path to be written, or in place of one of its folders.

    Args:
        path: The path; it need not be there.
        wanted: What should be there, or be made there.

    Returns:
        One line; None if nothing prevents writing. Links are followed.
    """
    for place in (path, *path.parents):
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                return f"{place} is a link to {os.readlink(place)}, which does not exist"
            wanted = "a folder"  # it is looked for above
            continue
        except OSError as error:
            return f"{place} cannot be used: {error.strerror}"
        found = next((kind for is_so, kind in _KINDS if is_so(mode)), "a device")
        return None if found == wanted else f"{place} is {found}, not {wanted}"
    return None


def write_and_delete(folder: Path) -> None:
    """Write a hidden file, wait until it is on the disk, and delete it.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / f".tune_{secrets.token_hex(4)}.tmp"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, b"tried before training\n")
        os.fsync(file)
    finally:
        os.close(file)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def cannot_write(key: str, path: Path, error: OSError) -> str:
    """Say that a path cannot be written, and why.

    Args:
        key: The config key that led there.
        path: The path.
        error: The system's error.

    Raises:
        UserError: The disk is full: no mistake in a config.
    """
    line = f"{key}: cannot write in {path}: {error.strerror or error}"
    if error.errno in _FULL:
        raise UserError(line) from None
    return line
