"""Step time while a checkpoint is saved in the background against step time without, interleaved.

python -m benchmarks.async_save [SEQ_LEN ...]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Contender, our_training, write_results

ROUNDS = {1024: 15, 4096: 7, 16384: 3}
RANKS = 2


def build_saving(seq_len: int, folder: str) -> Callable[[str], Any]:
    """Build a training step with checkpoints.

    The returned function takes `"step"` (returns whether a save was in flight throughout), `"save"`
    (starts one in the background), `"wait"` and `"save in line"` (return the checkpoint's bytes).
    """
    from torchtune_cp.checkpointing.training_checkpoints import TrainingCheckpoints
    from torchtune_cp.checkpointing.training_state import TrainingState

    model, optimizer, forward_backward = our_training(seq_len, RANKS)
    state = TrainingState(model, optimizer, None)
    background = TrainingCheckpoints(folder, asynchronous=True, keep_last_n=2)
    in_line = TrainingCheckpoints(folder, keep_last_n=2)
    saves = 0

    def written() -> int:
        path = Path(folder) / "checkpoints" / f"step_{saves}"
        return sum(file.stat().st_size for file in path.iterdir())

    def step(command: str) -> Any:
        nonlocal saves
        if command == "step":
            forward_backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return background.is_saving
        if command == "wait":
            background.wait()
            return written()
        saves += 1
        checkpoints = background if command == "save" else in_line
        checkpoints.save(state, step=saves, record={})
        return written() if command == "save in line" else 0

    return step


def measure(seq_len: int, rounds: int) -> dict[str, Any]:
    """Make `rounds` rounds, each of a step without a save, a background save, and one in line."""
    # On a disk: /tmp may be memory. Ignored by git: a benchmark that is killed leaves it behind.
    with tempfile.TemporaryDirectory(prefix=".async_save_", dir=".") as folder:
        contender = Contender("saving", RANKS, 1, build_saving, (seq_len, folder))
        contender.start()
        for command in ("step", "save", "step", "wait", "save in line"):  # warm-up
            contender.step(command)
        without, during, ratios, staging, background, in_line = [], [], [], [], [], []
        num_bytes = 0
        for _ in range(rounds):
            plain, _ = contender.step("step")
            without.append(plain)
            took, _ = contender.step("save")
            staging.append(took)
            started = time.perf_counter()
            saving, first = True, True
            while saving:
                took, still_saving = contender.step("step")
                saving = any(still_saving)
                if saving or first:  # a later step during which the save ended tells less
                    during.append(took)
                    ratios.append(took / plain)
                first = False
            _, counts = contender.step("wait")
            background.append(time.perf_counter() - started)
            num_bytes = max(counts)
            took, _ = contender.step("save in line")
            in_line.append(took)
        contender.stop()
    return {
        "seq_len": seq_len,
        "step_s": round(statistics.median(without), 3),
        "step_during_save_s": round(statistics.median(during), 3),
        "steps_during_saves": len(during),
        "during_save_ratio": round(statistics.median(ratios), 3),
        "staging_s": round(statistics.median(staging), 3),
        "background_save_s": round(statistics.median(background), 3),
        "in_line_save_s": round(statistics.median(in_line), 3),
        "saved_MiB": round(num_bytes / 2**20),
    }


def main() -> None:
    results = []
    for seq_len in [int(a) for a in sys.argv[1:]] or list(ROUNDS):
        row = measure(seq_len, ROUNDS.get(seq_len, 3))
        print(row)
        results.append(row)
    write_results("async_save", results)


if __name__ == "__main__":
    main()
