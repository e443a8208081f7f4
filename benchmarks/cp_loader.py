"""The data loader of context parallelism against scattering pickled batches, and how much of it a step hides.

python -m benchmarks.cp_loader [TOKENS [ROUNDS]]

Batches of 64K tokens of proteins of UniProt's lengths, masked and packed, over 2 and 4 ranks on gloo. The
comparable recipe has its reader cut the batch for every rank and hand the parts out with
`torch.distributed.scatter_object_list`; here both do so with the same batches, in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import Contender, ratio, write_results
from torchtune_cp.attention import AttentionMask
from torchtune_cp.data import (
    MaskedDataset,
    MaskedLMCollator,
    TokenBudgetDataset,
    create_cp_dataloader,
    esm_tokenizer,
    mlm_masking,
)
from torchtune_cp.data.slice_channel import BATCH, Message, SliceChannel, encoded
from torchtune_cp.distributed import context_parallel
from torchtune_cp.distributed.context_parallel.cut import balanced_slices
from torchtune_cp.models.esm2 import esm2

TOKENS, ROUNDS = 65_536, 30
WARMUP = 5
STEPS = 4
LENGTHS = Path(__file__).parents[1] / "tests" / "assets" / "protein_lengths.txt"
#: Small: a step of some seconds on a core is little to hide a batch behind.
MODEL = {"num_layers": 2, "num_heads": 4, "embed_dim": 64}


class Proteins:
    """Random residues, as many as real proteins have."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self._samples = [
            [0, *torch.randint(4, 24, (int(n),), generator=g).tolist(), 2]
            for n in LENGTHS.read_text().split()
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self._samples[index], "labels": self._samples[index]}


def _batches_of(tokens: int) -> TokenBudgetDataset:
    masked = MaskedDataset(Proteins(), mlm_masking(esm_tokenizer()))
    return TokenBudgetDataset(masked, tokens, oversize="split", strategy="best_fit")


def _collator() -> MaskedLMCollator:
    tokenizer = esm_tokenizer()
    return MaskedLMCollator("thd", tokenizer.pad_id, mask_id=tokenizer.mask_id)


def _scatter_objects(slices: list[dict[str, torch.Tensor]] | None) -> dict[str, torch.Tensor]:
    got: list[Any] = [None]
    dist.scatter_object_list(got, slices, src=0)
    return got[0]


def _send_slices(
    channel: SliceChannel, slices: list[dict[str, torch.Tensor]] | None
) -> dict[str, torch.Tensor]:
    if slices is None:
        message = channel.receive()
    else:
        messages = [Message(BATCH, entries=entries) for entries in slices]
        message = channel.send(messages, [encoded(m) for m in messages[1:]])
    assert message.entries is not None
    return dict(message.entries)


def build_transfer(tokens: int, cp: int) -> Callable[[str], Any]:
    """Build a function that hands one batch out: `"slices"` or `"objects"`, with its seconds.

    The seconds are from the whole batch on the reader to the slice on this rank, cutting included; the
    ranks begin together.
    """
    channel = SliceChannel(range(cp))
    packs, collate = _batches_of(tokens), _collator()
    batches = [collate([packs[i]]) for i in range(min(len(packs), 8))]
    ways = {"slices": partial(_send_slices, channel), "objects": _scatter_objects}
    done = dict.fromkeys(ways, 0)

    def distribute(way: str) -> tuple[float, float, int]:
        batch = batches[done[way] % len(batches)]
        done[way] += 1
        dist.barrier()
        start = time.perf_counter()
        slices: Any = None
        if dist.get_rank() == 0:
            slices = balanced_slices(batch, cp, AttentionMask(is_causal=False))
        if dist.get_rank() == 0 and way == "objects":
            # The parts are views of one tensor, all of which each of them would be pickled with.
            slices = [{name: part.clone() for name, part in own.items()} for own in slices]
        cut = time.perf_counter() - start
        got = ways[way](slices)
        seconds = time.perf_counter() - start
        return seconds, cut, int(got["tokens"].sum())

    return distribute


def build_steps(tokens: int, cp: int) -> Callable[[str], Any]:
    """Build a function that takes the loader's next batch and trains on it, or does not.

    `"step"` gives the seconds of waiting for the batch and of the step, `"read"` the seconds of the
    batch alone; `"close"` ends the loader.
    """
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    loader, _ = create_cp_dataloader(
        partial(_batches_of, tokens), mesh, collate_fn=_collator(), shuffle=False
    )
    torch.manual_seed(0)
    model = esm2(**MODEL)

    def endless() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def train(batch: dict[str, torch.Tensor]) -> None:
        with context_parallel(mesh, batch, is_causal=False) as local:
            hidden = model(
                local["tokens"],
                local["input_pos"],
                token_dropout_scale=local["token_dropout_scale"],
            )
            hidden.logsumexp(-1).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None

    def step(command: str) -> tuple[float, float]:
        if command == "close":
            loader.close()
            return 0.0, 0.0
        dist.barrier()
        start = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - start
        if command == "step":
            train(batch)
        return waited, time.perf_counter() - start

    return step


def _slowest(answers: list[Any], place: int) -> float:
    return max(answer[place] for answer in answers)


def measure_transfer(tokens: int, cp: int, rounds: int) -> dict[str, Any]:
    """Hand batches out in both ways in turn."""
    ranks = Contender("transfer", cp, 1, build_transfer, (tokens, cp))
    ranks.start()
    whole: dict[str, list[float]] = {"slices": [], "objects": []}
    moved: dict[str, list[float]] = {"slices": [], "objects": []}
    sums: dict[str, list[Any]] = {"slices": [], "objects": []}
    for round_number in range(WARMUP + rounds):
        for way in whole:
            _, answers = ranks.step(way)
            sums[way].append([answer[2] for answer in answers])
            if round_number >= WARMUP:
                seconds = _slowest(answers, 0)
                whole[way].append(seconds)
                moved[way].append(seconds - _slowest(answers, 1))
    ranks.stop()
    assert sums["slices"] == sums["objects"], "both ways must give every rank the same slices"
    return {
        "slices_ms": round(1e3 * statistics.median(whole["slices"]), 2),
        "scatter_object_list_ms": round(1e3 * statistics.median(whole["objects"]), 2),
        "times_faster": round(ratio(whole["objects"], whole["slices"]), 2),
        "times_faster_without_cutting": round(ratio(moved["objects"], moved["slices"]), 2),
    }


def measure_hidden(tokens: int, cp: int) -> dict[str, Any]:
    """Read batches with and without a training step between them, a few of each in turn."""
    ranks = Contender("steps", cp, 1, build_steps, (tokens, cp))
    ranks.start()
    waits, steps, alone = [], [], []
    for command in ("step", "read"):
        ranks.step(command)  # warm-up
    for _ in range(STEPS // 2):
        for command, count in (("step", 3), ("read", 3)):
            # The first was read ahead during what came before.
            answers = [ranks.step(command)[1] for _ in range(count)][1:]
            if command == "read":
                alone += [_slowest(a, 0) for a in answers]
            else:
                waits += [_slowest(a, 0) for a in answers]
                steps += [_slowest(a, 1) for a in answers]
    ranks.step("close")
    ranks.stop()
    wait, reading = statistics.median(waits), statistics.median(alone)
    return {
        "batch_alone_ms": round(1e3 * reading, 1),
        "wait_in_a_step_ms": round(1e3 * wait, 1),
        "step_ms": round(1e3 * statistics.median(steps)),
        "hidden_share": round(1 - wait / reading, 3),
    }


def main() -> None:
    given = [int(a) for a in sys.argv[1:]]
    tokens, rounds = [*given, *(TOKENS, ROUNDS)[len(given) :]]
    results = []
    for cp in (2, 4):
        row = {
            "cp": cp,
            "tokens_of_a_batch": tokens,
            **measure_transfer(tokens, cp, rounds),
            **measure_hidden(tokens, cp),
        }
        print(row)
        results.append(row)
    write_results("cp_loader", results)


if __name__ == "__main__":
    main()
