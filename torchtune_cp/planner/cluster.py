"""The hardware of a planned run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchtune_cp.planner.devices import Device


@dataclass(frozen=True)
class Cluster:
    """The hardware of a planned run.

    Attributes:
        size: Number of ranks.
        per_node: Ranks of a node.
        device: What each rank has.
        host_memory: Bytes of a node, shared by its ranks; infinite if not given.
    """

    size: int
    per_node: int
    device: Device
    host_memory: float = math.inf

    @property
    def on_a_node(self) -> int:
        """Ranks that share a node's memory."""
        return min(self.per_node, self.size)
