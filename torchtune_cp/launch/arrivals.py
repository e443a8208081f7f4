"""Which nodes have joined a start of the ranks: recorded in a store, decided by node 0."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import Store

_ARRIVED, _OVER, _OPENED, _ACKNOWLEDGED = "arrived", "over", "opened", "acknowledged"
_POLL_S = 0.1
#: How long node 0, which may keep the store, waits for the others to read why it gives up.
_FAREWELL_S = 3.0


class NodesMissing(Exception):
    """The time is over; the message names the nodes that are missing."""


class Refused(Exception):
    """The nodes cannot run together, or one of them has given up; the message gives the reason."""


@dataclass(frozen=True)
class Node:
    """What a node publishes about itself.

    Attributes:
        rank: `--node-rank`, or what the rendezvous gave it.
        nnodes: `--nnodes`, the same on all.
        run: `--rdzv-id`, the same on all.
        host: Name of the machine.
        pid: Of the launcher.
    """

    rank: int
    nnodes: str
    run: str
    host: str
    pid: int

    def __str__(self) -> str:
        """Name it for a message."""
        return f"node {self.rank} ({self.host})"


class Arrivals:
    """The nodes of one start.

    Every call accesses the store and raises `RuntimeError` when it is unreachable.

    Args:
        store: Of this start alone.
        world: How many nodes there are.
    """

    def __init__(self, store: Store, world: int) -> None:
        self._store = store
        self._world = world

    def count(self) -> int:
        """Return how many nodes have come."""
        return self._store.add(_ARRIVED, 0)

    def arrive(self, me: Node) -> None:
        """Note that this node is here."""
        place = self._store.add(_ARRIVED, 1)
        self._store.set(f"{_ARRIVED}/{place}", json.dumps(asdict(me)))

    def gather(self, me: Node, deadline: float) -> None:
        """Wait, on node 0, until all nodes are there and check that they were started with the same options.

        Args:
            me: This node.
            deadline: On the clock of `time.monotonic`.

        Raises:
            NotAllCame: The time is over.
            Refused: They were started with different options, or one of them has given up.
        """
        while True:
            nodes = self._nodes()
            _check_same_options(me, nodes)
            if not self._missing(nodes):
                return
            self._wait_a_moment(deadline)

    def open(self, host: str, port: int) -> None:
        """Release the others: the ranks' store is at this address."""
        places = [(node.rank, node.host, node.pid) for node in self._nodes()]
        self._store.set(_OPENED, json.dumps({"host": host, "port": port, "nodes": places}))

    def wait_until_open(self, me: Node, deadline: float) -> tuple[str, int]:
        """Wait, on the other nodes, for node 0.

        Returns:
            Address of the ranks' store.

        Raises:
            NotAllCame: The time is over.
            Refused: Node 0 has given up, or has started without this node.
        """
        while not self._store.check([_OPENED]):
            self._wait_a_moment(deadline)
        opened = json.loads(self._store.get(_OPENED))
        if [me.rank, me.host, me.pid] not in opened["nodes"]:
            raise Refused(f"the run has already started with another node {me.rank}")
        return opened["host"], opened["port"]

    def give_up(self, why: str) -> None:
        """Notify the others that there will be no start, and wait shortly for their acknowledgement."""
        self.leave(why)
        until = time.monotonic() + _FAREWELL_S
        while self._store.add(_ACKNOWLEDGED, 0) < self.count() - 1 and time.monotonic() < until:
            time.sleep(_POLL_S)

    def leave(self, why: str) -> None:
        """Tell whoever comes to this start that there will be none; the first reason counts."""
        self._store.compare_set(_OVER, "", why)

    def _wait_a_moment(self, deadline: float) -> None:
        if self._store.check([_OVER]):
            why = self._store.get(_OVER).decode()
            self._store.add(_ACKNOWLEDGED, 1)
            raise Refused(why)
        if time.monotonic() > deadline:
            raise NodesMissing(_named(self._missing(self._nodes()), self._world))
        time.sleep(_POLL_S)

    def _nodes(self) -> list[Node]:
        keys = [f"{_ARRIVED}/{place}" for place in range(1, self.count() + 1)]
        texts = [self._store.get(key) for key in keys if self._store.check([key])]
        return [Node(**json.loads(text)) for text in texts]

    def _missing(self, nodes: Sequence[Node]) -> list[int]:
        return sorted(set(range(self._world)) - {node.rank for node in nodes})


def _check_same_options(me: Node, nodes: Sequence[Node]) -> None:
    seen: dict[int, Node] = {}
    for node in nodes:
        for option, theirs, ours in (
            ("--nnodes", node.nnodes, me.nnodes),
            ("--rdzv-id", node.run, me.run),
        ):
            if theirs != ours:
                raise Refused(
                    f"{node} was started with {option} {theirs}, {me} with {option} {ours}"
                )
        if node.rank in seen:
            raise Refused(
                f"two nodes were started with --node-rank {node.rank}: one on"
                f" {seen[node.rank].host}, one on {node.host}"
            )
        seen[node.rank] = node


def _named(missing: Sequence[int], world: int) -> str:
    if not missing:
        return f"node 0, which has not started the {world} nodes that have joined"
    some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"node{'s' if len(missing) > 1 else ''} {some} of {world} (counted from 0)"
