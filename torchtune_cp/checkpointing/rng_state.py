"""The state of every random number generator of a rank, as tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch

from torchtune_cp.errors import UserError


def get_rng_state() -> dict[str, torch.Tensor]:
    """Read the generators of Python, NumPy, torch and, where there is one, this rank's CUDA device.

    Returns:
        `python` float64 [626], `numpy` float64 [627], `cpu` and `cuda` uint8. The integers of
        the first two are below 2**32, so float64 holds them exactly.
    """
    _, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937", kind
    assert isinstance(keys, np.ndarray)
    states = {
        "python": torch.tensor([*words, math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, cached], dtype=torch.float64),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    """Continue the generators where `get_rng_state` read them.

    Args:
        states: What it returned; a generator that is not named is left as it is.

    Raises:
        UserError: A state that no generator has.
    """
    try:
        _set(states)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the checkpoint's random state cannot be restored: {reason}") from error


def _set(states: Mapping[str, torch.Tensor]) -> None:
    if "python" in states:
        *words, gauss = states["python"].tolist()
        version = random.getstate()[0]
        random.setstate(
            (version, tuple(int(word) for word in words), None if math.isnan(gauss) else gauss)
        )
    if "numpy" in states:
        *keys, position, has_gauss, cached = states["numpy"].tolist()
        words32 = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", words32, int(position), int(has_gauss), cached))
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
