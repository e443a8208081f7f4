"""A small run through the real command line that can be killed, and what is looked at meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.faults.slow_disk import SLOW_FSYNC_VARIABLE
from torchtune_cp.checkpointing.training_state_store import list_checkpoints, verify_checkpoint
from torchtune_cp.errors import UserError
from torchtune_cp.metrics import read_metrics

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS_PER_EPOCH = 2, 8
STEPS = EPOCHS * STEPS_PER_EPOCH
#: A dead rank, and everything else of its run, must be gone after this many seconds.
END_LIMIT_S = 60
#: A start that neither ends nor makes a step for so long hangs.
START_LIMIT_S = 600
_MARK = "FAULTS_RUN"


def write_config(path: Path) -> Path:
    """The config of all runs here: two epochs, a schedule, shuffling, a save every second step."""
    config = {
        "output_dir": "/nowhere",
        "seed": 0,
        "device": "cpu",
        "dtype": "fp32",
        "shuffle": True,
        "epochs": EPOCHS,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "context_parallel_dim": 2,
        "save_every_n_steps": 2,
        "model": {
            "_component_": "torchtune_cp.models.llama3.llama3",
            "vocab_size": 272,  # the byte tokenizer's
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "embed_dim": 32,
            "intermediate_dim": 64,
            "max_seq_len": 64,
        },
        "checkpointer": {
            "_component_": "torchtune_cp.checkpointing.FullModelHFCheckpointer",
            "checkpoint_dir": None,
        },
        "tokenizer": {"_component_": "torchtune_cp.data.byte_tokenizer"},
        "dataset": {
            "_component_": "tests.faults.slow_disk.samples",
            "count": 2 * STEPS_PER_EPOCH,
        },
        "dataset_val": {"_component_": "tests.faults.slow_disk.samples", "count": 2},
        "run_val_every_n_steps": 3,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
        "lr_scheduler": {
            "_component_": ("torchtune_cp.training.lr_schedulers.get_cosine_schedule_with_warmup"),
            "num_warmup_steps": 2,
        },
        "clip_grad_norm": 1.0,
    }
    path.write_text(yaml.safe_dump(config))
    return path


class Start:
    """One start of a run; its processes are found by a mark in their environment."""

    def __init__(self, config: Path, output_dir: Path, *overrides: str, **variables: str) -> None:
        self.output_dir = output_dir
        self._earlier_metrics = _inode(output_dir / "metrics.jsonl")
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        environment = {k: v for k, v in os.environ.items() if k != "TUNE_TRACEBACK"}
        self._said = (output_dir.parent / f"{output_dir.name}.said").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torchtune_cp", "run", "--nproc_per_node", "2"),
                *("full_finetune_distributed", "--config", str(config)),
                *(f"output_dir={output_dir}", *overrides),
            ],
            env={
                **environment,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "TUNE_ALLOW_COMPONENTS": "tests",
                name: value,
                **variables,
            },
            cwd=ROOT,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pids(self) -> dict[str, int]:
        """The living processes of this start: ``launcher``, ``rank 0``, ``rank 1``, others by id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it ended while we looked
            if self._mark.encode() not in variables or state in "ZX":
                continue
            rank = next((v[5:].decode() for v in variables if v.startswith(b"RANK=")), None)
            pid = int(entry.name)
            if pid == self.process.pid:
                found["launcher"] = pid
            elif rank is not None and f"rank {rank}" not in found:
                found[f"rank {rank}"] = pid
            else:
                found[f"process {pid}"] = pid
        return found

    def kill(self, who: str) -> bool:
        """Send SIGKILL to one of :meth:`pids`, once it is there; False when the run has ended."""
        if not self.wait_until(lambda: who in self.pids()):
            return False
        try:
            os.kill(self.pids()[who], signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            return False
        return True

    def step(self) -> int:
        """The last step in the metrics file; 0 before this start has written or continued it."""
        path = self.output_dir / "metrics.jsonl"
        ours = _inode(path) not in (None, self._earlier_metrics)  # it is replaced by each start
        lines = read_metrics(path) if ours else []
        return max((int(line["step"] or 0) for line in lines if "loss" in line), default=0)

    def is_saving(self) -> bool:
        """Whether a half-written checkpoint lies in the folder."""
        return any((self.output_dir / "checkpoints").glob(".step_*.tmp"))

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False when the run ended before it held."""
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"hung: {self.said()}"
            time.sleep(0.02)
        return True

    def end(self, limit_s: float = START_LIMIT_S) -> int:
        """Wait for the launcher's end and that of all its processes; returns the exit code."""
        code = self.process.wait(limit_s)
        deadline = time.monotonic() + END_LIMIT_S
        while left := self.pids():
            assert time.monotonic() < deadline, f"orphans: {left}"
            time.sleep(0.05)
        return code

    def said(self) -> str:
        """Everything on stdout and stderr so far."""
        self._said.flush()
        return Path(self._said.name).read_text()

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        for pid in self.pids().values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        self._said.close()


class Watch:
    """Looks at a folder of checkpoints all the time: whatever is listed there must be whole.

    Attributes:
        problems: What was listed and was not whole.
        verified: How many checkpoints were found whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.verified = 0
        self._known: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for path in list_checkpoints(self.folder):
                self._look(path)
            self._stop.wait(0.005)

    def _look(self, path: Path) -> None:
        inode = _inode(path)
        if inode is None or inode in self._known:
            return
        try:
            manifest = verify_checkpoint(path)
            # Independently: every file that lies there is accounted for, and nothing else.
            names = {file.name for file in manifest.files} | {"checkpoint.json"}
            found = {entry.name for entry in path.iterdir()}
            problem = None if found == names else f"holds {found}, not {names}"
        except (UserError, OSError) as error:
            problem = str(error)
        if _inode(path) != inode:
            return  # it was replaced by another save of this step meanwhile
        self._known.add(inode)
        self.verified += 1
        if problem is not None:
            self.problems.append(f"{path.name}: {problem}")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


@dataclass
class Campaign:
    """One run that was killed and resumed until it finished.

    Attributes:
        kills: ``(whom, when, last step then)`` of each kill that hit.
        starts: Times that it was started.
        verified: Checkpoints seen under a final name, all of them whole.
    """

    kills: list[tuple[str, str, int]] = field(default_factory=list)
    starts: int = 0
    verified: int = 0


MOMENTS = ("start", "step", "save", "end")


def _wait_for_moment(start: Start, moment: str, rng: random.Random, first_step: int) -> bool:
    """Wait for a kind of moment and then a random while; False when the run ended before."""
    if moment == "start":
        return start.wait_until(lambda: "rank 0" in start.pids()) and _sleep(
            start, rng.random() * 6
        )
    if moment == "end":
        there = start.wait_until(lambda: start.step() >= STEPS)
        return there and _sleep(start, rng.random() * 1.5)
    if not start.wait_until(lambda: start.step() > first_step):
        return False
    if moment == "save":
        # Some of the saves are let pass, so that the first is not the only one that is hit.
        later = first_step + rng.randrange(1, 5)
        there = start.wait_until(
            lambda: start.step() >= min(later, STEPS - 1) and start.is_saving()
        )
        return there and _sleep(start, rng.random() * 0.8)
    return _sleep(start, rng.random())


def _sleep(start: Start, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if start.process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def kill_and_resume(
    config: Path,
    output_dir: Path,
    rng: random.Random,
    kills: int,
    moments: tuple[str, ...] = (),
) -> Campaign:
    """Run to the end through ``kills`` kills; each start saves in line or in the background by chance.

    Args:
        config: From :func:`write_config`.
        output_dir: Of the run.
        rng: Chooses whom to kill, when, and how to save.
        kills: How many; fewer if the run finishes earlier.
        moments: The kinds of the first kills' moments, from :data:`MOMENTS`; by chance after those.
    """
    campaign = Campaign()
    with Watch(output_dir / "checkpoints") as watch:
        while True:
            asynchronous = rng.random() < 0.5
            before = _newest(output_dir)
            start = Start(
                config,
                output_dir,
                "resume_from_checkpoint=true",
                f"enable_async_checkpointing={str(asynchronous).lower()}",
                **{SLOW_FSYNC_VARIABLE: "0.1"},
            )
            campaign.starts += 1
            try:
                planned = len(campaign.kills)
                killed = False
                if planned < kills:
                    given = planned < len(moments)
                    moment = moments[planned] if given else rng.choice(MOMENTS)
                    whom = rng.choice(("rank 0", "rank 1", "launcher"))
                    if _wait_for_moment(start, moment, rng, before):
                        step = start.step()
                        killed = start.kill(whom)
                    if killed:
                        how = "in background" if asynchronous else "in line"
                        campaign.kills.append((whom, f"{moment}, saving {how}", step))
                code = start.end(END_LIMIT_S if killed else START_LIMIT_S)
                assert "Traceback" not in start.said(), start.said()
                if not killed:
                    assert code == 0, start.said()
                    break
                # The last thing that a run does may be done when the kill arrives.
                assert code != 0 or (output_dir / "final").exists(), start.said()
            finally:
                start.close()
    assert watch.problems == []
    campaign.verified = watch.verified
    return campaign


def _newest(output_dir: Path) -> int:
    folders = list_checkpoints(output_dir / "checkpoints")
    return int(folders[0].name.removeprefix("step_")) if folders else 0


def run_uninterrupted(config: Path, output_dir: Path, *overrides: str) -> Start:
    """The reference: one start, no saves (or as ``overrides`` say); returned when it has finished."""
    start = Start(
        config, output_dir, *(overrides or ("save_every_n_steps=null", "save_every_epoch=false"))
    )
    try:
        assert start.end() == 0, start.said()
    finally:
        start.close()
    return start


def curve(output_dir: Path) -> list[dict[str, Any]]:
    """The metrics file's lines without what depends on the clock."""
    timing = {"tokens_per_second", "step_time_s", "peak_memory_bytes"}
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in timing}
        for line in lines
    ]
