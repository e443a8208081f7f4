"""Python values as plain JSON and back, for the state of schedules and optimizers: no pickle.

JSON has neither tuples nor integer keys nor NaN, and state dicts have all three, so these are
written as one-entry objects whose key names the type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from torchtune_cp.errors import UserError

_TUPLE, _PAIRS, _NUMBER, _TENSOR = "__tuple__", "__pairs__", "__number__", "__tensor__"
_TAGS = (_TUPLE, _PAIRS, _NUMBER, _TENSOR)


def to_plain(value: Any) -> Any:
    """Turn nested containers of numbers, strings and zero-dimensional tensors into plain JSON.

    Args:
        value: What a `state_dict` holds besides its large tensors.

    Raises:
        TypeError: A value of another type, which is named.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: str(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not any(tag in value for tag in _TAGS):
            return {key: to_plain(item) for key, item in value.items()}
        return {_PAIRS: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), to_plain(value.item())]}
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def from_plain_like(value: Any, like: Any, name: str) -> Any:
    """Undo `to_plain` for a value that is to take another one's place.

    Args:
        value: From a file.
        like: What is there now: the new value must be of its kind.
        name: What messages call it.

    Raises:
        UserError: It is not.
    """
    try:
        found = from_plain(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"checkpoint.json: {name}: {' '.join(str(error).split())[:300]}") from None
    if not _same_kind(found, like):
        raise UserError(
            f"checkpoint.json: {name} is {repr(found)[:120]}, where this run has {repr(like)[:120]}"
        )
    return found


def _same_kind(value: Any, like: Any) -> bool:
    if isinstance(like, Mapping):
        # Another version of torch may know others.
        return isinstance(value, Mapping) and all(
            _same_kind(value[name], like[name]) for name in value.keys() & like.keys()
        )
    if isinstance(like, (list, tuple)):
        fits = type(value) is type(like) and len(value) == len(like)
        return fits and all(map(_same_kind, value, like))
    numbers = (int, float)
    if isinstance(like, numbers) and not isinstance(like, bool):
        return isinstance(value, numbers) and not isinstance(value, bool)
    if isinstance(like, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.shape == like.shape
    return value is None or like is None or type(value) is type(like)


def from_plain(value: Any) -> Any:
    """Undo `to_plain`; tensors are returned on the CPU.

    Raises:
        ValueError: What `to_plain` does not write.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(tag in value for tag in _TAGS):
        return {key: from_plain(item) for key, item in value.items()}
    try:
        ((tag, content),) = value.items()
        if tag == _TUPLE:
            return tuple(from_plain(item) for item in content)
        if tag == _PAIRS:
            return {from_plain(key): from_plain(item) for key, item in content}
        if tag == _NUMBER:
            return float(content)
        dtype = getattr(torch, content[0])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{content[0]!r} is not a tensor's type")
        return torch.tensor(from_plain(content[1]), dtype=dtype)
    except (
        LookupError,
        AttributeError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"not a value of a checkpoint: {value!r}: {error}") from error
