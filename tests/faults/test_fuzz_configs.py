"""Hundreds of damaged configs: each is refused in clear lines with exit code 2, or is none the worse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.faults.config_mutations import ROOT, SEEDS, Mutator, odd_files
from torchtune_cp.cli.main import main

pytestmark = pytest.mark.slow

VALIDATED, RUN = 300, 30
#: No config takes so long to look over, however slow the machine is.
VALIDATE_LIMIT_S = 60
RUN_LIMIT_S = 300
_STARTS = ("error: ", "warning: ", "note: ")
VARIABLES = {"FUZZ_NUMBER": "3", "FUZZ_TEXT": "some/text", "FUZZ_LONG": "innocent-but-secret-value"}


class Hang(BaseException):
    """Nothing catches it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise :class:`Hang` where a command is after so long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bad_lines(stderr: str) -> list[str]:
    """What is no clear line of a command's stderr."""
    return [
        line
        for line in stderr.splitlines()
        if not line.startswith(_STARTS) or not line.isprintable() or len(line) > 2600
    ]


def complaint(code: int, stderr: str, allowed: tuple[int, ...]) -> str | None:
    """Say what is wrong with the end of a command; None when it is as promised."""
    if "Traceback" in stderr:
        return "a traceback"
    if code not in allowed:
        return f"exit code {code}"
    if VARIABLES["FUZZ_LONG"] in stderr:
        return "the value of a variable is shown"
    if code == 2 and "error: " not in stderr:
        return "refused without a word"
    if bad := bad_lines(stderr):
        return f"not a clear line: {bad[0]!r}"
    return None


@pytest.mark.parametrize("seed", [0])
def test_mutated_configs_are_refused_by_validate_in_clear_lines(
    seed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    mutator = Mutator(seed, odd_files(tmp_path / "odd"))
    path = tmp_path / "config.yaml"
    refused, findings = 0, []
    for number in range(VALIDATED):
        source = mutator.rng.choice(SEEDS)
        path.write_bytes(mutator.mutate(source.read_text()))
        try:
            with time_limit(VALIDATE_LIMIT_S), warnings.catch_warnings():
                warnings.simplefilter("error")
                code = main(["validate", str(path)])
            said = capsys.readouterr().err
            problem = complaint(code, said, (0, 2))
        except BaseException as error:  # noqa: BLE001  (nothing at all may come out of it)
            code, said, problem = -1, capsys.readouterr().err, f"{type(error).__name__}: {error}"
        refused += code == 2
        if problem is not None:
            findings.append(
                f"seed {seed}, {number}, {source.name}, {mutator.done}: {problem}\n{said}"
            )
    assert findings == []
    assert refused > VALIDATED // 2


@pytest.mark.distributed
def test_mutated_configs_are_refused_by_run_or_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"  # paths of mutated configs may lead upwards
    mutator = Mutator(7, odd_files(folder / "odd"))
    environment = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    path = folder / "config.yaml"
    findings = []
    for number in range(RUN):
        source = mutator.rng.choice(SEEDS[:2])
        path.write_bytes(mutator.mutate(source.read_text()))
        recipe = "full_finetune_distributed" if "llama" in source.name else "esm2_mlm_distributed"
        command = [sys.executable, "-m", "torchtune_cp", "run", "--nproc_per_node"]
        command += [str(1 + number % 2), recipe, "--config", str(path), "epochs=1"]
        command += [f"output_dir={folder / 'out'}", "overwrite=true", "max_steps_per_epoch=1"]
        done = subprocess.run(
            command,
            env={**environment, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"},
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RUN_LIMIT_S,
            check=False,
        )
        said = done.stderr if done.returncode == 2 else ""
        problem = complaint(done.returncode, said, (0, 2))
        if problem or "Traceback" in done.stderr or VARIABLES["FUZZ_LONG"] in done.stderr:
            what = f"seed 7, {number}, {source.name}, {mutator.done}: {problem}"
            findings.append(f"{what}\n{done.stderr[-2000:]}")
    assert findings == []
