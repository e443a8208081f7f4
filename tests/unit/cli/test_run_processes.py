"""``tune run`` with real processes: how runs start, fail, and end.

The recipes here do without torch wherever they can, which makes a process start in half a second.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

RECIPE = """
import os, signal, sys, threading, time
from pathlib import Path
from torchtune_cp import config

@config.parse
def main(cfg):
    rank = int(os.environ["RANK"])
    folder = Path(cfg.folder)
    (folder / f"started{rank}").write_text(str(os.getpid()))
    if cfg.do == "finish":
        part = config.instantiate(cfg.part)
        # One write of a whole line: with PYTHONUNBUFFERED, print writes its newline apart, and
        # another rank's line can come between.
        sys.stdout.write(
            f"rank {rank} of {os.environ['WORLD_SIZE']} port {os.environ['MASTER_PORT']}"
            f" threads {os.environ.get('OMP_NUM_THREADS')} part {part} x {cfg.x}\\n")
        return
    if cfg.do == "user error":
        raise config.UserError("x must be 3\\nand y 4")
    if cfg.do == "config error":
        raise config.ConfigError(["x: unknown", "y: unknown"])
    if cfg.do == "raise on 1" and rank == 1:
        threading.Thread(target=time.sleep, args=(300,)).start()  # must not keep the rank alive
        raise RuntimeError("the first cause\\nand its second line")
    if cfg.do == "kill 1" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.do == "exit 3 on 1" and rank == 1:
        sys.exit(3)
    time.sleep(300)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def tune(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Start ``tune run`` on a stand-in recipe in ``tmp_path``, from there."""
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "my_parts.py").write_text("def three():\n    return 3\n")
    (tmp_path / "my.yaml").write_text(
        f"folder: {tmp_path}\ndo: finish\nx: 1\npart: {{_component_: my_parts.three}}\n"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TUNE_TRACEBACK")
    } | {"TMPDIR": str(tmp_path / "temporary")}

    def start(*argv: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "torchtune_cp", "run", *argv],
            cwd=tmp_path,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


MINE = ("--nproc_per_node", "2", "my_recipe.py", "--config", "my.yaml")


def left_over(tmp_path: Path) -> list[str]:
    """What lies in the folder for temporary files."""
    return [path.name for path in (tmp_path / "temporary").iterdir()]


def test_two_runs_at_once_of_a_recipe_of_ones_own(tune: Callable, tmp_path: Path) -> None:
    runs = [tune(*MINE, f"x={i}") for i in (5, 6)]
    ports = set()
    for i, run in zip((5, 6), runs, strict=True):
        out, err = run.communicate(timeout=60)
        assert (run.returncode, err) == (0, "")
        lines = sorted(out.splitlines())
        assert [line.split(" port ")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]
        assert all(line.endswith(f"part 3 x {i}") for line in lines)
        assert f"threads {max(1, len(os.sched_getaffinity(0)) // 2)} " in lines[0]
        ports |= {line.split(" port ")[1].split()[0] for line in lines}
    assert len(ports) == 2
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("do", "code", "said"),
    [
        (
            "raise on 1",
            1,
            ["error: rank 1: RuntimeError: the first cause (TUNE_TRACEBACK=1 shows the traceback)"],
        ),
        ("user error", 1, ["error: x must be 3", "error: and y 4"]),
        ("config error", 2, ["error: x: unknown", "error: y: unknown"]),
        (
            "kill 1",
            1,
            ["error: rank 1 was ended by SIGKILL (often the system ran out of memory)"],
        ),
        ("exit 3 on 1", 1, ["error: rank 1 failed with exit code 3"]),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_cause_alone(
    tune: Callable, tmp_path: Path, do: str, code: int, said: list[str]
) -> None:
    run = tune(*MINE, f"do={do}")
    _, err = run.communicate(timeout=60)  # the other rank would sleep for minutes
    assert run.returncode == code
    assert err.splitlines() == said
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "how", ["variable", "option", pytest.param("config", marks=pytest.mark.slow)]
)
def test_tracebacks_are_shown_when_asked_for(tune: Callable, how: str) -> None:
    options = ("--log-level", "DEBUG") if how == "option" else ()
    overrides = ("log_level=DEBUG",) if how == "config" else ()
    variables = {"TUNE_TRACEBACK": "1"} if how == "variable" else {}
    run = tune(*options, *MINE, "do=user error", *overrides, **variables)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "Traceback (most recent call last)" in err
    assert 'raise config.UserError("x must be 3' in err
    assert err.splitlines()[-2:] == ["error: x must be 3", "error: and y 4"]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has collected yet runs no more.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen within a minute"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_to_the_launcher_ends_every_rank(
    tune: Callable, tmp_path: Path, name: str
) -> None:
    run = tune(*MINE, "do=sleep")
    marks = [tmp_path / f"started{rank}" for rank in (0, 1)]
    _wait_for(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    pids = [int(mark.read_text()) for mark in marks]
    number = getattr(signal, name)
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    _wait_for(lambda: not any(_is_alive(pid) for pid in pids))
    if name == "SIGKILL":
        assert run.returncode == -number
        assert left_over(tmp_path) != []
        # The next run removes it; a folder of files that the user asked for is no leftover.
        following = tune("--redirects", "1", *MINE)
        assert following.communicate(timeout=60)[1].startswith("note: the files of --redirects")
        (logs,) = left_over(tmp_path)
        assert logs.startswith("torchelastic_")
        (printed,) = (tmp_path / "temporary" / logs).glob("*/attempt_0/0/stdout.log")
        assert printed.read_text().startswith("rank 0 of 2")
    else:
        assert run.returncode == 128 + number
        assert err.splitlines() == [f"error: stopped by {name}"]
        assert left_over(tmp_path) == []


def test_a_rank_blocked_in_a_collective_does_not_outlive_the_first_cause(
    tune: Callable, tmp_path: Path
) -> None:
    (tmp_path / "blocked.py").write_text(
        """
import torch, torch.distributed as dist
from torchtune_cp import config

@config.parse
def main(cfg):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("row 7 is malformed")
    dist.all_reduce(torch.ones(1))

main()
"""
    )
    run = tune("--nproc_per_node", "2", "blocked.py", "--config", "my.yaml")
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "error: rank 1: ValueError: row 7 is malformed" in err
    assert "Traceback" not in err


def test_a_recipe_without_a_launcher_reports_for_itself(tune: Callable, tmp_path: Path) -> None:
    command = [sys.executable, "my_recipe.py", "--config", "my.yaml"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "TUNE_TRACEBACK")}
    for extra, rank, said in (
        (["do=config error"], "1", ["error: rank 1: x: unknown", "error: rank 1: y: unknown"]),
        (["batch_size"], None, ["error: cannot read 'batch_size': expected key=value or ~key"]),
    ):
        ended = subprocess.run(
            command + extra,
            cwd=tmp_path,
            env=environment | ({"RANK": rank} if rank else {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 2
        assert ended.stderr.splitlines() == said
