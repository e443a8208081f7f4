"""Result files of the GPU checks: rows with a status each, written as they come.

A part that is ended at its time limit leaves the rows it had, with the status `failed`.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(__file__).resolve().parents[2]

#: From best to worst; a part is what its worst row is. `not_taken` says that a kernel declares an
#: input not to be its own: nothing to hold against anybody. `unsupported` says that this platform
#: cannot do what was asked: nothing was shown.
STATUSES = ("not_taken", "passed", "unsupported", "out_of_memory", "failed")

_PACKAGES = ("omegaconf", "torchdata", "tokenizers", "safetensors", "jinja2", "numpy", "tqdm")


@dataclass(frozen=True)
class Setting:
    """The settings of every part.

    Attributes:
        device: `"cuda"`, or `"cpu"` for a rehearsal with tiny sizes.
        out: Folder of the result files.
    """

    device: str
    out: Path

    @property
    def rehearsal(self) -> bool:
        """Whether this is no GPU run."""
        return self.device != "cuda"

    def result_file(self, part: str) -> Path:
        """Where a part's result lies: a rehearsal never has the name of a GPU run."""
        prefix = "rehearsal_" if self.rehearsal else ""
        return self.out / f"{prefix}{part}.json"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    """First line of a program's output; None where the program is missing or fails."""
    try:
        answer = subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.splitlines()
    return lines[0].strip() if lines else None


def machine(device: str) -> dict[str, Any]:
    """The machine, the versions and the command that made a result file."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    entries: dict[str, Any] = {
        "device": device,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        entries |= {
            "gpu": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_GiB": round(properties.total_memory / 2**30, 1),
            "driver": _first_line(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    entries |= {name: _version(name) for name in _PACKAGES}
    entries |= {
        "commit": _first_line("git", "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.gpu.checks", *sys.argv[1:]]),
    }
    return entries


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: those become words."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it and renamed: a part killed while writing leaves the previous state.
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    temporary.replace(path)


def record_crash(setting: Setting, part: str, error: str) -> None:
    """Put the error that ended a part on record, beside the rows that it had.

    Args:
        setting: The run's.
        part: Its name.
        error: In one line.
    """
    path = setting.result_file(part)
    content = {"part": part, "rehearsal": setting.rehearsal, "machine": machine(setting.device)}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
    _write_json(path, {**content, "status": "failed", "error": error})
    print(f"[{part}] FAILED: {error}; written: {path}")


def short(error: BaseException | str, limit: int = 400) -> str:
    """An error in one line of at most `limit` characters."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@dataclass
class Report:
    """One part's result file.

    Attributes:
        part: The part's name, and with `rehearsal_` before it for a rehearsal the file's.
        setting: Device and folder.
        tolerances: Name to value, and the reason beside it.
        notes: Conventions that a reader of the figures needs.
    """

    part: str
    setting: Setting
    tolerances: Mapping[str, Any]
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write the file immediately: whatever happens from now on is on record."""
        self._rows: list[dict[str, Any]] = []
        self._machine = machine(self.setting.device)
        self._start = time.perf_counter()
        self._write("failed", "the part did not finish")

    @property
    def path(self) -> Path:
        """Where the result lies."""
        return self.setting.result_file(self.part)

    def add(self, status: str, **row: Any) -> None:
        """Record and print one row.

        Args:
            status: One of `STATUSES`.
            row: What was measured.
        """
        assert status in STATUSES, status
        self._rows.append({"status": status, **row})
        figures = " ".join(f"{k}={_text(v)}" for k, v in row.items() if v is not None)
        print(f"[{self.part}] {status:<13} {figures}", flush=True)
        self._write("failed", "the part did not finish")

    def finish(self, error: str | None = None) -> str:
        """Write the final state and return the part's status.

        Args:
            error: What ended the part before its time; it is then `failed`.
        """
        worst = max((row["status"] for row in self._rows), key=STATUSES.index, default="failed")
        if error is not None or worst == "not_taken":  # nothing was shown
            worst = "failed"
        self._write(worst, error)
        mark = " (REHEARSAL on the CPU: no GPU figure)" if self.setting.rehearsal else ""
        counts = {s: sum(row["status"] == s for row in self._rows) for s in STATUSES}
        summary = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        reason = f": {error}" if error else ""
        print(f"[{self.part}] {worst.upper()}{mark} {summary}{reason}; written: {self.path}")
        return worst

    def _write(self, status: str, error: str | None) -> None:
        content = {
            "part": self.part,
            "rehearsal": self.setting.rehearsal,
            "status": status,
            "error": error,
            "seconds": round(time.perf_counter() - self._start, 1),
            "machine": self._machine,
            "tolerances": self.tolerances,
            "notes": self.notes,
            "results": self._rows,
        }
        _write_json(self.path, content)
