"""The record of a simulated step: memory, operations and communication, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: What the bytes on the device are, in the order of tables and pictures.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "attention",
    "loss",
    "working",
    "batch",
)

#: One line each, for people.
MEANING = {
    "parameters": "this rank's shards of the parameters",
    "gradients": "gradients, unsharded before and sharded after the reduction, with its buffers",
    "optimizer": "optimizer state and temporary memory of its step",
    "activations": "kept from forward for backward",
    "gathered": "gathered parameters, with the buffers of the all-gather",
    "attention": "temporary memory of attention, forward and backward",
    "loss": "logits of a chunk, gradients of hidden states and of the output projection",
    "working": "temporary memory of the layers within one pass",
    "batch": "token ids, labels, positions",
}

#: The stages of a step.
PHASES = ("count", "forward", "backward", "norm", "update", "finish")


class Location(NamedTuple):
    """Where in the step an operator runs.

    Attributes:
        phase: One of `PHASES`.
        layer: Index of the transformer layer, -1 outside.
        path: Module below the layer, or of the model; empty outside of modules.
        activity: `attention`, `loss`, `gather`, `reduce` or empty.
        again: Whether forward is being computed a second time, inside backward.
    """

    phase: str
    layer: int
    path: str
    activity: str
    again: bool = False

    def describe(self) -> str:
        """Say it in words."""
        module = self.path if self.layer < 0 else f"layers.{self.layer}.{self.path}".rstrip(".")
        what = "recomputation in backward" if self.again else self.phase
        extra = {"gather": ", gathering parameters", "reduce": ", reducing gradients"}
        return f"{what}{' of ' if module else ''}{module}{extra.get(self.activity, '')}"


class Transfer(NamedTuple):
    """One kind of collective on one mesh dimension.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` or `broadcast`.
        mesh: Name of the mesh dimension.
        phase: One of `PHASES`.
    """

    kind: str
    mesh: str
    phase: str


@dataclass
class Trace:
    """A step as one rank sees it.

    Attributes:
        locations: The distinct locations.
        location: [ops] index into `locations` of each operator.
        device: [ops, categories] bytes on the device while each operator runs (its own working space
            included), by `CATEGORIES`.
        host: [ops] bytes in host memory; all 0 where the device is the host.
        transfers: Bytes sent by this rank and calls.
        flops: Floating-point operations by (kind, whether computed a second time); kinds are
            `matmul`, `attention` and `attention_backward`.
        moved: Bytes that operators without a matrix product read and write on the device.
        host_moved: The same on the host.
        copied: Bytes copied from the device to the host or back.
        pageable: The most bytes of host memory that are not pinned.
        pinned: Pinned host memory: peak size of live buffers, as rounded by torch.
        backlog: Bytes of all gradients (and copies of shards) that may wait on the host at once for an
            optimizer that steps there; here each is stepped as soon as it is there.
    """

    locations: list[Location]
    location: np.ndarray
    device: np.ndarray
    host: np.ndarray
    transfers: dict[Transfer, tuple[float, float]] = field(default_factory=dict)
    flops: dict[tuple[str, bool], float] = field(default_factory=dict)
    moved: float = 0.0
    host_moved: float = 0.0
    copied: float = 0.0
    pageable: int = 0
    pinned: dict[int, float] = field(default_factory=dict)
    backlog: int = 0


def rounded_when_pinned(num_bytes: int) -> int:
    """What torch takes for a buffer of pinned memory: a power of two (2.11 to 2.13)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
