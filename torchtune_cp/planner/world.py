"""Where a planned run would stand."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_cp.planner.devices import Device


@dataclass(frozen=True)
class World:
    """Where a run would stand.

    Attributes:
        size: Number of ranks.
        per_node: Ranks of a node.
        device: What each rank has.
    """

    size: int
    per_node: int
    device: Device
