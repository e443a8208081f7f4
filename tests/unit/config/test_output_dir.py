"""What a run will write is tried before it trains, and a start costs an earlier run nothing."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_cp.config import output_lock, validate
from torchtune_cp.config.output_dir import check_output
from torchtune_cp.config.output_lock import LOCK_NAME, OutputLock, Owner
from torchtune_cp.errors import ConfigError

from .examples import minimal


def check(output_dir: str | Path, **keys: Any) -> None:
    check_output(OmegaConf.create({"output_dir": str(output_dir), **keys}))


def refused(output_dir: str | Path, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(output_dir, **keys)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def tree(folder: Path) -> dict[str, bytes]:
    """Everything in a folder but the lock, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder"
        for path in folder.rglob("*")
        if path.name != LOCK_NAME
    }


# --- every path, before anything starts -------------------------------------------------------------
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_output_dir_is_refused_by_validate_too(text: str) -> None:
    assert "is empty" in refused(text)
    assert validate(OmegaConf.create(minimal() | {"output_dir": text})) == ["output_dir: is empty"]


def test_paths_are_relative_with_a_tilde_or_from_a_variable_and_never_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WHERE", str(tmp_path / "variable"))
    for given in ("relative/out", "~/out", "${oc.env:WHERE}/out"):
        check(given)
    for made in ("relative/out", "home/out", "variable/out"):
        assert (tmp_path / made).is_dir()
    assert "${oc.env:NAME}" in refused("$WHERE/out")
    assert "no_such_user" in refused("~no_such_user/out")
    assert "NUL" in refused("a\0b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "relative", "variable"]


def test_what_stands_where_something_else_is_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for given, said in {
        file: "is a file, not a folder",
        file / "below": f"{file} is a file, not a folder",
        tmp_path / "dangling": "is a link to",
        tmp_path / "dangling" / "below": "is a link to",
        tmp_path / "pipe": "a named pipe",
        tmp_path / "loop": "cannot be used",
        tmp_path / ("n" * 300): "cannot be used",
        Path("/dev/full"): "is a device",
        Path("/proc/out"): "cannot write in",
        Path("/sys/out"): "cannot write in",
    }.items():
        assert said in refused(given), given

    def fill(name: str, how: str) -> Path:
        folder = tmp_path / f"{name} {how}"
        folder.mkdir()
        path = folder / name
        if how == "folder":
            path.mkdir()
        elif how == "file":
            path.write_text("")
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "device":
            path.symlink_to("/dev/full")
        elif how == "unwritable":
            path.symlink_to("/proc/self")
        else:
            path.symlink_to(folder / "gone")
        return folder

    for name in ("config.yaml", "metrics.jsonl", "logger_run.json", LOCK_NAME):
        for how in ("folder", "pipe", "device", "dangling"):
            assert name in refused(fill(name, how)), how
    for name in ("checkpoints", "final"):
        for how in ("file", "pipe", "device", "dangling", "unwritable"):
            assert name in refused(fill(name, how)), how


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"metric_logger": {"_component_": "a.DiskLogger", "log_dir": "{}"}}, "log_dir"),
        ({"metric_logger": {"_component_": "a.WandBLogger", "dir": "{}"}}, "metric_logger.dir"),
        ({"metric_logger": {"_component_": "a.StdoutLogger", "log_dir": "{}"}}, None),
        ({"profiler": {"enabled": True, "output_dir": "{}"}}, "profiler.output_dir"),
        ({"profiler": {"enabled": False, "output_dir": "{}"}}, None),
    ],
)
def test_folders_of_logs_are_tried_if_the_run_writes_there(
    tmp_path: Path, keys: dict[str, Any], named: str | None
) -> None:
    (tmp_path / "file").write_text("")
    for bad in (str(tmp_path / "file"), "/proc/logs", ""):
        filled = json.loads(json.dumps(keys).replace("{}", bad))
        if named is None:
            check(tmp_path / "out", **filled)
        else:
            assert named in refused(tmp_path / "out", **filled)


def test_a_pipe_in_the_place_of_a_log_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.txt")
    logger = {"_component_": "a.DiskLogger", "log_dir": str(tmp_path), "filename": "log.txt"}
    assert "metric_logger.filename" in refused(tmp_path / "out", metric_logger=logger)


def test_nothing_is_left_of_trying(tmp_path: Path) -> None:
    logger = {"_component_": "a.DiskLogger", "log_dir": "${output_dir}/logs"}
    check(tmp_path / "out", metric_logger=logger)
    assert tree(tmp_path / "out") == {"logs": b"a folder"}


# --- a start over a run ------------------------------------------------------------------------------
def a_run(folder: Path, *parts: str) -> Path:
    """A folder as a run leaves it, or some of its parts."""
    contents = {
        "config.yaml": "seed: 0\n",
        "metrics.jsonl": '{"step": 1, "loss": 1.0}\n',
        "checkpoints/step_4/checkpoint.json": "{}",
        "final/model.safetensors": "weights",
    }
    for name in parts or contents:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(contents[name])
    return folder


@pytest.mark.parametrize(
    "part",
    [
        *("config.yaml", "metrics.jsonl", "checkpoints/step_4/checkpoint.json"),
        "final/model.safetensors",
    ],
)
def test_any_part_of_a_run_keeps_a_start_over_away_and_is_not_touched(
    tmp_path: Path, part: str
) -> None:
    folder = a_run(tmp_path / "out", part)
    before = tree(folder)
    for resume in (False, str(a_run(tmp_path / "other"))):
        for _ in range(2):  # a refused start must not make the next one look different
            line = refused(folder, resume_from_checkpoint=resume)
            for way_out in ("resume_from_checkpoint=true", "another output_dir", "overwrite=true"):
                assert way_out in line
            assert part.partition("/")[0] in line
    assert tree(folder) == before
    check(folder, overwrite=True)
    assert tree(folder) == before


def test_what_continues_a_run_is_let_through_and_what_would_begin_again_is_not(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "out")
    (tmp_path / "link").symlink_to(folder)
    own = ["", "checkpoints", "checkpoints/step_4"]
    for resume in (
        True,
        *(str(root / name) for root in (folder, tmp_path / "link") for name in own),
    ):
        check(folder, resume_from_checkpoint=resume)
    assert "does not continue it" in refused(folder, resume_from_checkpoint=str(folder / "final"))
    # Finished without a checkpoint: going on would mean to begin again over the result.
    done = a_run(tmp_path / "done", "metrics.jsonl", "final/model.safetensors")
    assert "it left no checkpoint" in refused(done, resume_from_checkpoint=True)
    # Ended before its first checkpoint: a requeued job begins again.
    check(a_run(tmp_path / "early", "metrics.jsonl"), resume_from_checkpoint=True)


def test_what_a_failed_start_leaves_and_a_users_own_files_are_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "notes.txt").write_text("mine")
    (folder / "checkpoints").mkdir()
    (folder / "metrics.jsonl").write_text("")
    check(folder)
    lock = OutputLock(folder)
    lock.take(Owner.here())
    lock.hold(Owner.here())
    lock.release()
    (folder / "config.yaml").write_text("written by a start that failed before its first step")
    check(folder)


# --- one run, one folder -----------------------------------------------------------------------------
def left_by(folder: Path, **changes: Any) -> None:
    """Leave the record of a run that has not said that it ended."""
    folder.mkdir(exist_ok=True)
    record = vars(Owner.here()) | changes
    (folder / LOCK_NAME).write_text(json.dumps(record))


def test_a_dead_process_of_this_host_holds_nothing_and_its_successor_under_the_same_id_neither(
    tmp_path: Path,
) -> None:
    for changes in ({"pid": 2**30}, {"started": 1}, {"ended": True}):
        left_by(tmp_path / "out", **changes)
        check(tmp_path / "out")
    for text in ("", "{", "[" * 10000, '{"pid": "x"}', "\0" * 100):
        (tmp_path / "out" / LOCK_NAME).write_text(text)
        check(tmp_path / "out")


def test_a_launcher_that_would_start_its_ranks_again_keeps_the_folder(tmp_path: Path) -> None:
    left_by(tmp_path / "out", pid=2**30, launcher=os.getppid())
    line = refused(tmp_path / "out", overwrite=True)
    assert f"process {os.getppid()} " in line
    assert socket.gethostname() in line


def test_a_process_of_another_host_keeps_the_folder_while_it_gives_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output_lock, "_PATIENCE_S", 1.0)
    for elsewhere in ({"host": "node7"}, {"namespace": "pid:[1]"}):
        left_by(tmp_path / "out", pid=77, **elsewhere)
        lock = tmp_path / "out" / LOCK_NAME
        beat = threading.Timer(0.3, lambda lock=lock: os.utime(lock))
        beat.start()
        line = refused(tmp_path / "out", overwrite=True)
        beat.join()
        assert f"process 77 on host {elsewhere.get('host', socket.gethostname())}" in line
        began = time.monotonic()
        check(tmp_path / "out")
        assert time.monotonic() - began >= 1.0
        assert "waiting 1 s for a sign of life" in capsys.readouterr().err
        check(tmp_path / "out")  # taken over: nobody waits a second time
        assert capsys.readouterr().err == ""


def test_a_lock_held_by_nobody_who_can_be_named_says_what_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_lock, "_PATIENCE_S", 0.3)
    lock = OutputLock(tmp_path)
    lock.take(Owner.here())
    try:
        assert f"delete {tmp_path / LOCK_NAME}" in refused(tmp_path)
    finally:
        lock.release()
    check(tmp_path)


def test_file_systems_without_locks_are_guarded_by_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(output_lock.fcntl, "flock", no_locks)
    check(tmp_path)
    left_by(tmp_path, pid=os.getppid(), started=None)
    assert f"process {os.getppid()} " in refused(tmp_path)
