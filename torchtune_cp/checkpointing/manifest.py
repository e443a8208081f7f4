"""`checkpoint.json`: the content of a training checkpoint, and how to verify that it is intact.

It is the last file written, and it carries the size and the checksum of every other one and a
checksum of its own content. Nothing in it is trusted further than those: it is plain JSON, and a
file that it names must be directly in its folder.
"""

import hashlib
import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torchtune_cp.errors import UserError

MANIFEST_NAME = "checkpoint.json"
FORMAT = "torchtune_cp training checkpoint"
#: Raised whenever an older version of this package could misread what is written. 2: the table of
#: shards is here; before, each file of shards had its part.
FORMAT_VERSION = 2

# Far above any real one (60 bytes a shard: 55 MB for an 8B model and its moments on 1,024 ranks; the
# rest some hundred kilobytes), and a bound on what a damaged or hostile file can make a process hold.
_MAX_MANIFEST_BYTES = 256 * 1024**2
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
# A folder's name that gives a step, however it is spelt.
_NAMED_STEP = re.compile(r"step_([0-9]+)", re.IGNORECASE)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 4 * 1024**2
_MAX_SHOWN = 80


class WrongStep(UserError):
    """A checkpoint of another step than that in its folder's name: it was renamed, or is a link."""


def new_checksum() -> Any:
    """Return the hash object of every checksum here: SHA-256.

    Of the standard library's cryptographic hashes it is the fastest where the processor has SHA
    instructions (nearly all hosts of GPUs: 1.8 GB/s on one core against 0.95 GB/s of BLAKE2b), and
    `sha256sum FILE` prints the same figure. A CRC would be faster, but of 32 bits: too few to distinguish
    terabytes apart.
    """
    return hashlib.sha256()


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        name: Its name in the folder.
        num_bytes: Its length.
        checksum: SHA-256 of its bytes, in hexadecimal.
    """

    name: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The content of `checkpoint.json`.

    Attributes:
        folder: Where it was read.
        step: Optimizer steps done.
        files: Every other file of the checkpoint.
        tensors: The table of shards, not looked at yet: see
            `torchtune_cp.checkpointing.shard_table.read_stored_tensors`.
        state: The state given by the writer of the checkpoint: plain JSON values.
        checksum: Of the content, in hexadecimal: distinguishes two checkpoints of one step.
    """

    folder: Path
    step: int
    files: tuple[FileRecord, ...]
    tensors: dict[str, Any]
    state: dict[str, Any]
    checksum: str


def shown(value: object) -> str:
    """Show a value from outside on one line and in few characters.

    Args:
        value: Anything read from a file.
    """
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _canonical(content: Mapping[str, Any]) -> bytes:
    # ASCII: a lone surrogate, which JSON can spell, has no UTF-8.
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _checksum_of(content: Mapping[str, Any]) -> str:
    digest = new_checksum()
    digest.update(_canonical(content))
    return str(digest.hexdigest())


def check_plain(state: Mapping[str, Any]) -> None:
    """Refuse what JSON does not preserve: tuples, tensors, keys that are not strings.

    Args:
        state: The values to store.

    Raises:
        TypeError: It contains a value that would be lost.
    """
    if json.loads(json.dumps(state)) != state:
        # NaN is the one plain value that differs from itself.
        text = json.dumps(state)
        if json.dumps(json.loads(text)) != text or not _is_plain(state):
            raise TypeError(
                "the state of a checkpoint must be dicts with string keys, lists, "
                "strings, numbers, booleans and None"
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def manifest_text(
    step: int,
    files: Sequence[FileRecord],
    tensors: Mapping[str, Any],
    state: Mapping[str, Any],
) -> str:
    """Return the text of `checkpoint.json`.

    Args:
        step: Optimizer steps done.
        files: Every other file of the checkpoint.
        tensors: The table of shards.
        state: Plain JSON values to keep.
    """
    content = {
        "step": step,
        "files": {
            file.name: {"num_bytes": file.num_bytes, "sha256": file.checksum} for file in files
        },
        "tensors": dict(tensors),
        "state": dict(state),
    }
    whole = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "content_sha256": _checksum_of(content),
        "content": content,
    }
    return json.dumps(whole) + "\n"


def _require_regular(path: Path) -> int:
    """Return a file's size; refuse links (they can lead out) and pipes (opening one waits forever)."""
    try:
        status = path.lstat()
    except OSError as error:
        raise UserError(f"{path.name} is missing ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path.name} is not a regular file")
    return status.st_size


def check_size(folder: Path, file: FileRecord) -> None:
    """Check that a file of a checkpoint exists, is a regular file and has the right size.

    Args:
        folder: The checkpoint.
        file: The entry in the manifest.

    Raises:
        UserError: It is not; the message begins with the file's name.
    """
    size = _require_regular(folder / file.name)
    if size != file.num_bytes:
        raise UserError(f"{file.name} is {size} bytes long instead of {file.num_bytes}")


def check_file(folder: Path, file: FileRecord) -> None:
    """Read a whole file of a checkpoint and compare its checksum.

    Args:
        folder: The checkpoint.
        file: The entry in the manifest.

    Raises:
        UserError: The file is missing, of another length or damaged; the message begins with its
            name.
    """
    check_size(folder, file)
    digest = new_checksum()
    buffer = memoryview(bytearray(min(_READ_BYTES, max(file.num_bytes, 1))))
    try:
        with (folder / file.name).open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise UserError(f"{file.name} cannot be read ({error.strerror})") from error
    if digest.hexdigest() != file.checksum:
        raise UserError(f"{file.name} is damaged: its checksum is not the one written with it")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _record(name: object, entry: object) -> FileRecord:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or ".." in name:
        raise UserError(f"it names a file {shown(name)}: only plain *.safetensors names are read")
    if not isinstance(entry, dict) or not _is_count(entry.get("num_bytes")):
        raise UserError(f"it gives no size for {shown(name)}")
    checksum = entry.get("sha256")
    if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
        raise UserError(f"it gives no checksum for {shown(name)}")
    return FileRecord(name, entry["num_bytes"], checksum)


def _parse(path: Path) -> tuple[dict[str, Any], str]:
    """Return the checked content and its checksum."""
    if _require_regular(path) > _MAX_MANIFEST_BYTES:
        raise UserError(f"it is larger than {_MAX_MANIFEST_BYTES} bytes")
    try:
        whole = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not valid JSON ({shown(str(error))})") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise UserError(f"it is not the description of a {FORMAT}")
    version = whole.get("format_version")
    if not _is_count(version) or version < 1:
        raise UserError(f"format_version is {shown(version)} and not a number from 1 on")
    if version > FORMAT_VERSION:
        raise UserError(
            f"format_version is {version} and this version of torchtune_cp reads up to "
            f"{FORMAT_VERSION}: update torchtune_cp"
        )
    if version < FORMAT_VERSION:
        raise UserError(
            f"format_version is {version}, which this version of torchtune_cp no longer reads: finish"
            " the run with the version that wrote it, or start a new one from its final/"
        )
    content = whole.get("content")
    checksum = whole.get("content_sha256")
    if not isinstance(content, dict):
        raise UserError("it has no content")
    try:
        found = _checksum_of(content)
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    if checksum != found:
        raise UserError("it is damaged: its checksum is not the one written with it")
    return content, found


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's `checkpoint.json`; opens no other file.

    Args:
        folder: The checkpoint.

    Raises:
        UserError: It is missing, damaged, of another format, or of another step than the folder's name
            says.
    """
    path = folder / MANIFEST_NAME
    try:
        if not folder.is_dir():
            raise UserError("the folder does not exist")
        content, checksum = _parse(path)
        step, files, tensors, state = map(content.get, ("step", "files", "tensors", "state"))
        if not _is_count(step):
            raise UserError(f"step is {shown(step)} and not a number")
        if not isinstance(files, dict):
            raise UserError("it lists no files")
        if not isinstance(tensors, dict):
            raise UserError("it has no shard table")
        if not isinstance(state, dict):
            raise UserError("it holds no state")
        named = _NAMED_STEP.match(folder.name)
        if named is not None and int(named[1]) != step:
            raise WrongStep(
                f"it is of step {step}, not of step {int(named[1])} as in the folder's name:"
                f" rename the folder to step_{step}"
            )
        records = tuple(_record(name, entry) for name, entry in files.items())
    except UserError as error:
        kind = type(error)
        raise kind(f"cannot use checkpoint {folder}: {MANIFEST_NAME}: {error}") from error
    return Manifest(folder, step, records, tensors, state, checksum)


def is_misnamed(folder: Path) -> bool:
    """Whether a checkpoint is of another step than its name; for an unreadable one the name is used.

    Args:
        folder: The checkpoint.
    """
    try:
        read_manifest(folder)
    except WrongStep:
        return True
    except UserError:
        return False
    return False
