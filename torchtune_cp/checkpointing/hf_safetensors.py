"""Writes a model as a Hugging Face folder, from all ranks together: complete, or absent.

Tensors are assigned in order to files of limited size, and files to ranks. Every rank takes part in
gathering every tensor, but only the owner of its file keeps it, until about `buffer_bytes` are buffered;
then all owners write, each to its own file. So no rank ever holds more than that part of the model.

All files are written to a hidden folder next to the final one, which is renamed once everything is on the
disk.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchtune_cp.checkpointing.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from torchtune_cp.checkpointing.model_folder import (
    discard_hidden,
    hidden_path,
    open_hidden,
    put_in_place,
)
from torchtune_cp.checkpointing.rank_sync import RankSync, RemoteError
from torchtune_cp.checkpointing.safetensors_format import WEIGHT_DTYPES, header_bytes, tensor_bytes
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.durable import sync, write_text
from torchtune_cp.errors import UserError

#: Hugging Face's tools write files of this size.
MAX_FILE_BYTES = 5 * 1000**3
BUFFER_BYTES = 1000**3


@dataclass
class FilePlan:
    """One file of the folder: its name, its tensors (name to shape) in order, and their types."""

    name: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    num_bytes: int = 0

    def bytes_of(self, tensor_name: str) -> int:
        """Bytes that a tensor takes in the file."""
        return prod(self.shapes[tensor_name]) * self.dtypes[tensor_name].itemsize


def plan_files(
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    max_file_bytes: int,
    float32_names: Collection[str] = (),
) -> list[FilePlan]:
    """Deal tensors in order to files of at most `max_file_bytes` (a larger tensor gets its own).

    Args:
        shapes: Tensor names and full shapes.
        dtype: The type they are written in.
        max_file_bytes: Most bytes of tensors in a file.
        float32_names: Tensors that are always written as float32.

    Returns:
        The files, named as Hugging Face's tools name them.
    """
    plans = [FilePlan("")]
    for name, shape in shapes.items():
        tensor_dtype = torch.float32 if name in float32_names else dtype
        num_bytes = prod(shape) * tensor_dtype.itemsize
        if plans[-1].shapes and plans[-1].num_bytes + num_bytes > max_file_bytes:
            plans.append(FilePlan(""))
        plans[-1].shapes[name] = tuple(shape)
        plans[-1].dtypes[name] = tensor_dtype
        plans[-1].num_bytes += num_bytes
    for number, plan in enumerate(plans, start=1):
        plan.name = (
            SINGLE_NAME
            if len(plans) == 1
            else f"model-{number:05d}-of-{len(plans):05d}.safetensors"
        )
    return plans


def _header(plan: FilePlan) -> bytes:
    return header_bytes(
        ((name, plan.dtypes[name], shape) for name, shape in plan.shapes.items()), {}
    )


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    if tensor.numel():
        file.write(tensor_bytes(tensor))


def _rounds(
    plans: Sequence[FilePlan], owners: Sequence[int], buffer_bytes: int
) -> Iterator[list[tuple[int, str]]]:
    """Cut the work into rounds of (file index, tensor name).

    Within a round every owner collects at most `buffer_bytes` (or one tensor) of one file. The
    files of different owners advance side by side, so that the owners write at the same time. All
    ranks compute the same rounds.
    """
    queues: dict[int, list[tuple[int, str, int]]] = {owner: [] for owner in owners}
    for index, (plan, owner) in enumerate(zip(plans, owners, strict=True)):
        queues[owner] += [(index, name, plan.bytes_of(name)) for name in plan.shapes]
    positions = dict.fromkeys(queues, 0)
    while any(positions[owner] < len(queue) for owner, queue in queues.items()):
        taken: list[tuple[int, str]] = []
        for owner, queue in queues.items():
            room = buffer_bytes
            while positions[owner] < len(queue):
                index, name, num_bytes = queue[positions[owner]]
                if room < buffer_bytes and num_bytes > room:
                    break
                taken.append((index, name))
                room -= num_bytes
                positions[owner] += 1
        yield taken


def save_hf_folder(
    shapes: Mapping[str, Sequence[int]],
    get_full: Callable[[str], torch.Tensor],
    folder: str | Path,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    float32_names: Collection[str] = (),
    extra_files: Sequence[Path] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    buffer_bytes: int = BUFFER_BYTES,
    rank_sync: RankSync | None = None,
) -> None:
    """Write a Hugging Face model folder; collective, every rank must call it with the same arguments.

    Args:
        shapes: Hugging Face's tensor names and full shapes, in the order of the files.
        get_full: Gives a whole tensor by that name, on any device. Called on every rank in the same
            order (it may be a collective); ranks that do not own the tensor's file drop the result.
        folder: The final folder. The files of an earlier model there are replaced, others stay.
        config: Content of `config.json`.
        dtype: The type to write.
        float32_names: Tensors that are always written as float32. They come first in
            `shapes`, so that no shorter type before them leaves them at an odd place in the file.
        extra_files: Files and folders to copy under their own names (tokenizer,
            `generation_config.json`); read on rank 0 only.
        max_file_bytes: Most bytes of tensors in a file; a larger tensor gets its own file.
        buffer_bytes: Most bytes of tensors that a rank holds (one tensor, if that is larger).
        rank_sync: Where the ranks wait for each other; made and closed here if None.

    Raises:
        UserError: The folder cannot be written (disk full, no permission), on every rank; or
            `dtype` is not a type of weights.
    """
    if dtype not in WEIGHT_DTYPES:
        raise UserError(f"weights cannot be saved as {dtype}; choose fp32, bf16 or fp16")
    own_sync = rank_sync is None
    rank_sync = rank_sync or RankSync()
    # Next to the target of a link, not next to the link: a rename must stay on one disk.
    final = Path(os.path.realpath(expand_home(folder)))
    try:
        _save(
            shapes,
            get_full,
            final,
            config=config,
            dtype=dtype,
            float32_names=float32_names,
            extra_files=extra_files,
            max_file_bytes=max_file_bytes,
            buffer_bytes=buffer_bytes,
            rank_sync=rank_sync,
        )
    except (OSError, RemoteError) as error:
        if rank_sync.rank == 0:
            with contextlib.suppress(OSError):  # the error that counts is the first
                discard_hidden(final)
        raise UserError(f"could not save the model to {final}: {error}") from error
    finally:
        if own_sync:
            rank_sync.close()


def _save(
    shapes: Mapping[str, Sequence[int]],
    get_full: Callable[[str], torch.Tensor],
    final: Path,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    float32_names: Collection[str],
    extra_files: Sequence[Path],
    max_file_bytes: int,
    buffer_bytes: int,
    rank_sync: RankSync,
) -> None:
    temporary, writers = hidden_path(final), _open_temporary(final, rank_sync)
    plans = plan_files(shapes, dtype, max_file_bytes, float32_names)
    owners = [writers[index % len(writers)] for index in range(len(plans))]
    for taken in _rounds(plans, owners, buffer_bytes):
        kept: list[tuple[int, str, torch.Tensor]] = []
        for index, name in taken:
            tensor = get_full(name)
            assert tuple(tensor.shape) == plans[index].shapes[name], (name, tensor.shape)
            if owners[index] == rank_sync.rank:
                written_as = plans[index].dtypes[name]
                kept.append((index, name, tensor.detach().to(device="cpu", dtype=written_as)))
            del tensor
        error: Exception | None = None
        try:
            for index, name, tensor in kept:
                first = name == next(iter(plans[index].shapes))
                last = name == next(reversed(plans[index].shapes))
                with (temporary / plans[index].name).open("wb" if first else "ab") as file:
                    if first:
                        file.write(_header(plans[index]))
                    _write_tensor(file, tensor)
                if last:
                    sync(temporary / plans[index].name)
        except OSError as caught:
            error = caught
        rank_sync.raise_together(error)
    error = None
    if rank_sync.rank == 0:
        try:
            _write_small_files(temporary, plans, config, extra_files)
            for plan in plans:
                expected = len(_header(plan)) + plan.num_bytes
                found = (temporary / plan.name).stat().st_size
                if found != expected:
                    raise OSError(
                        f"{plan.name} has {found} bytes on the disk instead of {expected}"
                    )
            sync(temporary)
            put_in_place(final)
        except OSError as caught:
            error = caught
    rank_sync.raise_together(error)


def _open_temporary(final: Path, rank_sync: RankSync) -> list[int]:
    """Make the hidden folder on rank 0; return the ranks that see it and so can write there.

    On several nodes without a shared file system only the first node's ranks do.
    """
    error: Exception | None = None
    if rank_sync.rank == 0:
        try:
            open_hidden(final)
        except OSError as caught:
            error = caught
    rank_sync.raise_together(error)
    sees = rank_sync.rank == 0 or hidden_path(final).is_dir()
    return [rank for rank, note in enumerate(rank_sync.gather("yes" if sees else None)) if note]


def _write_small_files(
    temporary: Path,
    plans: Sequence[FilePlan],
    config: Mapping[str, Any],
    extra_files: Sequence[Path],
) -> None:
    contents = {CONFIG_NAME: dict(config)}
    if len(plans) > 1:
        contents[INDEX_NAME] = {
            "metadata": {"total_size": sum(plan.num_bytes for plan in plans)},
            "weight_map": {name: plan.name for plan in plans for name in plan.shapes},
        }
    for name, content in contents.items():
        write_text(temporary / name, json.dumps(content, indent=2) + "\n")
    for source in extra_files:
        # copyfile, not copy: a read-only original must not make the copy read-only.
        if source.is_dir():
            shutil.copytree(source, temporary / source.name, copy_function=shutil.copyfile)
            for copied in (temporary / source.name).rglob("*"):
                sync(copied)
        else:
            shutil.copyfile(source, temporary / source.name)
        sync(temporary / source.name)
