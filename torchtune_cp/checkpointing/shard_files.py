"""Tensor shards in safetensors files, for torch.distributed.checkpoint's planners.

Each rank writes one file. Which rank writes which replica, and which slices a rank needs on another
mesh, is decided by torch's planners; here are only the bytes. torch's own
``HuggingFaceStorageWriter`` builds a rank's whole file in memory, twice, before it writes the first
byte, and its reader takes every ``*.safetensors`` of the folder and casts to whatever type is asked
for; so this writer streams, and this reader opens only listed files and checks that their chunks
make up whole tensors. The layout is theirs (offsets under ``DCP_SHARDING_INFO`` in the header), so
torch's tools read these files too.
"""

import dataclasses
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchtune_cp.checkpointing.manifest import (
    FileRecord,
    Manifest,
    check_size,
    new_checksum,
    shown,
)
from torchtune_cp.errors import UserError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_SHARDING_KEY = "DCP_SHARDING_INFO"


def check_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors whose bytes alone do not say what they are.

    Args:
        tensors: Name to tensor or DTensor.

    Raises:
        UserError: A tensor subclass (quantised optimizer state), an unusual type, a meta tensor or a
            partial sum.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            raise UserError(f"{name} is a sum not yet taken, which a checkpoint cannot hold")
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            raise UserError(f"{name} is a {type(local).__name__}, which a checkpoint cannot hold")
        if local.dtype not in _DTYPE_NAMES or local.is_meta or local.layout != torch.strided:
            raise UserError(
                f"{name} is a {local.layout} tensor of {local.dtype} on {local.device}, which a "
                "checkpoint cannot hold"
            )


class ShardSavePlanner(DefaultSavePlanner):
    """torch's planner without empty shards.

    It takes shards that begin at one place for replicas of each other, and so could drop a shard in
    favour of an empty one.
    """

    def __init__(self) -> None:
        """Names stay as they are: the tensors are not nested."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's shards, leaving out empty ones of tensors that are not empty."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(
            plan, items=[item for item in plan.items if 0 not in _sizes(item) or _is_empty(item)]
        )
        return self.plan


def _sizes(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None, item  # only tensors are ever given to the planner
    return tuple(item.tensor_data.chunk.sizes)


def _is_empty(item: WriteItem) -> bool:
    assert item.tensor_data is not None, item
    return 0 in item.tensor_data.size


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, item
    return prod(_sizes(item)) * item.tensor_data.properties.dtype.itemsize


def _header(items: Sequence[WriteItem]) -> bytes:
    """The header of a file with these shards in this order (https://huggingface.co/docs/safetensors)."""
    header: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    first = 0
    for item in items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None, item
        assert name not in header, f"two shards of {name} on one rank"
        header[name] = {
            "dtype": _DTYPE_NAMES[data.properties.dtype],
            "shape": list(data.chunk.sizes),
            "data_offsets": [first, first + _num_bytes(item)],
        }
        sharding[name] = {"saved_offsets": list(data.chunk.offsets), "shape": list(data.size)}
        first += _num_bytes(item)
    header["__metadata__"] = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _SHARDING_KEY: json.dumps(sharding, separators=(",", ":")),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned, as the format asks
    return struct.pack("<Q", len(text)) + text


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes; a copy only of one that is on a GPU or not contiguous."""
    # numpy has no bfloat16: hand over the bytes.
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


class ShardWriter(StorageWriter):
    """Writes each rank's shards to one file, tensor by tensor.

    A failure is kept, not raised: torch would send the exception to the other ranks as a pickle,
    which not every exception survives, and ranks that wait for it would wait on.

    Attributes:
        record: This rank's file once it is on the disk; None if the rank had nothing to write.
        error: Why it is not.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Keep where to write.

        Args:
            folder: An existing folder.
            rank: This rank; names its file.
        """
        self._folder = folder
        self._name = f"rank_{rank:05d}.safetensors"
        self.record: FileRecord | None = None
        self.error: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and wait until it is on the disk.

        The checksum is taken of the bytes in memory, so that it also finds what went wrong on the
        way to the disk.

        Args:
            plan: What to write.
            planner: Gives the tensors.
        """
        if plan.items:
            # Wide types first: every tensor then begins at a multiple of its type's size.
            items = sorted(plan.items, key=lambda item: -_dtype(item).itemsize)
            try:
                self.record = self._write_file(items, planner)
            except Exception as error:  # noqa: BLE001 - the caller makes it known to all ranks
                self.error = error
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _write_file(self, items: Sequence[WriteItem], planner: SavePlanner) -> FileRecord:
        digest, count = new_checksum(), 0
        path = self._folder / self._name
        with path.open("xb") as file:
            for data in self._pieces(items, planner):
                _write(file, data)
                digest.update(data)
                count += len(data)
            file.flush()
            os.fsync(file.fileno())
        if path.stat().st_size != count:
            raise OSError(f"{self._name} has {path.stat().st_size} bytes on the disk, not {count}")
        return FileRecord(self._name, count, digest.hexdigest())

    @staticmethod
    def _pieces(items: Sequence[WriteItem], planner: SavePlanner) -> Iterable[bytes | memoryview]:
        yield _header(items)
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), item
            if tuple(tensor.shape) != _sizes(item) or tensor.dtype != _dtype(item):
                raise RuntimeError(
                    f"{item.index.fqn}: the shard has shape {list(tensor.shape)} and "
                    f"{tensor.dtype}, its placements say {list(_sizes(item))} and {_dtype(item)}"
                )
            if tensor.numel():
                yield _tensor_bytes(tensor.detach())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: the checkpoint is completed when no rank has an error."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by torch itself: a writer is always passed."""
        return False


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, item
    return item.tensor_data.properties.dtype


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


def _sharding_info(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        info = json.loads((metadata or {})[_SHARDING_KEY])
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} does not say where its shards belong") from error
    if not isinstance(info, dict):
        raise UserError(f"{path.name} does not say where its shards belong")
    return info


def _places(value: object, dims: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) != dims:
        return None
    if not all(type(item) is int and 0 <= item < 2**62 for item in value):
        return None
    return tuple(value)


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype, StoredChunk]]:
    """Name to (whole shape, type, chunk) of one file; reads its header only."""
    found = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            info = _sharding_info(path, file.metadata())
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                sizes, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
                entry = info.get(name)
                if dtype is None or not isinstance(entry, dict):
                    raise UserError(f"{path.name} does not say what {shown(name)} is")
                offsets = _places(entry.get("saved_offsets"), len(sizes))
                shape = _places(entry.get("shape"), len(sizes))
                if (
                    offsets is None
                    or shape is None
                    or any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True))
                ):
                    raise UserError(f"{path.name} places {shown(name)} outside its tensor")
                found[name] = (shape, dtype, StoredChunk(path, offsets, sizes))
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path.name} is no readable safetensors file ({shown(str(error))})"
        ) from error
    return found


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


def read_stored_tensors(manifest: Manifest) -> dict[str, StoredTensor]:
    """Find every tensor of a checkpoint and its parts; reads the headers of the listed files only.

    Args:
        manifest: The checkpoint's description.

    Returns:
        Name to tensor, in the order of the files.

    Raises:
        UserError: A file is missing, of another length or not readable, or its shards do not make
            up whole tensors.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        for file in manifest.files:
            check_size(manifest.folder, file)
            for name, (shape, dtype, chunk) in _read_header(manifest.folder / file.name).items():
                tensor = tensors.setdefault(name, StoredTensor(shape, dtype))
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    raise UserError(f"{file.name} gives {shown(name)} another shape or type")
                tensor.chunks.append(chunk)
        for name, tensor in tensors.items():
            _check_whole(name, tensor)
    except UserError as error:
        raise UserError(f"cannot use checkpoint {manifest.folder}: {error}") from error
    return tensors


class ShardReader(StorageReader):
    """Reads the slices that a plan asks for, each on its own.

    Attributes:
        error: What went wrong while reading; kept for the reason that :class:`ShardWriter` gives.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Keep where everything is.

        Args:
            tensors: What :func:`read_stored_tensors` found.
        """
        self.error: Exception | None = None
        self._tensors = tensors
        self._paths = {
            MetadataIndex(name, chunk.offsets): chunk.path
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any) -> Metadata:
        """Describe the tensors as torch's planner wants it."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every slice of the plan into its place, file by file.

        Args:
            plan: The slices.
            planner: Gives the places.
        """
        try:
            self._read(plan, planner)
        except Exception as error:  # noqa: BLE001 - the caller makes it known to all ranks
            self.error = error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            if 0 not in item.lengths:
                by_file.setdefault(self._paths[item.storage_index], []).append(item)
        for path, items in by_file.items():
            with safe_open(path, framework="pt", device="cpu") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read_slice(file, item))
                    planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by torch itself: a reader is always passed."""
        return False


def _read_slice(file: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:
        return file.get_tensor(name)
    window = tuple(
        slice(first, first + size)
        for first, size in zip(item.storage_offsets, item.lengths, strict=True)
    )
    return file.get_slice(name)[window]
