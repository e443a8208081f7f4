"""Random numbers that do not depend on the mesh."""

from __future__ import annotations

import random
import secrets

import numpy as np
import torch
import torch.distributed as dist


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch equally on every rank.

    Weights are drawn per parameter and data order per epoch from separate generators, so nothing
    here needs another seed per rank.

    Args:
        seed: From 0 to 2**32 - 1.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def shared_seed(seed: int | None) -> int:
    """Agree on a seed; all ranks must call it.

    Args:
        seed: The config's seed, or None to draw one on rank 0.

    Returns:
        The same number on every rank.
    """
    if seed is not None:
        return seed
    drawn = [secrets.randbits(31)]
    dist.broadcast_object_list(drawn, src=0)
    return drawn[0]
