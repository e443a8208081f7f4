"""A full, read-only, vanished or damaged disk: one clear line, and the last good checkpoint stays.

The causes are real: a small file system of the test's own, which is filled up and mounted read-only.
Where the system does not let a user mount one, the kernel's limit of file sizes takes its place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.runs import (
    START_LIMIT_S,
    STEPS,
    Start,
    curve,
    run_uninterrupted,
    write_config,
)
from tests.faults.slow_disk import FILE_LIMIT_VARIABLE
from torchtune_cp.checkpointing.training_state_store import list_checkpoints, verify_checkpoint

ROOT = Path(__file__).parents[2]


def _on_a_small_disk(
    folder: Path, kilobytes: int, command: list[str]
) -> subprocess.CompletedProcess:
    """Run a command with a tmpfs mounted at ``folder``, seen by it alone."""
    folder.mkdir(parents=True, exist_ok=True)
    script = f'mount -t tmpfs -o size={kilobytes}k tmpfs "$0" && exec "$@"'
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(folder), *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


def _can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return _on_a_small_disk(folder, 64, ["true"]).returncode == 0


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What :mod:`tests.faults.bad_disks` reports."""
    folder = tmp_path_factory.mktemp("disk")
    if not _can_mount(folder / "try"):
        pytest.skip("this system does not let a user mount a file system (unshare, mount)")
    done = _on_a_small_disk(
        folder / "small",
        2048,
        [sys.executable, "-m", "tests.faults.bad_disks", str(folder / "small")],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("action", ["raise", "continue"])
def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(results, asynchronous, action):
    result = results[f"full {asynchronous} {action}"]
    said = result["told"][1] if action == "raise" else result["logged"][0]
    assert result["told"][0] is None
    assert result["told"][2] is None
    assert "could not save checkpoint step_2" in said
    assert "No space left on device" in said
    assert "on_save_error=continue" in said
    assert "\n" not in said
    assert result["logged"] == ([] if action == "raise" else [said])
    assert result["while_full"] == ["step_1"]
    assert result["after"] == ["step_3", "step_1"]


def test_a_disk_that_turns_read_only_is_one_line(results):
    result = results["read-only"]
    assert result["told"][0] is result["told"][2] is None
    assert "Read-only file system" in result["told"][1]
    assert "\n" not in result["told"][1]
    assert result["meanwhile"] == ["step_1"]
    assert result["after"] == ["step_3", "step_1"]


def test_a_disk_is_tried_before_training_a_full_one_is_a_failure_and_a_read_only_one_a_refusal(
    results,
):
    result = results["tried"]
    kind, said = result["full"]
    assert kind == "UserError"
    assert "No space left on device" in said
    for kind, said in result["read-only"]:
        assert kind == "ConfigError"
        assert "output_dir: cannot write in" in said
        assert "Read-only file system" in said
        assert "\n" not in said
    assert result["after"] == ["", ""]


def test_a_vanished_folder_is_made_again_and_a_file_in_its_place_is_one_line(results):
    result = results["vanished"]
    assert result["told"] == [None, None, None]  # on_save_error is continue
    assert result["again"] == ["step_2"]
    (line,) = result["logged"]
    assert "could not save checkpoint step_3" in line
    assert "\n" not in line
    assert result["file"] == "a file"


def test_damaged_checkpoints_are_skipped_for_the_newest_whole_one_with_the_reasons(results):
    result = results["damaged"]
    assert result["found"] == "step_1"
    logged = result["logged"]
    assert [line.split(":")[0] for line in logged] == [f"skipped step_{n}" for n in (6, 5, 4, 3, 2)]
    assert all("\n" not in line for line in logged)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_disk_fills_up_ends_with_one_line_and_resumes_elsewhere(tmp_path):
    """Two ranks through the command line: the third save does not fit."""
    if not _can_mount(tmp_path / "try"):
        pytest.skip("this system does not let a user mount a file system (unshare, mount)")
    config = write_config(tmp_path / "config.yaml")
    run_uninterrupted(config, tmp_path / "reference")
    saved = tmp_path / "out"
    whole = run_uninterrupted(config, tmp_path / "sized", "max_steps_per_epoch=2", "epochs=1")
    one = sum(p.stat().st_size for p in (whole.output_dir / "checkpoints").rglob("*")) // 1024
    disk = tmp_path / "disk"
    command = (
        f"{sys.executable} -m torchtune_cp run --nproc_per_node 2 full_finetune_distributed"
        f" --config {config} output_dir={disk}/out; code=$?; cp -r {disk}/out {saved}; exit $code"
    )
    os.environ["TUNE_ALLOW_COMPONENTS"] = "tests"
    done = _on_a_small_disk(disk, int(one * 2.6), ["sh", "-c", command])
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    (error,) = errors
    assert "could not save checkpoint step_6" in error
    assert "No space left on device" in error
    assert "Traceback" not in done.stderr
    checkpoints = list_checkpoints(saved / "checkpoints")
    assert [path.name for path in checkpoints] == ["step_4", "step_2"]
    for path in checkpoints:
        verify_checkpoint(path)
    run_uninterrupted(config, saved, "resume_from_checkpoint=true")
    assert curve(saved) == curve(tmp_path / "reference")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_goes_on_without_its_checkpoints_when_told_so(tmp_path):
    """Files of a checkpoint grow beyond a limit of the kernel's; those of the result do not."""
    config = write_config(tmp_path / "config.yaml")
    run_uninterrupted(config, tmp_path / "reference")
    weights = (tmp_path / "reference" / "final" / "model.safetensors").stat().st_size
    start = Start(
        config,
        tmp_path / "out",
        "on_save_error=continue",
        **{FILE_LIMIT_VARIABLE: str(weights * 5 // 4)},
    )
    try:
        assert start.end() == 0, start.said()
        lines = [line for line in start.said().splitlines() if "could not save" in line]
    finally:
        start.close()
    assert len(lines) == STEPS // 2
    assert all("File too large" in line for line in lines)
    assert curve(tmp_path / "out") == curve(tmp_path / "reference")
    assert list_checkpoints(tmp_path / "out" / "checkpoints") == []
    model = "final/model.safetensors"
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "reference" / model).read_bytes()
