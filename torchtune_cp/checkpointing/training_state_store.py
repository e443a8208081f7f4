"""Training checkpoints on the disk: complete under their name, or absent.

A checkpoint is `PARENT/step_N`: safetensors files with the shards of all ranks, and
`checkpoint.json` (`torchtune_cp.checkpointing.manifest`). It is written as a hidden folder,
every file synced, and renamed once by rank 0 when all ranks have written. Planning, the choice
among replicas and resharding are torch.distributed.checkpoint's; no file is ever a pickle.

All communication goes through the given `RankSync`,
so a checkpoint can be written by a background thread with a separate RankSync while the
training communicates.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchtune_cp.checkpointing.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    check_file,
    check_plain,
    check_size,
    manifest_text,
    read_manifest,
)
from torchtune_cp.checkpointing.rank_sync import RankSync, RemoteError
from torchtune_cp.checkpointing.shard_files import (
    ShardReader,
    ShardSavePlanner,
    ShardWriter,
    check_savable,
)
from torchtune_cp.checkpointing.shard_table import StoredTensor, read_stored_tensors
from torchtune_cp.config.secrets import is_private
from torchtune_cp.durable import (
    REPLACED_SUFFIX,
    TEMPORARY_SUFFIX,
    delete_hidden,
    hidden_name,
    make_folders,
    remove_folder,
    rename_into_place,
    sync,
    write_text,
)
from torchtune_cp.errors import UserError

__all__ = [
    "Manifest",
    "StoredTensor",
    "list_checkpoints",
    "load_tensors",
    "other_checkpoints",
    "read_manifest",
    "remove_checkpoint",
    "remove_leftovers",
    "stored_tensors",
    "verify_checkpoint",
    "write_checkpoint",
]

_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_HIDDEN_NAME = re.compile(
    rf"\.(step_(?:0|[1-9][0-9]{{0,17}}))\.[0-9a-f]{{8}}({re.escape(TEMPORARY_SUFFIX)}"
    rf"|{re.escape(REPLACED_SUFFIX)})"
)
_MAX_LISTED = 4


def write_checkpoint(
    parent: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    manifest: Mapping[str, Any],
    rank_sync: RankSync,
) -> Path:
    """Write `parent/step_N`; collective, every rank must call it.

    A rank holds no second copy of its shards: they are written tensor by tensor. The tensors must
    not change before it returns.

    Args:
        parent: The folder of all checkpoints, seen by all ranks; it is made if need be.
        step: Optimizer steps done; an earlier checkpoint of this step is replaced.
        tensors: Name to tensor. Of a DTensor every rank writes its shard (replicas once), of a
            plain tensor any rank its own: it must be equal on all ranks that name it. Names may
            differ from rank to rank.
        manifest: Plain JSON values to keep, read on rank 0.
        rank_sync: Synchronises the ranks; must not be used by others at the same time.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: This rank could not write (disk full, no permission). Nothing is visible then and
            earlier checkpoints are untouched.
        RemoteError: Another rank failed.
        UserError: A tensor is of a kind that cannot be saved.
    """
    final = parent / f"step_{step}"
    temporary = parent / rank_sync.gather(hidden_name(final, TEMPORARY_SUFFIX).name)[0]
    error: Exception | None = None
    try:
        check_savable(tensors)
        if rank_sync.rank == 0:
            check_plain(manifest)
            make_folders(parent)
            temporary.mkdir()
    except Exception as caught:  # noqa: BLE001 - made known to all ranks, then raised
        error = caught
    try:
        rank_sync.raise_together(error)
        _require_shared(temporary, rank_sync)
        writer = ShardWriter(temporary, rank_sync.rank)
        with torch.no_grad(), _as_own_errors(rank_sync.rank), _quiet_alone():
            dcp.save(
                dict(tensors),
                storage_writer=writer,
                planner=ShardSavePlanner(),
                process_group=rank_sync.group,
                no_dist=rank_sync.group is None,
            )
        rank_sync.raise_together(writer.error)
        files = [record for record in rank_sync.gather(writer.record) if record is not None]
        error = None
        if rank_sync.rank == 0:
            try:
                _complete(temporary, final, step, manifest, files, writer.table)
            except Exception as caught:  # noqa: BLE001 - made known to all ranks, then raised
                error = caught
        rank_sync.raise_together(error)
    except BaseException:
        # All ranks are out of the folder: they have met after writing.
        if rank_sync.rank == 0:
            delete_hidden(temporary)
        raise
    return final


def _require_shared(temporary: Path, rank_sync: RankSync) -> None:
    error = None
    if not temporary.is_dir():
        error = FileNotFoundError(
            f"{temporary.parent} is not shared with rank 0: a training checkpoint needs a file "
            "system that all nodes see"
        )
    rank_sync.raise_together(error)


def _complete(
    temporary: Path,
    final: Path,
    step: int,
    state: Mapping[str, Any],
    files: list[FileRecord],
    table: Mapping[str, Any],
) -> None:
    """Check that all files exist, write the manifest and make the checkpoint visible."""
    for file in files:
        try:
            check_size(temporary, file)
        except UserError as error:
            raise OSError(f"{temporary}: {error}") from error
    text = manifest_text(step, files, table, state)
    write_text(temporary / MANIFEST_NAME, text, mode=0o600 if is_private(text) else 0o666)
    sync(temporary)
    replaced = hidden_name(final, REPLACED_SUFFIX)
    rename_into_place(temporary, final, replaced)
    if replaced.exists():
        remove_folder(replaced, final)


@contextmanager
def _as_own_errors(rank: int) -> Iterator[None]:
    """Raise a failure of planning, which torch has made known to all ranks, as what it was."""
    try:
        yield
    except dcp.CheckpointException as failure:
        if rank in failure.failures:
            raise failure.failures[rank][0] from None
        first = min(failure.failures)
        error = failure.failures[first][0]
        raise RemoteError(f"rank {first}: {type(error).__name__}: {error}") from None


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Hide torch's remark that a single process saves without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return name, shape and type of every tensor of a checkpoint; opens `checkpoint.json` only.

    Args:
        folder: The checkpoint.

    Raises:
        UserError: The checkpoint cannot be used.
    """
    return read_stored_tensors(read_manifest(folder))


def load_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    rank_sync: RankSync,
    *,
    optional_prefixes: tuple[str, ...] = ("rng.",),
) -> None:
    """Read a checkpoint's tensors into the given ones, in place; collective, every rank must call it.

    Any mesh and placements will do: a rank reads the slices that its shards need. Checksums are not
    looked at here: call `verify_checkpoint` first.

    Args:
        folder: The checkpoint.
        tensors: Name to tensor or DTensor, on any device. Their content is undefined after an
            error that occurs while the bytes are read.
        rank_sync: Where the ranks wait for each other.
        optional_prefixes: Stored tensors whose names begin so may go unread.

    Raises:
        UserError: On every rank: the checkpoint cannot be used, or names, shapes or types are
            not those of `tensors`.
    """
    stored: dict[str, StoredTensor] = {}
    problem: str | None = None
    try:
        stored = stored_tensors(folder)
        _check_match(folder, tensors, stored)
    except UserError as error:
        problem = str(error)
    notes = rank_sync.gather((problem, sorted(tensors)))
    _raise_first(note[0] for note in notes)
    wanted = {name for _, names in notes for name in names}
    unread = [
        name for name in stored if name not in wanted and not name.startswith(optional_prefixes)
    ]
    if unread:
        raise UserError(
            f"cannot use checkpoint {folder}: it holds tensors that this run does not have: "
            f"{_some(unread)}"
        )
    reader = ShardReader(stored)
    with torch.no_grad(), _as_own_errors(rank_sync.rank), _quiet_alone():
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=rank_sync.group,
            no_dist=rank_sync.group is None,
        )
    problem = None if reader.error is None else f"cannot use checkpoint {folder}: {reader.error}"
    _raise_first(rank_sync.gather(problem))


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _check_match(
    folder: Path, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> None:
    missing = [name for name in tensors if name not in stored]
    other = [
        f"{name} is {list(stored[name].shape)} {stored[name].dtype} there and "
        f"{list(tensor.shape)} {tensor.dtype} here"
        for name, tensor in tensors.items()
        if name in stored
        and (stored[name].shape, stored[name].dtype) != (tuple(tensor.shape), tensor.dtype)
    ]
    problems = [
        *([f"it lacks {_some(missing)}"] if missing else []),
        *([_some(other)] if other else []),
    ]
    if problems:
        raise UserError(f"cannot use checkpoint {folder}: {'; '.join(problems)}")


def _raise_first(problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise UserError(problem)


def verify_checkpoint(folder: Path, rank_sync: RankSync | None = None) -> Manifest:
    """Check that a checkpoint is intact: every file exists with its recorded size and checksum.

    With a RankSync it is collective: every rank must call it; each reads a part of the files.

    Args:
        folder: The checkpoint.
        rank_sync: Where the ranks wait for each other, or None to read everything here.

    Returns:
        The content of `checkpoint.json`.

    Raises:
        UserError: With the same message on every rank: what is wrong, in one line.
    """
    rank, world_size = (rank_sync.rank, rank_sync.world_size) if rank_sync else (0, 1)
    manifest: Manifest | None = None
    problem: str | None = None
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        problem = str(error)
    note = (problem, manifest.checksum if manifest else None)
    notes = rank_sync.gather(note) if rank_sync else [note]
    _raise_first(note[0] for note in notes)
    assert manifest is not None  # this rank has no problem either
    if len({checksum for _, checksum in notes}) > 1:
        raise UserError(f"cannot use checkpoint {folder}: the ranks see different folders there")
    found: list[str] = []
    for file in _share(manifest, rank, world_size):
        try:
            check_file(folder, file)
        except UserError as error:
            found.append(str(error))
    lists = rank_sync.gather(found) if rank_sync else [found]
    problems = sorted(problem for problems in lists for problem in problems)
    if problems:
        raise UserError(f"cannot use checkpoint {folder}: {'; '.join(problems[:_MAX_LISTED])}")
    return manifest


def _share(manifest: Manifest, rank: int, world_size: int) -> list[FileRecord]:
    """This rank's part of the files: the next largest always goes to whoever has the least."""
    loads = [0] * world_size
    mine = []
    for file in sorted(manifest.files, key=lambda file: (-file.num_bytes, file.name)):
        owner = loads.index(min(loads))
        loads[owner] += file.num_bytes
        if owner == rank:
            mine.append(file)
    return mine


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the folders named as checkpoints, the newest step first; opens nothing.

    Args:
        parent: The folder of all checkpoints; it may be missing.
    """
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("step_")))


def other_checkpoints(parent: Path) -> list[Path]:
    """Return the checkpoints under names that no run gives: `step_04`, `step_4 (copy)`.

    Args:
        parent: The folder of all checkpoints; it may be missing.
    """
    if not parent.is_dir():
        return []
    return sorted(
        path
        for path in parent.iterdir()
        if not path.name.startswith(".")
        and not _STEP_NAME.fullmatch(path.name)
        and (path / MANIFEST_NAME).is_file()
    )


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; it loses its name in one step.

    Args:
        folder: The checkpoint, `step_N`.

    Raises:
        OSError: It could not be renamed; it is untouched.
    """
    assert _STEP_NAME.fullmatch(folder.name), folder
    remove_folder(folder)


def remove_leftovers(parent: Path) -> list[Path]:
    """Delete what killed runs left half written; call it on one rank while nothing is being saved.

    A complete checkpoint that was moved aside just before its successor could take its name gets
    its name back.

    Args:
        parent: The folder of all checkpoints; it may be missing.

    Returns:
        The hidden folders that were handled.
    """
    if not parent.is_dir():
        return []
    done = []
    for path in sorted(parent.iterdir()):
        match = _HIDDEN_NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        final = parent / match[1]
        if match[2] == REPLACED_SUFFIX and not final.exists():
            path.rename(final)
            sync(parent)
        else:
            delete_hidden(path)
        done.append(path)
    return done
