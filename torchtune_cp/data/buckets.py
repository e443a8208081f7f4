"""Few different lengths instead of many: what a compiled model needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtune_cp.distributed.context_parallel.cut import pad_batch

#: The smallest step between two lengths, in tokens.
SMALLEST_STEP = 128
#: Lengths between a power of two and the next: padding is at most 1 / this of a sequence.
STEPS_PER_OCTAVE = 8


def bucket_length(seq_len: int, longest: int | None = None) -> int:
    """Return the length that a sequence of ``seq_len`` tokens is padded to.

    Lengths are multiples of 128 up to 1,024; from there on each octave has eight (1,152, 1,280, ..., 2,048,
    2,304, ..., 4,096, 4,608, ...), so that padding stays below an eighth of a long sequence and all
    lengths from 1 to a million give 88 different ones.

    Args:
        seq_len: Tokens, at least 1.
        longest: What the run's sequences are cut to, where they are: a bucket of its own. None for no
            limit.

    Returns:
        The padded length.
    """
    octave = 1 << ((seq_len - 1).bit_length() - 1) if seq_len > 1 else 1
    step = max(SMALLEST_STEP, octave // STEPS_PER_OCTAVE)
    length = -(-seq_len // step) * step
    return longest if longest is not None and seq_len <= longest < length else length


def bucketed(
    collate: Callable[[Sequence[Any]], dict[str, torch.Tensor]], longest: int | None = None
) -> Callable[[Sequence[Any]], dict[str, torch.Tensor]]:
    """Make a collate function pad its batches to :func:`bucket_length`.

    Padding stands behind every token of a causal model and has no label, so it changes no result and is
    not counted.

    Args:
        collate: Samples -> a batch with ``tokens`` [b, s] and optionally ``labels`` and ``input_pos``.
        longest: See :func:`bucket_length`.

    Returns:
        The same with s a bucket's length; entries without a sequence dimension stay as they are.
    """
    return _Bucketed(collate, longest)


class _Bucketed:
    # A class, not a closure: loader workers pickle their collate function.
    def __init__(self, collate: Any, longest: int | None) -> None:
        self.collate, self.longest = collate, longest

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch = self.collate(samples)
        length = bucket_length(batch["tokens"].size(1), self.longest)
        return {**batch, **pad_batch(batch, length)}
