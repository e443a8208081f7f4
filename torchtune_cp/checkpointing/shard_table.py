"""The shard table of a checkpoint: which part of which tensor is in which file.

It is part of `checkpoint.json`, so its checksum covers it and no other file must be opened to determine its
contents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import WriteItem

from torchtune_cp.checkpointing.manifest import Manifest, check_size, shown
from torchtune_cp.checkpointing.safetensors_format import DTYPE_NAMES
from torchtune_cp.errors import UserError

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor in a file: the file, the part's first index and its size by dimension."""

    path: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: The whole tensor's shape.
        dtype: Its type.
        chunks: Its parts; they do not overlap and leave nothing out.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[StoredChunk] = field(default_factory=list)


def shard_table(plans: Mapping[str, Sequence[WriteItem]]) -> dict[str, Any]:
    """Return the table as plain JSON values: name to `{"dtype", "shape", "shards"}`.

    Args:
        plans: What each file will hold, by its name.

    Returns:
        A shard is `[file, first index by dimension, size by dimension]`.
    """
    table: dict[str, Any] = {}
    for file, items in plans.items():
        for item in items:
            data = item.tensor_data
            assert data is not None, item  # only tensors are ever given to the planner
            entry = table.setdefault(
                item.index.fqn,
                {
                    "dtype": DTYPE_NAMES[data.properties.dtype],
                    "shape": list(data.size),
                    "shards": [],
                },
            )
            entry["shards"].append([file, list(data.chunk.offsets), list(data.chunk.sizes)])
    return table


def read_stored_tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint and its parts; opens no file.

    Args:
        manifest: The checkpoint's description.

    Returns:
        Name to tensor, in the order of the table.

    Raises:
        UserError: A file is missing or of another length, or the shards do not make up whole tensors.
    """
    try:
        for file in manifest.files:
            check_size(manifest.folder, file)
        paths = {file.name: manifest.folder / file.name for file in manifest.files}
        tensors = {name: _tensor(name, entry, paths) for name, entry in manifest.tensors.items()}
    except UserError as error:
        raise UserError(f"cannot use checkpoint {manifest.folder}: {error}") from error
    return tensors


def _tensor(name: str, entry: object, paths: Mapping[str, Path]) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape = fields.get("dtype"), _indices(fields.get("shape"))
    shards = fields.get("shards")
    if not isinstance(dtype, str) or dtype not in _DTYPES or shape is None or not shards:
        raise UserError(f"the shard table does not describe {shown(name)} is")
    chunks = [_chunk(shard, shape, paths) for shard in shards] if isinstance(shards, list) else []
    found = [chunk for chunk in chunks if chunk is not None]
    if len(found) != len(shards) or len({chunk.path for chunk in found}) != len(found):
        raise UserError(f"the shard table has no location for {shown(name)} is")
    tensor = StoredTensor(shape, _DTYPES[dtype], found)
    _check_whole(name, tensor)
    return tensor


def _chunk(shard: object, shape: tuple[int, ...], paths: Mapping[str, Path]) -> StoredChunk | None:
    if not isinstance(shard, list) or len(shard) != 3 or not isinstance(shard[0], str):
        return None
    path, offsets, sizes = paths.get(shard[0]), _indices(shard[1]), _indices(shard[2])
    if path is None or offsets is None or sizes is None:
        return None
    if not len(offsets) == len(sizes) == len(shape):
        return None
    if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
        return None
    return StoredChunk(path, offsets, sizes)


def _indices(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(item) is int and 0 <= item < 2**62 for item in value):
        return None
    return tuple(value)


def _overlap(a: StoredChunk, b: StoredChunk) -> bool:
    return all(
        a_first < b_first + b_size and b_first < a_first + a_size
        for a_first, a_size, b_first, b_size in zip(
            a.offsets, a.sizes, b.offsets, b.sizes, strict=True
        )
    )


def _check_whole(name: str, tensor: StoredTensor) -> None:
    """Refuse chunks that overlap or leave a gap; drop empty ones where there are others."""
    if 0 in tensor.shape:
        del tensor.chunks[1:]
        return
    tensor.chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.sizes]
    if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.shape):
        raise UserError(f"the shards of {shown(name)} do not make up the whole tensor")
    if not tensor.shape:
        return
    # Sweep along the dimension that is cut most: only chunks that share indices there can overlap.
    dim = max(
        range(len(tensor.shape)), key=lambda d: len({chunk.offsets[d] for chunk in tensor.chunks})
    )
    active: list[StoredChunk] = []
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in active):
            raise UserError(f"the shards of {shown(name)} overlap")
        active.append(chunk)
