"""Saves on disks that are full, read-only, vanished or damaged; run in a mount namespace of its own.

``python -m tests.faults.bad_disks FOLDER`` prints what happened as JSON. FOLDER is a small tmpfs that
this process may mount anew: see test_disk_trouble.py.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from torchtune_cp.checkpointing.training_checkpoints import TrainingCheckpoints
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.checkpointing.training_state_store import list_checkpoints, verify_checkpoint
from torchtune_cp.config.output_dir import check_output
from torchtune_cp.errors import UserError

LINES: list[str] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            LINES.append(record.getMessage())


def _state() -> TrainingState:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return TrainingState(model, optimizer, None)


def _save(checkpoints: TrainingCheckpoints, step: int) -> str | None:
    """Save and wait; what the run is told, None when nothing."""
    try:
        checkpoints.save(_state(), step=step, record={"step": step})
        checkpoints.wait()
    except UserError as error:
        return str(error)
    return None


def _whole(folder: Path) -> list[str]:
    """Names of the listed checkpoints, each verified; and nothing hidden may be left."""
    names = []
    for path in list_checkpoints(folder):
        verify_checkpoint(path)
        names.append(path.name)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".step")]
    return [*names, *hidden]


def full_disk(base: Path, *, asynchronous: bool, on_save_error: str) -> dict[str, Any]:
    """Save until the disk is full, make room, save again."""
    folder = base / f"full {asynchronous} {on_save_error}"
    checkpoints = TrainingCheckpoints(
        folder, asynchronous=asynchronous, on_save_error=on_save_error
    )
    LINES.clear()
    told: list[str | None] = [_save(checkpoints, 1)]
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 1024)
        except OSError:
            pass  # full, as wanted
    told.append(_save(checkpoints, 2))
    while_full = _whole(checkpoints.folder)
    ballast.unlink()
    told.append(_save(checkpoints, 3))
    checkpoints.close()
    after = _whole(checkpoints.folder)
    shutil.rmtree(folder)
    return {"told": told, "logged": list(LINES), "while_full": while_full, "after": after}


def read_only_disk(base: Path) -> dict[str, Any]:
    """Save on a disk that turns read-only, as ext4 does after an error, and back."""
    checkpoints = TrainingCheckpoints(base / "read-only")
    LINES.clear()
    told = [_save(checkpoints, 1)]
    subprocess.run(["mount", "-o", "remount,ro", str(base)], check=True)
    told.append(_save(checkpoints, 2))
    meanwhile = _whole(checkpoints.folder)
    subprocess.run(["mount", "-o", "remount,rw", str(base)], check=True)
    told.append(_save(checkpoints, 3))
    return {"told": told, "meanwhile": meanwhile, "after": _whole(checkpoints.folder)}


def tried_before_training(base: Path) -> dict[str, Any]:
    """Look at an output folder on a full disk and on a read-only one, as a run does before it starts."""

    def tried(folder: Path) -> tuple[str, str]:
        try:
            check_output(OmegaConf.create({"output_dir": str(folder)}))
        except UserError as error:
            return type(error).__name__, str(error)
        return "", ""

    (base / "there").mkdir()
    ballast = base / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 1024)
        except OSError:
            pass  # full, as wanted
    full = tried(base / "there")
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(base)], check=True)
    read_only = [tried(base / name) for name in ("there", "new")]
    subprocess.run(["mount", "-o", "remount,rw", str(base)], check=True)
    return {"full": full, "read-only": read_only, "after": tried(base / "there")}


def vanished_folder(base: Path) -> dict[str, Any]:
    """Save where the folder is deleted, and where a file has taken its place."""
    folder = base / "vanished"
    checkpoints = TrainingCheckpoints(folder, on_save_error="continue")
    LINES.clear()
    told = [_save(checkpoints, 1)]
    shutil.rmtree(folder)
    told.append(_save(checkpoints, 2))
    again = _whole(checkpoints.folder)
    shutil.rmtree(folder)
    folder.write_text("a file")
    told.append(_save(checkpoints, 3))
    return {"told": told, "again": again, "logged": list(LINES), "file": folder.read_text()}


def damaged_newest(base: Path) -> dict[str, Any]:
    """Damage the newest checkpoints in five ways; which one a resumed run takes, and what it says."""
    folder = base / "damaged"
    checkpoints = TrainingCheckpoints(folder)
    for step in range(1, 7):
        assert _save(checkpoints, step) is None
    checkpoints.close()
    shards = {
        step: next((folder / "checkpoints" / f"step_{step}").glob("*.safetensors"))
        for step in range(1, 7)
    }
    data = bytearray(shards[2].read_bytes())
    data[-5] ^= 1  # one bit in the middle of a weight
    shards[2].write_bytes(bytes(data))
    shards[3].write_bytes(shards[3].read_bytes()[:-100])
    shards[4].unlink()
    manifest = folder / "checkpoints" / "step_5" / "checkpoint.json"
    manifest.write_text(manifest.read_text()[:-50])
    (folder / "checkpoints" / "step_6" / "checkpoint.json").unlink()
    LINES.clear()
    again = TrainingCheckpoints(folder)
    found = again.find(True)
    again.close()
    assert found is not None
    return {"found": found.path.name, "logged": list(LINES)}


def main() -> None:
    """Run every case and print the results."""
    logger = logging.getLogger("torchtune_cp")
    logger.addHandler(_Keep())
    logger.propagate = False
    base = Path(sys.argv[1])
    results: dict[str, Any] = {
        f"full {asynchronous} {action}": full_disk(
            base, asynchronous=asynchronous, on_save_error=action
        )
        for asynchronous in (False, True)
        for action in ("raise", "continue")
    }
    results["read-only"] = read_only_disk(base)
    results["tried"] = tried_before_training(base)
    results["vanished"] = vanished_folder(base)
    results["damaged"] = damaged_newest(base)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
