"""The header of a safetensors file: which tensors it holds, and is it whole? Needs no torch."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torchtune_cp.errors import UserError

_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# The safetensors library refuses larger headers too; without a limit a damaged length field would
# ask for terabytes.
_MAX_HEADER_BYTES = 100_000_000
_MAX_WORD = 1000
_SHOWN = 255
_PIECE = 1 << 24


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header of its file describes it.

    Attributes:
        dtype: safetensors' name of the type, for example `BF16`.
        shape: The tensor's shape.
        num_bytes: Length of its data.
        offset: Where its data begin in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one safetensors file.

    The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, the
    header in JSON, then the tensors' bytes; the last tensor's end must be the end of the file.

    Args:
        path: The file.

    Returns:
        Tensor name to its description, in file order.

    Raises:
        UserError: The file is truncated, too long, or no safetensors file.
    """
    again = "download it again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    if start == b"version ":
        raise UserError(
            f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` in its folder"
        )
    if len(start) < 8:
        raise UserError(f"{path} is truncated: only {size} bytes long; {again}")
    if length > _MAX_HEADER_BYTES:
        raise UserError(f"{path} is not a safetensors file (no header found); {again}")
    if len(text) < length:
        raise UserError(
            f"{path} is truncated: its header should take {length} bytes and the file ends after "
            f"{len(text)} of them; {again}"
        )
    try:
        header = json.loads(text)
        entries: dict[str, TensorEntry] = {}
        end = 0
        for name, item in header.items():
            if name == "__metadata__":
                continue
            require_word(name)
            require_word(item["dtype"])
            first, last = (_count(offset) for offset in item["data_offsets"])
            shape = tuple(_count(size) for size in item["shape"])
            if last < first:
                raise ValueError(f"{name!r}: ends at {last}, before it begins at {first}")
            bits = _DTYPE_BITS.get(item["dtype"])
            if bits is not None and prod(shape) * bits != (last - first) * 8:
                raise ValueError(f"{name!r}: shape {shape} does not fill bytes {first} to {last}")
            entries[name] = TensorEntry(item["dtype"], shape, last - first, 8 + length + first)
            end = max(end, last)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); {again}") from error
    whole = 8 + length + end
    if size < whole:
        raise UserError(
            f"{path} is truncated: {size} bytes long, its header asks for {whole}; {again}"
        )
    if size > whole:
        raise UserError(
            f"{path} is {size} bytes long and its header accounts for only {whole}; {again}"
        )
    return entries


def require_word(name: object) -> None:
    """Refuse what is no name, with a ValueError."""
    # Names appear in messages of one line, and no tensor has such a name.
    if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_WORD:
        raise ValueError(f"{str(name)[:_SHOWN]!r} is not a valid name")


def _count(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
        raise ValueError(f"{number!r} is not a size")
    return number


def same_bytes(one: tuple[Path, TensorEntry], other: tuple[Path, TensorEntry]) -> bool:
    """Whether two stored tensors are the same, bit by bit.

    Args:
        one: A file and one of its tensors, from `read_header`.
        other: Another.

    Raises:
        UserError: A file cannot be read.
    """
    (path, entry), (other_path, other_entry) = one, other
    if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
        return False
    try:
        with path.open("rb") as file, other_path.open("rb") as other_file:
            file.seek(entry.offset)
            other_file.seek(other_entry.offset)
            for at in range(0, entry.num_bytes, _PIECE):
                size = min(_PIECE, entry.num_bytes - at)
                if file.read(size) != other_file.read(size):
                    return False
    except OSError as error:
        raise UserError(f"{path} or {other_path} cannot be read ({error.strerror})") from error
    return True
