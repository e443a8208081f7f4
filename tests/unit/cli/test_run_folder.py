"""Real processes that want the same output folder; the recipe does without torch, to start fast."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

RECIPE = """
import os, time
from pathlib import Path
from torchtune_cp import config

@config.parse
def main(cfg):
    folder = Path(cfg.output_dir)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 1.0}\\n')
    (folder / "checkpoints" / "step_1").mkdir(parents=True, exist_ok=True)
    with (folder / "starts").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if cfg.do == "fork":
        if os.fork() == 0:
            time.sleep(60)  # as a worker that outlives its parent
            os._exit(0)
    if cfg.do != "finish":
        time.sleep(300)

if __name__ == "__main__":
    main()
"""


def _starts(folder: Path) -> list[int]:
    path = folder / "starts"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_one_run_has_a_folder_until_it_dies_and_a_start_over_it_costs_nothing(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    (tmp_path / "my.yaml").write_text(f"output_dir: {out}\ndo: finish\n")
    (tmp_path / "link").symlink_to(out)
    tune = [sys.executable, "-m", "torchtune_cp", "run", "my_recipe.py", "--config", "my.yaml"]
    alone = [sys.executable, "my_recipe.py", "--config", "my.yaml"]

    def start(command: list[str], *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *overrides], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )

    def ended(command: list[str], *overrides: str) -> tuple[int, list[str]]:
        run = start(command, *overrides)
        _, err = run.communicate(timeout=60)
        return run.returncode, err.splitlines()

    def wait_for_starts(count: int, run: subprocess.Popen[str]) -> int:
        deadline = time.monotonic() + 60
        while len(found := _starts(out)) < count:
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found[-1]

    first = start(tune, "do=sleep")
    rank = wait_for_starts(1, first)
    for more in ("overwrite=true", "resume_from_checkpoint=true"):
        code, lines = ended(alone, f"output_dir={tmp_path / 'link'}", more)
        assert code == 2
        (line,) = lines
        assert f"process {first.pid} (its rank 0: {rank}) on host {socket.gethostname()}" in line
    first.send_signal(signal.SIGKILL)

    second = start(alone, "do=fork", "resume_from_checkpoint=true")  # at once
    first.communicate(timeout=60)
    wait_for_starts(2, second)
    code, lines = ended(alone, "overwrite=true")
    assert (code, len(lines)) == (2, 1)
    assert f"process {second.pid} on host" in lines[0]
    second.send_signal(signal.SIGKILL)  # the child that it leaves must not keep the folder
    second.wait(60)
    assert ended(alone, "resume_from_checkpoint=true") == (0, [])

    before = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name[0] != "."}
    for command in (tune, alone):
        code, lines = ended(command)
        assert (code, len(lines)) == (2, 1)
        assert "holds a run already (metrics.jsonl, checkpoints)" in lines[0]
    assert {p: p.stat().st_mtime_ns for p in out.iterdir() if p.name[0] != "."} == before
    assert len(_starts(out)) == 3
    assert ended(alone, "overwrite=true") == (0, [])
    for pid in _orphans(out):
        os.kill(pid, signal.SIGKILL)


def _orphans(out: Path) -> list[int]:
    """The child that the killed second run has left."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(out.parent):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found
