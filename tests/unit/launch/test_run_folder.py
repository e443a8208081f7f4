"""What a launcher that was killed has left is removed by the next one, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtune_cp.launch.run_folder import RunFolder

MAKE_ONE_AND_WAIT = """
from torchtune_cp.launch.run_folder import RunFolder
print(RunFolder.create().path, flush=True)
input()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="needs Linux's /proc")
def test_only_the_folders_of_launchers_that_are_dead_for_certain_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def launcher() -> tuple[subprocess.Popen, Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAKE_ONE_AND_WAIT],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    living, _ = launcher()
    dead, of_the_dead = launcher()
    (of_the_dead / "ready.1").write_text("")
    dead.kill()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    zombie = RunFolder.create()  # the killed one is not collected yet: it is dead all the same
    assert not of_the_dead.exists()
    dead.wait()
    _, _, namespace, pid, began, mark = of_the_dead.name.split("_", 5)
    reused = tmp_path / f"tune_run_{namespace}_{living.pid}_{int(began) - 1}_{'a' * 8}"
    elsewhere = tmp_path / f"tune_run_{'0' * 16}_{pid}_{began}_{mark}"
    target = tmp_path / "target"
    for folder in (
        reused,
        elsewhere,
        target,
        tmp_path / "tune_run_notes",
        tmp_path / "torchelastic_x",
    ):
        folder.mkdir()
    (target / "kept").write_text("")
    of_the_dead.symlink_to(target)
    (tmp_path / f"{of_the_dead.name[:-1]}{'b' if mark[-1] != 'b' else 'c'}").write_text("a file")
    before = {path.name for path in tmp_path.iterdir()}
    own = RunFolder.create()
    # The id of a dead launcher that another process has now is a dead launcher's as well.
    assert before - {path.name for path in tmp_path.iterdir()} == {reused.name}
    assert (target / "kept").exists()
    own.remove()
    zombie.remove()
    living.communicate("\n")
