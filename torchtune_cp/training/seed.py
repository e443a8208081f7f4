"""Random numbers that do not depend on the mesh."""

from __future__ import annotations

import random

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch alike on every rank.

    Weights are drawn per parameter and data order per epoch from generators of their own, so nothing
    here needs another seed per rank.

    Args:
        seed: From 0 to 2**32 - 1.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
