"""Writes safetensors files one tensor at a time: the library's writer needs a whole file in memory."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

#: The format's names of the types that are written here.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: The types that weights may have.
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def header_bytes(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return what a file begins with (https://huggingface.co/docs/safetensors).

    Args:
        tensors: Name, type and shape of each tensor, in the order in which their bytes follow.
        metadata: Texts of the writer's own.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    first = 0
    for name, dtype, shape in tensors:
        assert name not in header, f"{name} twice in one file"
        last = first + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [first, last],
        }
        first = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned, as the format asks
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes; a copy only of one that is on a GPU or not contiguous."""
    # numpy has no bfloat16: pass the bytes.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
