"""Reads `metrics.jsonl`, in any state: a crash, a full disk or an editor may have damaged it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtune_cp.errors import UserError

# A line takes some hundred bytes; a damaged file may be one line of any length.
_LONGEST_LINE = 1 << 20
_MAX_SPANS = 4


@dataclass(frozen=True)
class MetricsLine:
    """One line of the file.

    Attributes:
        number: From 1 on.
        text: Its bytes, with a newline at the end; empty when it cannot be read.
        record: The parsed object.
        problem: Why it cannot be read, None when it can.
        is_torn: Whether it is the beginning of a line.
    """

    number: int
    text: bytes = b""
    record: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    is_torn: bool = False


def metrics_lines(path: Path) -> Iterator[MetricsLine]:
    """Give every line of a metrics file, readable or not.

    Args:
        path: The file.

    Raises:
        UserError: It is not a regular file: reading a pipe would wait for its writer.
        OSError: It cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is not a regular file")
        number = 0
        while text := file.readline(_LONGEST_LINE):
            number += 1
            if len(text) == _LONGEST_LINE and not text.endswith(b"\n"):
                _skip_line(file)
                yield MetricsLine(number, problem=f"is longer than {_LONGEST_LINE} bytes")
            else:
                yield _parsed(number, text)


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
        pass


def _parsed(number: int, text: bytes) -> MetricsLine:
    try:
        record = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return MetricsLine(number, problem="is not UTF-8", is_torn=not text.endswith(b"\n"))
    except (ValueError, RecursionError):
        is_torn = not text.endswith(b"\n")
        problem = "is incomplete" if is_torn else "is not JSON"
        return MetricsLine(number, problem=problem, is_torn=is_torn)
    if not isinstance(record, dict):
        return MetricsLine(number, problem="is not a JSON object")
    if type(record.get("step")) is not int or record["step"] < 0:
        return MetricsLine(number, problem="has no step")
    return MetricsLine(number, text if text.endswith(b"\n") else text + b"\n", record)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file; unreadable lines, for example one cut off by a crash, are skipped.

    Args:
        path: The file.

    Raises:
        UserError: It is not a regular file.
        OSError: It cannot be read.
    """
    return [line.record for line in metrics_lines(Path(path)) if line.problem is None]


@dataclass(frozen=True)
class Damage:
    """What is wrong with a metrics file.

    Attributes:
        description: The damage and the lost steps, in one line.
        leaves_out: Whether there is something in it that is not copied, and that the run will not write
            again (as it will a last line that a crash has cut off).
    """

    description: str
    leaves_out: bool


def copy_lines(path: Path, fresh: BinaryIO, last_step: int) -> Damage | None:
    """Copy the lines up to a step, byte for byte; lines that cannot be read are left out.

    Args:
        path: The metrics file.
        fresh: Where they go.
        last_step: The step up to which the run has been saved.

    Returns:
        What is wrong with the file; None when it is as a run left it.
    """
    bad: list[MetricsLine] = []
    steps: set[int] = set()
    problems: list[str] = []
    number = highest = from_step = 0
    is_readable = True
    try:
        for line in metrics_lines(path):
            number = line.number
            if line.problem is not None:
                bad.append(line)
                continue
            step = line.record["step"]
            if step < highest and not any("goes back" in problem for problem in problems):
                problems.append(f"line {number} goes back from step {highest} to {step}")
            highest = max(highest, step)
            if step <= last_step:
                fresh.write(line.text)
                if "loss" in line.record:
                    # A run that began at another one's checkpoint has no lines before it.
                    from_step = from_step or (1 if bad else step)
                    steps.add(step)
    except (OSError, UserError) as error:
        is_readable = False
        description = (
            "it is not a regular file" if isinstance(error, UserError) else f"{error.strerror}"
        )
        problems.append(description)
    if bad:
        more = f" and {len(bad) - 1} more cannot be read" if len(bad) > 1 else ""
        problems.insert(0, f"line {bad[0].number} {bad[0].problem}{more}")
    missing = [step for step in range(from_step or 1, last_step + 1) if step not in steps]
    if missing and not problems:
        problems.append("lines are missing" if number else "it is empty")
    if not problems:
        return None
    lost = f"lost is step {_spans(missing)}" if missing else "no step is lost"
    description = f"{'; '.join(problems)}; of those up to the checkpoint's step {last_step} {lost}"
    is_torn = len(bad) == 1 and bad[0].number == number and bad[0].is_torn and not missing
    return Damage(description, leaves_out=(bool(bad) and not is_torn) or not is_readable)


def _spans(steps: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:_MAX_SPANS]]
    return ", ".join(shown) + (" and more" if len(spans) > _MAX_SPANS else "")
