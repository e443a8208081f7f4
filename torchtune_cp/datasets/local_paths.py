"""Local files under the names that users give them, and copies for those who take others only."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from torchtune_cp.durable import whole_file
from torchtune_cp.errors import UserError

#: Names that `datasets` takes for no pattern, fragment or chain of addresses.
PLAIN_NAME = re.compile(r"[\w./ -]+", re.ASCII)
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma"}


def local_path(name: str | Path) -> Path:
    """The path of a name: a name that exists is that file, else `~/` is the home folder."""
    path = Path(name)
    return path.expanduser() if str(name).startswith("~/") and not path.exists() else path


def linked(path: Path) -> Path:
    """A link to a file under a plain name, another one when the file changes."""
    import datasets

    about = path.stat()
    key = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"
    link = (
        Path(datasets.config.HF_DATASETS_CACHE) / "named" / hashlib.sha256(key.encode()).hexdigest()
    )
    link = link.with_suffix("".join(s for s in path.suffixes[-2:] if PLAIN_NAME.fullmatch(s)))
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(path.resolve())
    return link


def unpacked(path: Path) -> Path:
    """The file itself, or an unpacked copy of a gzip, bz2 or xz file, in the cache of `datasets`.

    Raises:
        OSError: The file cannot be read, or the copy not be written.
        UserError: The compressed file is damaged.
    """
    with path.open("rb") as file:
        head = file.read(8)
    module = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if module is None:
        return path
    from importlib import import_module
    from shutil import copyfileobj

    import datasets

    about = path.stat()
    name = f"{path.resolve()} {about.st_size} {about.st_mtime_ns}"
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "unpacked"
    target = folder / hashlib.sha256(name.encode()).hexdigest()
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as copy:
            try:
                with import_module(module).open(path, "rb") as packed:
                    copyfileobj(packed, copy, 1 << 20)
            except Exception as error:  # of three libraries, for a damaged file
                raise UserError(f"cannot unpack {path}: {error}") from error
    return target
