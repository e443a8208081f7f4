"""How the launchers of a run's nodes find each other, and the address of their ranks' store.

Registered with torch's elastic agent as backends of this project. Unlike torch's they listen on the
loopback interface where no other node is to join, create a new store for the ranks at each start, wait where
signals are handled, and report in one line what they waited for. Only `c10d` (a varying number of nodes)
keeps pickled state in its store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtune_cp.launch.addresses import (
    LOOPBACK,
    AddressError,
    is_loopback,
    is_own,
    listen,
    shown,
    wait_for_store,
)
from torchtune_cp.launch.arrivals import Arrivals, Node, NodesMissing, Refused
from torchtune_cp.launch.rendezvous_options import DYNAMIC, NODE_RANK, ONE_NODE, STATIC, TIMEOUT


def register() -> None:
    """Let torch's elastic agent find the backends of this file."""
    for name, kind in ((ONE_NODE, OneNode), (STATIC, StaticNodes), (DYNAMIC, DynamicNodes)):
        rendezvous_handler_registry.register(name, kind)


class _Rendezvous(RendezvousHandler):
    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params
        self._ranks_meet: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name that was passed to torch's agent."""
        return self._params.backend

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks join a store that a launcher keeps."""
        return True

    def get_run_id(self) -> str:
        """Return `--rdzv-id`."""
        return self._params.run_id

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed for further nodes."""
        return False

    def set_closed(self) -> None:
        """Do nothing: `shutdown` notifies the others."""

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one to start its ranks again."""
        return 0

    def shutdown(self) -> bool:
        """Leave."""
        return True


def _serve(host: str, port: int) -> TCPStore:
    """Keep a store where others know this machine as `host`."""
    try:
        listener = listen(host, port)
    except AddressError as error:
        raise RendezvousConnectionError(str(error)) from None
    address, port = (host if is_loopback(host) else LOOPBACK), listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class OneNode(_Rendezvous):
    """All ranks are on this node: a store on the loopback interface, new for each start."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Create the store without waiting for other nodes."""
        host, port = parse_rendezvous_endpoint(self._params.endpoint, 0)
        self._ranks_meet = None  # it may hold the port that the next one is to have
        self._ranks_meet = _serve(host, port)
        meeting = RendezvousStoreInfo(host, self._ranks_meet.port)
        return RendezvousInfo(HashStore(), 0, 1, meeting)


class _SeveralNodes(_Rendezvous):
    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params)
        self._timeout_s = int(params.config[TIMEOUT])
        self._in_file = params.get("store_type", "tcp").strip().lower() == "file"
        self._host, self._port, self._address = "", 0, params.endpoint
        if not self._in_file:
            self._host, self._port = parse_rendezvous_endpoint(params.endpoint, 0)
            self._address = shown(self._host, self._port)

    def _store_lost(self) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"the store at {self._address} is lost: the node that hosts it has failed or exited"
        )

    def _late(self, missing: str) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(
            f"waited {self._timeout_s} s (--rdzv-timeout) at {self._address} for {missing}"
        )

    def _wait_for_store(self, deadline: float) -> None:
        try:
            wait_for_store(self._host, self._port, deadline)
        except AddressError as error:
            raise self._late(f"the node that hosts the store: {error}") from None

    def _meet(self, store: Store, rank: int, world: int, deadline: float) -> RendezvousStoreInfo:
        """Wait until all nodes of this start are there; returns the address of the ranks' store."""
        fewest, most = self._params.min_nodes, self._params.max_nodes
        nnodes = str(most) if fewest == most else f"{fewest}:{most}"
        me = Node(rank, nnodes, self._params.run_id, socket.gethostname(), os.getpid())
        arrivals = Arrivals(store, world)
        try:
            arrivals.arrive(me)
            if rank == 0:
                return self._open(arrivals, me, deadline)
            host, port = arrivals.wait_until_open(me, deadline)
        except NodesMissing as missing:
            raise self._late(str(missing)) from None
        except Refused as refused:
            raise RendezvousStateError(f"{refused} (they met at {self._address})") from None
        except RuntimeError:
            raise self._store_lost() from None
        if (host, port) != (self._host, self._port):
            try:
                wait_for_store(host, port, max(deadline, time.monotonic() + 1))
            except AddressError as error:
                raise RendezvousConnectionError(
                    f"node 0 announces the ranks' store at {shown(host, port)}: {error}"
                    " (--local-addr on node 0 gives it another name)"
                ) from None
        return RendezvousStoreInfo(host, port)

    def _open(self, arrivals: Arrivals, me: Node, deadline: float) -> RendezvousStoreInfo:
        try:
            arrivals.gather(me, deadline)
            meeting = self._store_for_ranks()
        except NodesMissing as missing:
            arrivals.give_up(f"node 0 has waited {self._timeout_s} s for {missing}")
            raise
        except (Refused, RendezvousConnectionError) as error:
            arrivals.give_up(str(error))
            raise
        arrivals.open(meeting.master_addr, meeting.master_port)
        return meeting

    def _store_for_ranks(self) -> RendezvousStoreInfo:
        raise NotImplementedError


class StaticNodes(_SeveralNodes):
    """A fixed number of nodes with numbers of their own; node 0 keeps the store. Nothing is pickled."""

    def __init__(self, params: RendezvousParameters) -> None:
        """Take the options; nothing is opened yet."""
        super().__init__(params)
        self._rank = int(params.config[NODE_RANK])
        self._store: TCPStore | None = None
        self._start = 0
        self._looked_at = 0.0

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes, at the first start and whenever the ranks start again."""
        deadline = time.monotonic() + self._timeout_s
        if self._store is None:
            self._store = self._keep(deadline) if self._rank == 0 else self._join(deadline)
        world = self._params.max_nodes
        meeting = self._meet(self._notes("nodes"), self._rank, world, deadline)
        agents = self._notes("agents")
        self._start += 1
        return RendezvousInfo(agents, self._rank, world, meeting)

    def _notes(self, of: str) -> Store:
        assert self._store is not None
        return PrefixStore(f"{of}/{self._start}", self._store)

    def _keep(self, deadline: float) -> TCPStore:
        store = _serve(self._host, self._port)
        if is_loopback(self._host):
            return store
        # The others must find this store under that name, and not that of another node 0.
        mark = uuid.uuid4().hex
        store.set("mark", mark)
        found = self._join(deadline)
        if not found.check(["mark"]) or found.get("mark").decode() != mark:
            raise RendezvousConnectionError(
                f"the store at {self._address} is another machine's: its node has --node-rank 0 as"
                " well, or --master-addr is not this node's"
            )
        return store

    def _join(self, deadline: float) -> TCPStore:
        self._wait_for_store(deadline)
        try:
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False)
        except RuntimeError:
            raise self._store_lost() from None
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return store

    def _store_for_ranks(self) -> RendezvousStoreInfo:
        if self._start == 0:
            return RendezvousStoreInfo(self._host, self._port)
        # A later start must not find what the ranks before have left in the store.
        self._ranks_meet = _serve(self._host, 0)
        return RendezvousStoreInfo(self._host, self._ranks_meet.port)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one to start its ranks again; looks once a second."""
        if time.monotonic() - self._looked_at < 1:
            return 0
        self._looked_at = time.monotonic()
        try:
            return Arrivals(self._notes("nodes"), self._params.max_nodes).count()
        except RuntimeError:
            raise self._store_lost() from None

    def shutdown(self) -> bool:
        """Leave; nodes that wait for this one to start again need not."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the node that keeps the store may have left
                arrivals = Arrivals(self._notes("nodes"), self._params.max_nodes)
                arrivals.leave(f"node {self._rank} ({socket.gethostname()}) has ended")
        return True


class DynamicNodes(_SeveralNodes):
    """Torch's own `c10d` rendezvous, whose state is pickled: nodes that join and leave."""

    def __init__(self, params: RendezvousParameters) -> None:
        """Take the options; nothing is opened yet."""
        super().__init__(params)
        self._told_to_keep = params.get_as_bool("is_host")
        self._inner: RendezvousHandler | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until enough nodes have joined."""
        if self._inner is None:
            self._inner = self._join(time.monotonic() + self._timeout_s)
        run = f"--rdzv-id {self._params.run_id}"
        try:
            info = self._inner.next_rendezvous()
        except RendezvousTimeoutError:
            fewest = self._params.min_nodes
            raise self._late(f"at least {fewest} nodes of {run}, and fewer joined") from None
        except RendezvousClosedError:
            raise RendezvousClosedError(
                f"the run {run} at {self._address} has ended: give another --rdzv-id"
            ) from None
        except RendezvousConnectionError:
            raise self._store_lost() from None
        except RendezvousStateError:
            raise RendezvousStateError(
                f"the data at {self._address} is not the state of a run"
            ) from None
        deadline = time.monotonic() + self._timeout_s
        nodes = PrefixStore("nodes", info.store)
        meeting = self._meet(nodes, info.rank, info.world_size, deadline)
        return RendezvousInfo(info.store, info.rank, info.world_size, meeting)

    def _join(self, deadline: float) -> RendezvousHandler:
        """Keep the store, or wait for the node that does."""
        while True:
            if not self._in_file:
                keeps = self._keeps_the_store()
                self._params.config["is_host"] = str(keeps)
                if not keeps:
                    self._wait_for_store(deadline)
            try:
                backend, store = create_backend(self._params)
            except RendezvousConnectionError:
                # Another launcher on this machine was faster, or the store went after it had answered.
                if self._in_file or time.monotonic() > deadline:
                    raise self._store_lost() from None
                time.sleep(0.1)
                continue
            return create_handler(store, backend, self._params)

    def _keeps_the_store(self) -> bool:
        try:
            if self._told_to_keep is False or not (self._told_to_keep or is_own(self._host)):
                return False
            listen(self._host, self._port).close()
        except AddressError:
            # A name that is not known yet; or a port that is held, maybe by a launcher of this run.
            return False
        return True

    def _store_for_ranks(self) -> RendezvousStoreInfo:
        here = self._params.local_addr or socket.getfqdn()
        if self._params.max_nodes == 1 or (self._host and is_loopback(self._host)):
            here = LOOPBACK
        self._ranks_meet = _serve(here, 0)
        return RendezvousStoreInfo(here, self._ranks_meet.port)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join."""
        assert self._inner is not None
        try:
            return self._inner.num_nodes_waiting()
        except RendezvousConnectionError:
            raise self._store_lost() from None

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed for further nodes."""
        return self._inner is not None and self._inner.is_closed()

    def set_closed(self) -> None:
        """Close the rendezvous for further nodes."""
        if self._inner is not None:
            self._inner.set_closed()

    def shutdown(self) -> bool:
        """Leave, and close the run for all."""
        return self._inner is None or self._inner.shutdown()
