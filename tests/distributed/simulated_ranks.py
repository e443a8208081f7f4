"""The ranks of a context-parallel group as threads of one process: all of it but the process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_cp.distributed.context_parallel.collectives import Grid


class _Post:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.letters: list[tuple[torch.Tensor, ...]] = [()] * size


@dataclass(frozen=True)
class SimulatedGrid(Grid):
    """A grid whose all-to-all leaves letters for the other threads."""

    def _send(self, buffer, sent, got):
        post = self.group
        post.letters[self.rank] = buffer.clone().split(list(sent))
        post.barrier.wait(60)
        letters = [post.letters[sender][self.rank] for sender in range(self.size)]
        assert [letter.numel() for letter in letters] == list(got)
        received = torch.cat(letters)
        post.barrier.wait(60)
        return lambda: received

    def gather(self, part):
        return self.deal(part.expand(self.ring_size, *part.shape))


def simulate(size: int, fn: Callable[[Grid], Any], heads_split: int = 1) -> list[Any]:
    """Call ``fn`` with every rank's grid, each in its own thread; what each returned, by rank."""
    post = _Post(size)

    def run(rank: int) -> Any:
        try:
            return fn(SimulatedGrid(post, size, rank, heads_split))
        except BaseException:
            post.barrier.abort()  # or the others would wait for it
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (first or errors)[0]
        return [f.result() for f in futures]
