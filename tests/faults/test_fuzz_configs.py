"""Hundreds of damaged configs: each is refused in clear lines with exit code 2, or is none the worse."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.faults.config_mutations import SEEDS, Mutator, odd_files
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
