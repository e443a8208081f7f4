"""Real signals to real runs of the recipe: what is saved, what is left running, how the run exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchtune_cp.checkpointing.training_state_store import list_checkpoints, verify_checkpoint
from torchtune_cp.metrics import read_metrics

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
#: Seconds within which a run has started, or ended; a free machine takes a tenth of it.
LONG = 240
STEPS = 6

CONFIG: dict[str, Any] = {
    "model": {
        "_component_": "torchtune_cp.models.llama3.llama3",
        "vocab_size": 272,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "intermediate_dim": 64,
        "max_seq_len": 64,
    },
    "tokenizer": {"_component_": "torchtune_cp.data.byte_tokenizer"},
    "checkpointer": {
        "_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer",
        "checkpoint_dir": None,
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.001},
    "shuffle": False,
    "device": "cpu",
    "dtype": "fp32",
    "context_parallel_dim": 2,
    "save_every_epoch": False,
}


class Run:
    """One ``tune run`` with two context-parallel ranks in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        variables: dict[str, str] | None = None,
        recipe: str = "full_finetune_distributed",
        **config: Any,
    ) -> None:
        """Start it; ``config`` goes over the common one, ``dataset`` and ``dataset_val`` over theirs."""
        self.folder = folder
        self.one_reads = recipe == "esm2_mlm_distributed"
        folder.mkdir(exist_ok=True)
        for left in [*folder.glob("*.?.?"), folder / "go"]:
            left.unlink(missing_ok=True)
        cfg = CONFIG | {"output_dir": str(folder / "out")} | config
        for key in ("dataset", "dataset_val"):
            if key == "dataset" or key in cfg:
                cfg[key] = {
                    "_component_": "tests.recipes.faults.samples",
                    "folder": str(folder),
                    **cfg.get(key, {}),
                }
        (folder / "config.yaml").write_text(yaml.safe_dump(cfg))
        self.mark = uuid.uuid4().hex
        self.stderr = folder / "stderr"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TUNE_ALLOW_COMPONENTS": "tests",
            "PYTHONPATH": str(ROOT),
            "TEST_RUN_MARK": self.mark,
            **(variables or {}),
        }
        command = ["-m", "torchtune_cp", "run", "--nproc_per_node", "2", *options]
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *command, recipe, "--config", "config.yaml"],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def wait_for(self, name: str, start: int = 0) -> list[int]:
        """Wait until both ranks (rank 0, in a save) have left the file, and return their ids."""
        # One rank writes what is saved; one reads for all where the loader hands out slices.
        ranks = (0,) if name == "save" or self.one_reads else (0, 1)
        files = [self.folder / f"{name}.{rank}.{start}" for rank in ranks]
        self._wait(lambda: all(file.exists() and file.read_text() for file in files), name)
        return [int(file.read_text()) for file in files]

    def wait_for_line(self, text: str) -> None:
        """Wait until ``text`` stands on stderr."""
        self._wait(lambda: text in self.stderr.read_text(), text)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, f"{what}: not within {LONG} s"
            time.sleep(0.02)

    def go(self) -> None:
        """Let ranks that wait go on."""
        (self.folder / "go").touch()

    def send(self, number: int) -> None:
        """Signal the launcher."""
        self.process.send_signal(number)

    def ended(self, within: float = LONG) -> tuple[int, str]:
        """Wait for the end, check that nothing is left running, and return exit code and stderr."""
        code = self.process.wait(within)
        self.none_left()
        return code, self.stderr.read_text()

    def none_left(self, within: float = 60) -> None:
        """Check that no process that the run started, however indirectly, lives on."""
        deadline = time.monotonic() + within
        while left := list(self._processes()):
            assert time.monotonic() < deadline, f"left running: {left}"
            time.sleep(0.1)

    def _processes(self) -> Iterator[str]:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark in (entry / "environ").read_text():
                    yield (entry / "cmdline").read_text().replace("\0", " ")
            except (OSError, UnicodeDecodeError):
                continue

    def kill(self) -> None:
        """End what a failed test has left."""
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark in (entry / "environ").read_text():
                    os.kill(int(entry.name), signal.SIGKILL)
            except (OSError, UnicodeDecodeError):
                continue

    def curve(self) -> list[tuple[Any, ...]]:
        """Every line of the metrics, without what depends on the clock."""
        keys = ("step", "epoch", "loss", "grad_norm", "tokens", "val_loss")
        return [
            tuple(line.get(key) for key in keys)
            for line in read_metrics(self.folder / "out" / "metrics.jsonl")
        ]

    def checkpoints(self) -> list[str]:
        """The names of its checkpoints, all of them verified, and nothing half-written beside them."""
        parent = self.folder / "out" / "checkpoints"
        folders = list_checkpoints(parent)
        for folder in folders:
            verify_checkpoint(folder)
        hidden = [path.name for path in parent.glob(".step_*")] if parent.exists() else []
        assert hidden == []
        return [folder.name for folder in folders]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs, and leave none behind."""
    runs: list[Run] = []

    def one(name: str, *options: str, **config: Any) -> Run:
        runs.append(Run(tmp_path / name, *options, **config))
        return runs[-1]

    yield one
    for run in runs:
        run.kill()
        run.process.wait()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The curve of a run that nothing disturbs."""
    run = Run(tmp_path_factory.mktemp("whole") / "run", dataset_val={"name": "val"})
    code, err = run.ended()
    assert code == 0, err
    return run.curve()


def test_sigterm_to_the_launcher_saves_and_the_resumed_run_goes_on_as_if_nothing_had_been(
    start: Callable[..., Run], uninterrupted: list[tuple[Any, ...]]
) -> None:
    run = start("a", dataset={"wait_at": 2}, dataset_val={"name": "val"})
    run.wait_for("train2")
    run.send(signal.SIGTERM)
    run.wait_for_line("SIGTERM: the ranks save")
    run.go()
    code, err = run.ended()
    assert code == 75, err
    (saved,) = run.checkpoints()
    assert saved == f"step_{run.curve()[-1][0]}" != f"step_{STEPS}"
    assert err.splitlines()[-1] == (
        f"error: stopped by SIGTERM: {run.folder}/out/checkpoints/{saved} is complete;"
        " resume_from_checkpoint=true continues from it"
    )
    assert not (run.folder / "out" / "final").exists()
    again = start("a", dataset_val={"name": "val"}, resume_from_checkpoint=True)
    code, err = again.ended()
    assert code == 0, err
    assert again.curve() == uninterrupted


ESM2: dict[str, Any] = {
    "recipe": "esm2_mlm_distributed",
    "model": {
        "_component_": "torchtune_cp.models.esm2.esm2",
        "num_layers": 1,
        "num_heads": 2,
        "embed_dim": 32,
    },
    "tokenizer": {"_component_": "torchtune_cp.data.esm_tokenizer"},
    "dataset_val": {"name": "val", "vocab": 33},
}


@pytest.mark.slow
def test_a_signal_to_the_protein_recipe_saves_and_the_resumed_run_is_the_same_to_the_bit(
    start: Callable[..., Run],
) -> None:
    whole = start("whole", dataset={"vocab": 33}, **ESM2)
    assert whole.ended()[0] == 0
    run = start("a", dataset={"vocab": 33, "wait_at": 3}, **ESM2)
    run.wait_for("train3")
    run.send(signal.SIGTERM)
    run.wait_for_line("SIGTERM: the ranks save")
    run.go()
    code, err = run.ended()
    assert code == 75, err
    (saved,) = run.checkpoints()
    assert saved == f"step_{run.curve()[-1][0]}" != f"step_{STEPS}"
    again = start("a", dataset={"vocab": 33}, resume_from_checkpoint=True, **ESM2)
    code, err = again.ended()
    assert code == 0, err
    assert again.curve() == whole.curve()


def test_a_killed_rank_is_restarted_from_the_newest_checkpoint_and_the_curve_is_the_same(
    start: Callable[..., Run], uninterrupted: list[tuple[Any, ...]]
) -> None:
    run = start(
        "a",
        "--max-restarts",
        "1",
        dataset={"fail_at": 3, "how": "kill"},
        dataset_val={"name": "val"},
        save_every_n_steps=2,
    )
    code, err = run.ended()
    assert code == 0, err
    restarts = [line for line in err.splitlines() if line.startswith("restart ")]
    assert restarts == [
        "restart 1 of 1: rank 1 was ended by SIGKILL (often the system ran out of memory);"
        f" it continues from {run.folder}/out/checkpoints/step_2"
    ]
    assert run.curve() == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("to", ["a rank", "everybody"])
def test_any_signal_to_any_process_saves(start: Callable[..., Run], name: str, to: str) -> None:
    run = start("a", dataset={"wait_at": 2})
    ranks = run.wait_for("train2")
    number = getattr(signal, name)
    for pid in ranks[1:] if to == "a rank" else [ranks[0], run.process.pid, ranks[1]]:
        os.kill(pid, number)
    time.sleep(1)
    run.go()
    code, err = run.ended()
    assert code == 75, err
    assert run.checkpoints() == [f"step_{run.curve()[-1][0]}"] == ["step_3"]
    assert f"error: stopped by {name}: " in err


@pytest.mark.slow
def test_a_signal_in_a_validation_cuts_it_short_and_the_resumed_run_repeats_it(
    start: Callable[..., Run],
) -> None:
    validation = {"dataset_val": {"name": "val"}, "run_val_every_n_steps": 2}
    whole = start("whole", **validation)
    assert whole.ended()[0] == 0
    # The validation before the first step has read sample 1 as well: this one starts at step 2.
    run = start("a", dataset={"wait_at": 1}, **validation)
    run.wait_for("train1")
    for file in run.folder.glob("val*"):
        file.unlink()
    run.go()
    run.wait_for("val0")
    run.send(signal.SIGTERM)
    code, err = run.ended()
    assert code == 75, err
    assert len(run.checkpoints()) == 1
    again = start("a", resume_from_checkpoint=True, **validation)
    code, err = again.ended()
    assert code == 0, err
    assert again.curve() == whole.curve()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_signal_in_a_save_lets_it_finish(start: Callable[..., Run], asynchronous: bool) -> None:
    run = start(
        "a",
        dataset={"slow_save": True},
        save_every_n_steps=2,
        enable_async_checkpointing=asynchronous,
    )
    run.wait_for("save")
    run.send(signal.SIGTERM)
    run.wait_for_line("SIGTERM: the ranks save")
    run.go()
    code, err = run.ended()
    assert code == 75, err
    names = run.checkpoints()
    assert names[-1] == "step_2"
    assert names[0] == f"step_{run.curve()[-1][0]}"


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_a_second_signal_ends_at_once_and_the_checkpoint_before_stays(
    start: Callable[..., Run], to: str
) -> None:
    run = start("a", dataset={"slow_save": True}, save_every_n_steps=2)
    run.wait_for("save")
    run.go()
    run.wait_for("train2")
    (run.folder / "go").unlink()
    (run.folder / "save.0.0").unlink()
    (saving,) = run.wait_for("save")
    pid = run.process.pid if to == "launcher" else saving
    os.kill(pid, signal.SIGTERM)
    time.sleep(1.5)
    os.kill(pid, signal.SIGTERM)
    code, err = run.ended(within=30)
    assert code == 128 + signal.SIGTERM, err
    assert err.splitlines()[-1] == "error: stopped by SIGTERM"
    parent = run.folder / "out" / "checkpoints"
    assert [path.name for path in list_checkpoints(parent)] == ["step_2"]
    verify_checkpoint(parent / "step_2")


@pytest.mark.slow
def test_ranks_that_do_not_leave_in_the_time_of_grace_are_ended(start: Callable[..., Run]) -> None:
    run = start("a", dataset={"slow_save": True}, save_every_n_steps=2, stop_grace_s=2)
    run.wait_for("save")
    run.send(signal.SIGINT)
    code, err = run.ended(within=60)
    assert code == 128 + signal.SIGINT
    assert err.splitlines()[-1] == (
        "error: stopped by SIGINT: the ranks had not exited after stop_grace_s=2 seconds"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "error: rank 1: RuntimeError: row 3 is malformed"),
        ("memory", "error: rank 1: MemoryError: the host has no memory left"),
        ("kill", "error: rank 1 was ended by SIGKILL (often the system ran out of memory)"),
        ("suspend", "error: rank 0: waited 5 s for the other ranks; one of them hangs"),
        ("loop", "error: rank 0: waited 5 s for the other ranks; one of them hangs"),
    ],
)
def test_one_failing_rank_ends_all_within_a_minute_with_the_first_cause(
    start: Callable[..., Run], how: str, said: str
) -> None:
    run = start("a", dataset={"fail_at": 3, "how": how}, collective_timeout_s=5)
    run.wait_for("train2")
    code, err = run.ended(within=60)
    assert code == 1, err
    last = err.splitlines()[-1]
    assert last.startswith(said), err
    if how in ("suspend", "loop"):
        assert "collective_timeout_s" in last
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_killed_launcher_takes_ranks_and_the_services_they_started_with_it(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(
        "a",
        dataset={"wait_at": 2},
        variables={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)},
        metric_logger={"_component_": "torchtune_cp.metrics.WandBLogger", "project": "p"},
    )
    run.wait_for("train2")
    assert any("wandb" in command for command in run._processes())
    run.send(signal.SIGKILL)
    assert run.process.wait(30) == -signal.SIGKILL
    run.none_left()


@pytest.mark.slow
def test_a_signal_is_not_answered_with_a_restart(start: Callable[..., Run]) -> None:
    run = start("a", "--max-restarts", "2", dataset={"slow_save": True}, save_every_n_steps=2)
    (pid,) = run.wait_for("save")
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(1.5)
    code, err = run.ended()
    assert code == 128 + signal.SIGTERM, err
    assert "restart" not in err
