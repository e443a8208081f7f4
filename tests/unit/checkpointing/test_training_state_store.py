"""Training checkpoints on the disk, with one process: bytes, names, refusals, no pickle."""

import json
import logging
import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from torchtune_cp import durable
from torchtune_cp.checkpointing import shard_files, training_state_store
from torchtune_cp.checkpointing.rank_sync import RankSync
from torchtune_cp.checkpointing.training_state_store import (
    list_checkpoints,
    load_tensors,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    stored_tensors,
    verify_checkpoint,
    write_checkpoint,
)
from torchtune_cp.errors import UserError


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.weight": torch.randn(5, 7),
        "model.odd": torch.randn(3).bfloat16(),
        "model.transposed": torch.randn(4, 6).t(),
        "model.empty": torch.zeros(0, 3),
        "model.nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "optimizer.state.weight.step": torch.tensor(3.0),
        "optimizer.state.weight.flags": torch.tensor([True, False, True]),
        "optimizer.state.weight.count": torch.arange(5),
        "rng.0.cpu": torch.get_rng_state(),
    }


def _write(parent: Path, step: int = 3, **state: Any) -> Path:
    return write_checkpoint(parent, step, _tensors(), state, RankSync())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _load(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.ones_like(value) for name, value in _tensors().items()}
    load_tensors(folder, tensors, RankSync())
    return tensors


def _assert_loads(folder: Path) -> None:
    loaded = _load(folder)
    assert {name: _bytes(value) for name, value in loaded.items()} == {
        name: _bytes(value) for name, value in _tensors().items()
    }


def test_every_type_and_shape_comes_back_bit_equal_and_into_the_given_tensors(
    tmp_path: Path,
) -> None:
    folder = _write(tmp_path / "new" / "checkpoints", epoch=2, losses=[1.5, None, float("nan")])
    assert folder == tmp_path / "new" / "checkpoints" / "step_3"
    manifest = verify_checkpoint(folder)
    assert manifest.step == 3
    assert manifest.state["epoch"] == 2
    assert json.dumps(manifest.state["losses"]) == "[1.5, null, NaN]"
    weight = torch.zeros(5, 7)
    view = weight.t()  # not contiguous: filled where it lies
    tensors = {**_tensors(), "model.weight": view.t()}
    load_tensors(folder, tensors, RankSync())
    assert torch.equal(weight, _tensors()["model.weight"])
    _assert_loads(folder)
    assert {name: (t.shape, t.dtype) for name, t in stored_tensors(folder).items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in _tensors().items()
    }


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    (file,) = folder.glob("*.safetensors")
    assert torch.equal(load_file(file)["model.weight"], _tensors()["model.weight"])
    tensors = {name: torch.zeros_like(value) for name, value in _tensors().items()}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert torch.equal(tensors["model.weight"], _tensors()["model.weight"])


def test_no_pickle_is_written_or_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle")

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "dump"),
        (pickle, "dumps"),
        (pickle, "Unpickler"),
        (pickle, "Pickler"),
        (torch, "load"),
        (torch, "save"),
    ):
        monkeypatch.setattr(module, name, refuse)
    found: list[str] = []
    watching = [True]

    def watch(event: str, _: Any) -> None:  # sees every unpickler, however it was imported
        if watching[0] and event == "pickle.find_class":
            found.append(event)

    sys.addaudithook(watch)
    try:
        folder = _write(tmp_path)
        verify_checkpoint(folder)
        _assert_loads(folder)
    finally:
        watching[0] = False
    assert not found
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]


def test_a_save_holds_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(1000, 1000)
    pieces: list[tuple[int, int]] = []
    write = shard_files._write

    def note(file: Any, data: bytes | memoryview) -> None:
        address = 0
        if isinstance(data, memoryview):
            import numpy as np

            address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        pieces.append((address, len(data)))
        write(file, data)

    monkeypatch.setattr(shard_files, "_write", note)
    tracemalloc.start()
    write_checkpoint(tmp_path, 1, {"a": weight, "b": weight.detach()}, {}, RankSync())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pieces[1:] == [(weight.data_ptr(), 4_000_000)] * 2  # the tensor's own memory
    assert peak < 1_000_000  # Python's side: the header and the plan


def test_a_load_reads_only_the_slices_it_needs(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path,
        1,
        {"a": torch.arange(24.0).reshape(6, 4), "s": torch.tensor(2.0)},
        {},
        RankSync(),
    )
    stored = stored_tensors(folder)
    reader = shard_files.ShardReader(stored)
    asked = []
    original = shard_files._read_slice

    def note(file: Any, item: Any) -> torch.Tensor:
        part = original(file, item)
        asked.append(part.numel())
        return part

    target = {"a": torch.zeros(6, 4)}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    shard_files._read_slice, keep = note, original
    try:
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    finally:
        shard_files._read_slice = keep
    assert asked == [24]


def test_the_same_step_again_replaces_the_folder_and_nothing_is_left(tmp_path: Path) -> None:
    _write(tmp_path, run=1)
    folder = _write(tmp_path, run=2)
    assert read_manifest(folder).state == {"run": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_a_rename_that_fails_leaves_the_earlier_checkpoint_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, run=1)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(durable.TEMPORARY_SUFFIX):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        _write(tmp_path, run=2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
    assert verify_checkpoint(tmp_path / "step_3").state == {"run": 1}


def test_everything_is_synced_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename, replace = os.fsync, Path.rename, Path.replace

    def note_sync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def note_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    def note_replace(self: Path, target: Path) -> Path:
        events.append(target.name)
        return replace(self, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to see which file is synced")
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(Path, "replace", note_replace)
    _write(parent)
    # A file's name is on the disk when its folder was synced: `.step_3.` and a random end.
    shards, description, named, *folders, renamed, above = events
    assert (shards, named) == ("rank_00000.safetensors", "checkpoint.json")
    assert description.startswith(".checkpoint.json.")
    assert folders
    assert all(folder.startswith(".step_3.") for folder in folders)
    assert (renamed, above) == ("rename", "checkpoints")


def test_only_complete_names_are_listed_the_newest_first(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    for step in (2, 10, 9):
        _write(tmp_path, step)
    for name in (".step_11.00000000.tmp", "step_012", "step_x", "step_-1", "step_13.tmp", "final"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_14").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_10", "step_9", "step_2"]
    remove_checkpoint(tmp_path / "step_9")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_10", "step_2"]


def test_leftovers_of_killed_runs_go_and_a_checkpoint_moved_aside_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path, 1, run=1)
    _write(tmp_path, 2, run=1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    (tmp_path / "step_1").rename(parent / ".step_1.01234567.replaced")  # died between two renames
    (tmp_path / "step_2").rename(parent / "step_2")
    (parent / ".step_2.01234567.replaced").mkdir()  # died before the replaced one was deleted
    (parent / ".step_3.89abcdef.tmp").mkdir()
    (parent / ".step_3.89abcdef.tmp" / "rank_00000.safetensors").write_bytes(b"half")
    (parent / ".step_4.89abcdef.tmp").symlink_to(outside)
    (parent / ".step_5.tmp").mkdir()  # not a name of ours
    assert len(remove_leftovers(parent)) == 3
    assert sorted(path.name for path in parent.iterdir()) == [
        ".step_4.89abcdef.tmp",
        ".step_5.tmp",
        "step_1",
        "step_2",
    ]
    assert verify_checkpoint(parent / "step_1").state == {"run": 1}
    assert (outside / "kept").exists()
    assert remove_leftovers(tmp_path / "none") == []
    # What cannot be deleted is named, and ends nothing.
    (parent / ".step_6.89abcdef.tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(durable.shutil, "rmtree", _cannot)
        remove_leftovers(parent)
    assert ".step_6.89abcdef.tmp" in caplog.text


def _cannot(*_: Any) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.weight": torch.zeros(7, 5)}, r"model.weight is \[5, 7\] torch.float32 there and"),
        ({"model.weight": torch.zeros(5, 7).bfloat16()}, r"\[5, 7\] torch.bfloat16 here"),
        ({"model.weight": None}, "it holds tensors that this run does not have: model.weight"),
        ({"model.new": torch.zeros(1)}, "it lacks model.new"),
        ({"rng.0.cpu": None}, None),  # another world size: allowed
    ],
)
def test_tensors_that_are_not_those_of_the_run_are_named(
    tmp_path: Path, change: dict[str, Any], says: str | None
) -> None:
    folder = _write(tmp_path)
    tensors = {name: value for name, value in {**_tensors(), **change}.items() if value is not None}
    if says is None:
        load_tensors(folder, tensors, RankSync())
        return
    before = {name: _bytes(value) for name, value in tensors.items()}
    with pytest.raises(UserError, match=says) as caught:
        load_tensors(folder, tensors, RankSync())
    assert "\n" not in str(caught.value)
    assert {name: _bytes(value) for name, value in tensors.items()} == before


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: "a"}, {"a": torch.zeros(1)}, {"a": {2: 3}}])
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, 1, {}, state, RankSync())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2).as_subclass(type("Quantised", (torch.Tensor,), {})), "Quantised"),
    ],
)
def test_tensors_that_bytes_do_not_describe_are_refused(
    tmp_path: Path, tensor: torch.Tensor, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        write_checkpoint(tmp_path, 1, {"optimizer.state.w.m": tensor}, {}, RankSync())
    assert list_checkpoints(tmp_path) == []


def test_a_parent_that_is_a_file_or_read_only_is_an_os_error_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OSError, match="file"):
        _write(tmp_path / "file")
    monkeypatch.setattr(training_state_store, "make_folders", _cannot)
    with pytest.raises(PermissionError):
        _write(tmp_path / "new")


def test_a_file_in_the_place_of_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "step_3").write_text("the user's")
    with pytest.raises(FileExistsError):
        _write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
    assert (tmp_path / "step_3").read_text() == "the user's"


@pytest.mark.parametrize(
    ("version", "says"), [(3, "update torchtune_cp"), (1, "finish the run with the version")]
)
def test_a_newer_or_older_format_is_refused_in_words(
    tmp_path: Path, version: int, says: str
) -> None:
    folder = _write(tmp_path)
    path = folder / "checkpoint.json"
    text = path.read_text().replace('"format_version": 2', f'"format_version": {version}')
    path.write_text(text)
    with pytest.raises(UserError, match=rf"format_version is {version}.* {says}"):
        read_manifest(folder)
