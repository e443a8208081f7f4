"""Tensor shards in safetensors files, for torch.distributed.checkpoint's planners.

Each rank writes one file. Which rank writes which replica, and which slices a rank needs on another
mesh, is decided by torch's planners; this module only reads and writes the bytes. torch's own
`HuggingFaceStorageWriter` builds a rank's whole file in memory, twice, before it writes the first
byte, and its reader takes every `*.safetensors` of the folder and casts to the requested type; so this writer
streams, and this reader opens only the files that the checkpoint's table of shards names
(`torchtune_cp.checkpointing.shard_table`). The header repeats its part of the table as they write it
(`DCP_SHARDING_INFO`), so torch's tools read these files too.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
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

from torchtune_cp.checkpointing.manifest import FileRecord, new_checksum, shown
from torchtune_cp.checkpointing.safetensors_format import (
    DTYPE_NAMES,
    header_bytes,
    tensor_bytes,
)
from torchtune_cp.checkpointing.shard_table import StoredTensor, shard_table
from torchtune_cp.errors import UserError


def check_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not fully described by their bytes.

    Args:
        tensors: Name to tensor or DTensor.

    Raises:
        UserError: A tensor subclass (quantised optimizer state), an unusual type, a meta tensor or a
            partial sum.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            raise UserError(f"{name} is a partial sum, which a checkpoint cannot contain")
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            raise UserError(
                f"{name} is a {type(local).__name__}, which a checkpoint cannot contain"
            )
        if local.dtype not in DTYPE_NAMES or local.is_meta or local.layout != torch.strided:
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


def _file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _header(items: Sequence[WriteItem]) -> bytes:
    """The header of a file with these shards in this order."""
    tensors = []
    sharding: dict[str, Any] = {}
    for item in items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None, item
        tensors.append((name, data.properties.dtype, data.chunk.sizes))
        sharding[name] = {"saved_offsets": list(data.chunk.offsets), "shape": list(data.size)}
    metadata = {
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
    }
    return header_bytes(tensors, metadata)


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


class ShardWriter(StorageWriter):
    """Writes each rank's shards to one file, tensor by tensor.

    A failure is kept, not raised: torch would send the exception to the other ranks as a pickle,
    which not every exception survives, and ranks that wait for it would wait on.

    Attributes:
        table: On the first rank, once all have planned: the table of all shards.
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
        self._name = _file_name(rank)
        self.table: dict[str, Any] = {}
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
        """Keep where every shard will be; leave the plans as they are.

        Args:
            plans: By rank, with replicas assigned.
        """
        self.table = shard_table({_file_name(rank): plan.items for rank, plan in enumerate(plans)})
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
            except Exception as error:  # noqa: BLE001 - the caller reports it to all ranks
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
                    f"{tensor.dtype}, its placements give {list(_sizes(item))} and {_dtype(item)}"
                )
            if tensor.numel():
                yield tensor_bytes(tensor)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: the checkpoint is completed when no rank has an error."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by torch itself: a writer is always passed."""
        return False


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, item
    return item.tensor_data.properties.dtype


class ShardReader(StorageReader):
    """Reads the slices that a plan asks for, each on its own.

    Attributes:
        error: What went wrong while reading; kept for the reason that `ShardWriter` gives.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Keep where everything is.

        Args:
            tensors: What `torchtune_cp.checkpointing.shard_table.read_stored_tensors` found.
        """
        self.error: Exception | None = None
        self._tensors = tensors
        self._paths = {
            MetadataIndex(name, chunk.offsets): chunk.path
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        }
        self._sizes = {
            (name, chunk.path): chunk.sizes
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
        except Exception as error:  # noqa: BLE001 - the caller reports it to all ranks
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
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for item in items:
                        self._check_shard(file, item.storage_index.fqn, path)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(_read_slice(file, item))
                        planner.commit_tensor(item, target)
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{path.name} is no readable safetensors file ({shown(str(error))})"
                ) from error

    def _check_shard(self, file: Any, name: str, path: Path) -> None:
        """Refuse a file whose shard differs from the shard table: copying would stretch or cast it."""
        part = file.get_slice(name)
        expected = (self._sizes[name, path], DTYPE_NAMES[self._tensors[name].dtype])
        if (tuple(part.get_shape()), part.get_dtype()) != expected:
            raise UserError(
                f"{path.name} holds another shard of {shown(name)} than the shard table specifies"
            )

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
