"""Step time and peak of activations with each memory lever against without it, interleaved.

python -m benchmarks.levers [--rounds N] [--lever NAME ...] [LENGTH ...]

Each setting runs in a separate process (in one process they disturb each other) with two threads; layers are
checkpointed. "whole loss" projects all tokens at once; the default loss, in chunks, is compared with it.
Head chunks are measured against tiles alone, both with attention by documents, which chunks need. With
`--lever` these alone are measured, into a separate file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import Contender, interleave, our_training, ratio, write_results

TILE = 2048
CHUNKED = {"num_output_chunks": 16}

#: Settings by name, and each lever with what it is compared with.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole loss": {"loss": {"num_output_chunks": 1, "max_chunk_tokens": 2**20}},
    "tiled MLP": {"mlp_tile_tokens": TILE},
    "tiled MLP, by documents": {"mlp_tile_tokens": TILE, "by_documents": True},
    # In tiles, or the MLP would hide what the chunks save.
    "head chunks": {"mlp_tile_tokens": TILE, "attention_head_chunks": 4},
    "head chunks of 2 KV heads": {"mlp_tile_tokens": TILE, "attention_head_chunks": 2},
    "reused hidden states": {"loss": CHUNKED | {"reuse_hidden": True}},
    "offloaded inputs": {"offload": True},
    "optimizer in backward": {"optimizer": "in_bwd"},
    "optimizer on the host": {"optimizer": "on_host"},
}
COMPARED = {
    "plain": "whole loss",
    "tiled MLP": "plain",
    "head chunks": "tiled MLP, by documents",
    "head chunks of 2 KV heads": "tiled MLP, by documents",
    "reused hidden states": "plain",
    "offloaded inputs": "plain",
    "optimizer in backward": "plain",
    "optimizer on the host": "plain",
}


def build(
    seq_len: int, optimizer: str = "", offload: bool = False, **settings: Any
) -> Callable[[str], Any]:
    """Build a training step with one lever.

    Args:
        seq_len: Tokens.
        optimizer: `in_bwd`, `on_host` or nothing.
        offload: Move the layers' inputs to the host.
        settings: For `our_training`.

    Returns:
        As `build_ours`; `activations` leaves out what lies on the host.
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


def measure(seq_len: int, rounds: int, levers: Sequence[str]) -> list[dict[str, Any]]:
    """Let the settings make steps in turn.

    Args:
        seq_len: Tokens of a step.
        rounds: Counted steps of each; one more comes before.
        levers: Of `COMPARED`.

    Returns:
        A row for each lever.
    """
    contenders = [
        Contender(name, 1, 2, build, (seq_len,), settings)
        for name, settings in SETTINGS.items()
        if name in levers or name in {COMPARED[lever] for lever in levers}
    ]
    for contender in contenders:
        contender.start()
    seconds = interleave(contenders, rounds)
    peaks = {c.name: c.step("activations")[1][0] for c in contenders}
    for contender in contenders:
        contender.stop()
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
        if name in levers
    ]


def main() -> None:
    """Measure and write `results/levers.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lengths", nargs="*", type=int, default=[16384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lever", action="append", choices=list(COMPARED))
    args = parser.parse_args()
    results = []
    for seq_len in args.lengths:
        for row in measure(seq_len, args.rounds, args.lever or list(COMPARED)):
            print(row, flush=True)
            results.append(row)
    write_results("levers_alone" if args.lever else "levers", results)


if __name__ == "__main__":
    main()
