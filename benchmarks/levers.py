"""Step time and peak of activations with each memory lever against without it, interleaved.

python -m benchmarks.levers [--rounds N] [LENGTH ...]

One process with two threads, a model for each setting, layers checkpointed. "whole loss" projects all
tokens at once: what the default loss, in chunks, is measured against.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import Contender, our_training, ratio, write_results

TILE = 2048
CHUNKED = {"num_output_chunks": 16}

#: Settings by name, and each lever with what it is compared with.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole loss": {"loss": {"num_output_chunks": 1, "max_chunk_tokens": 2**20}},
    "tiled MLP": {"mlp_tile_tokens": TILE},
    # In tiles, or the MLP would hide what the chunks save.
    "head chunks": {"mlp_tile_tokens": TILE, "attention_head_chunks": 4},
    "reused hidden states": {"loss": CHUNKED | {"reuse_hidden": True}},
    "offloaded inputs": {"offload": True},
    "optimizer in backward": {"optimizer": "in_bwd"},
    "optimizer on the host": {"optimizer": "on_host"},
}
COMPARED = {name: "plain" for name in SETTINGS if name not in ("plain", "whole loss")}
COMPARED = {"plain": "whole loss"} | COMPARED | {"head chunks": "tiled MLP"}


def build(
    seq_len: int, optimizer: str = "", offload: bool = False, **settings: Any
) -> Callable[[str], Any]:
    """Build a training step with one lever.

    Args:
        seq_len: Tokens.
        optimizer: ``in_bwd``, ``on_host`` or nothing.
        offload: Move the layers' inputs to the host.
        settings: For :func:`~benchmarks.common.our_training`.

    Returns:
        As :func:`~benchmarks.common.build_ours`; ``activations`` leaves out what lies on the host.
    """
    from benchmarks.live_storage import LiveStorage
    from torchtune_cp.training.memory import apply_activation_offloading
    from torchtune_cp.training.optim_in_bwd import OptimizerInBackward
    from torchtune_cp.training.optim_on_host import OptimizerOnHost

    cpu = torch.device("cpu")
    model, adamw, forward_backward = our_training(seq_len, 1, checkpointing=True, **settings)
    moved = apply_activation_offloading(model, cpu) if offload else None
    norm: Callable[[], Any] = lambda: None  # noqa: E731
    if optimizer:
        norm = (
            OptimizerOnHost(adamw, cpu) if optimizer == "on_host" else OptimizerInBackward(adamw)
        ).gradient_norm

    def step(command: str) -> Any:
        peak = None
        if command == "activations":
            with LiveStorage(lambda: moved.host_bytes if moved else 0) as live:
                forward_backward()
            peak = live.peak
        else:
            forward_backward()
        norm()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return peak

    return step


def build_all(seq_len: int) -> Callable[[str], Any]:
    """Build a step of every setting; the returned function takes the setting's name.

    ``activations/NAME`` in place of ``NAME`` returns the peak bytes of tensors that came to life.
    """
    steps = {name: build(seq_len, **settings) for name, settings in SETTINGS.items()}

    def step(command: str) -> Any:
        kind, _, name = command.rpartition("/")
        return steps[name](kind or "step")

    return step


def measure(seq_len: int, rounds: int) -> list[dict[str, Any]]:
    """Let the settings make steps in turn.

    Args:
        seq_len: Tokens of a step.
        rounds: Counted steps of each; one more comes before.

    Returns:
        A row for each lever.
    """
    process = Contender("levers", 1, 2, build_all, (seq_len,))
    process.start()
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for round_number in range(1 + rounds):
        for name, taken in seconds.items():
            took, _ = process.step(name)
            if round_number:
                taken.append(took)
    peaks = {name: process.step(f"activations/{name}")[1][0] for name in SETTINGS}
    process.stop()
    return [
        {
            "seq_len": seq_len,
            "rounds": rounds,
            "lever": "chunked loss" if name == "plain" else name,
            "seconds": round(statistics.median(seconds[name]), 3),
            "seconds_without": round(statistics.median(seconds[base]), 3),
            "time_ratio": round(ratio(seconds[name], seconds[base]), 3),
            "peak_MiB": round(peaks[name] / 2**20, 1),
            "peak_without_MiB": round(peaks[base] / 2**20, 1),
        }
        for name, base in COMPARED.items()
    ]


def main() -> None:
    """Measure and write ``results/levers.json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lengths", nargs="*", type=int, default=[16384])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    results = []
    for seq_len in args.lengths:
        for row in measure(seq_len, args.rounds):
            print(row, flush=True)
            results.append(row)
    write_results("levers", results)


if __name__ == "__main__":
    main()
