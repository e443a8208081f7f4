"""Launchers that meet, and launchers that do not: what each says, how it ends, what it leaves.

All of them run at once, as real processes; they mostly wait.
"""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.launchers import launch_all

pytestmark = pytest.mark.distributed

WAIT_S = 3
#: Reserved by RFC 2606 and RFC 5737: no such name, no such machine.
UNKNOWN, UNREACHABLE = "no-such-host.invalid", "192.0.2.77"

RECIPE = """
import os, sys, time
at = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
node, start = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
fails = sys.argv[1:]
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} at {at}\\n")
if f"{node}@{at.rpartition(':')[2]}" in fails:
    sys.exit(3)
if f"{node}@late" in fails:
    time.sleep(1)
    sys.exit(4)
if "wait" in fails and at.endswith(":" + fails[-1]):
    time.sleep(60)
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _own_address() -> str | None:
    """An address of this machine that is not of the loopback interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((UNREACHABLE, 1))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


class Strangers:
    """Programs that hold a port: one says nothing, one answers garbage."""

    def __init__(self) -> None:
        self.silent = socket.create_server(("127.0.0.1", 0))
        self.garbage = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self.garbage.accept()
                connection.recv(16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()
            except ConnectionError:
                continue
            except OSError:
                return  # closed: the test is over

    def close(self) -> None:
        self.silent.close()
        self.garbage.close()


class Scenes:
    """The launches by name, and the ports that they use."""

    def __init__(self, strangers: Strangers) -> None:
        self.silent = strangers.silent.getsockname()[1]
        self.garbage = strangers.garbage.getsockname()[1]
        self.launches: dict[str, dict[str, Any]] = {}
        self.addresses: dict[str, str] = {}
        self._errors()
        self._pairs()

    def _static(
        self, name: str, nnodes: int, rank: int, host: str, port: int, *more: str, **when: Any
    ) -> None:
        master = ["--master-addr", host, "--master-port", str(port)]
        self._add(name, host, port, nnodes, ["--node-rank", str(rank), *master], more, when)

    def _c10d(self, name: str, nnodes: int, host: str, port: int, *more: str, **when: Any) -> None:
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
        options += ["--rdzv-id", str(when.pop("run", "r"))]
        self._add(name, host, port, nnodes, options, more, when)

    def _add(
        self, name: str, host: str, port: int, nnodes: int, options: list, more: tuple, when: dict
    ) -> None:
        self.addresses[name] = f"{host}:{port}"
        wait = (
            [] if "--rdzv-timeout" in options else ["--rdzv-timeout", str(when.pop("wait", WAIT_S))]
        )
        restarts = ["--max-restarts", str(when.pop("restarts", 0))]
        argv = ["--nnodes", str(nnodes), *wait, *restarts, *options, "recipe.py", *more]
        self.launches[name] = {"argv": argv, **when}

    def _errors(self) -> None:
        local = "127.0.0.1"
        self._static("no master", 2, 1, local, _free_port())
        self._static("no such machine", 2, 1, UNREACHABLE, 29500)
        self._static("no such name", 2, 1, UNKNOWN, 29500)
        self._static("master with no such name", 2, 0, UNKNOWN, _free_port())
        self._static("silent stranger", 2, 1, local, self.silent)
        self._static("garbage", 2, 1, local, self.garbage)
        self._static("port held", 2, 0, local, self.silent)
        self._static("no other node", 2, 0, local, _free_port())
        self._static(
            "told to stop", 2, 0, local, _free_port(), wait=60, signal="SIGTERM", signal_after=1
        )
        self._c10d("c10d no such machine", 2, UNREACHABLE, 29500)
        self._c10d("c10d no such name", 2, UNKNOWN, 29500)
        self._c10d("c10d silent stranger", 2, local, self.silent)
        self._c10d("c10d garbage", 2, local, self.garbage)
        self._c10d("c10d no other node", 2, local, _free_port())
        options = ["--master-port", str(self.silent)]
        self._add("one node, port held", local, self.silent, 1, options, (), {})

    def _pairs(self) -> None:
        host = _own_address() or "127.0.0.1"
        for name, address in (("together", "127.0.0.1"), ("by address", host)):
            port = _free_port()
            for rank in (0, 1):
                self._static(f"{name} {rank}", 2, rank, address, port)
        port = _free_port()
        for rank, nnodes in ((0, 2), (1, 3)):
            self._static(f"unlike {rank}", nnodes, rank, "127.0.0.1", port)
        port = _free_port()
        for rank, label in ((0, 0), (1, 1), (1, 2)):
            self._static(f"twice {label}", 3, rank, "127.0.0.1", port)
        port = _free_port()
        for rank in (0, 1):
            # Node 1 fails in the first start, whose store has the port that was named.
            more = (f"1@{port}", "wait", str(port))
            self._static(f"again {rank}", 2, rank, "127.0.0.1", port, *more, restarts=1, wait=20)
        port = _free_port()
        for rank in (0, 1):
            more = (f"1@{port}", "0@late")
            self._static(
                f"alone {rank}", 2, rank, "127.0.0.1", port, *more, restarts=1 - rank, wait=20
            )
        port = _free_port()
        for label in (0, 1):
            self._c10d(f"c10d together {label}", 2, "127.0.0.1", port, after=label / 2, wait=20)
        port = _free_port()
        for label, nnodes in ((0, 3), (1, 2)):
            self._c10d(f"c10d unlike {label}", nnodes, "127.0.0.1", port, after=label / 2)


@pytest.fixture(scope="module")
def scenes(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Scenes, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "recipe.py").write_text(RECIPE)
    strangers = Strangers()
    scenes = Scenes(strangers)
    results = launch_all(list(scenes.launches.values()), folder)
    strangers.close()
    return scenes, dict(zip(scenes.launches, results, strict=True)), folder


NO_STORE = "the port is used by another program, not by a torch store"
KEEPER = "for the node that hosts the store: "


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no master", KEEPER + "nothing listens there"),
        ("no such machine", KEEPER),
        ("no such name", KEEPER + "the host name is not known here"),
        ("master with no such name", KEEPER + "the host name is not known here"),
        ("silent stranger", KEEPER + NO_STORE),
        ("garbage", KEEPER + NO_STORE),
        ("no other node", "for node 1 of 2 (counted from 0)"),
        ("c10d no such machine", KEEPER),
        ("c10d no such name", KEEPER + "the host name is not known here"),
        ("c10d silent stranger", KEEPER + NO_STORE),
        ("c10d garbage", KEEPER + NO_STORE),
        ("c10d no other node", "for at least 2 nodes of --rdzv-id r, and fewer joined"),
    ],
)
def test_what_was_waited_for_and_where_is_one_line_when_the_time_is_over(
    scenes: tuple, name: str, said: str
) -> None:
    shown, results, _ = scenes
    assert results[name]["code"] == 1
    (line,) = results[name]["said"]
    address = shown.addresses[name]
    assert line.startswith(f"error: waited {WAIT_S} s (--rdzv-timeout) at {address} {said}")


@pytest.mark.parametrize("name", ["port held", "one node, port held"])
def test_a_port_that_another_program_holds_is_named_at_once(scenes: tuple, name: str) -> None:
    shown, results, _ = scenes
    line = f"error: cannot listen at {shown.addresses[name]}: another program uses the port"
    assert (results[name]["code"], results[name]["said"]) == (1, [line])


@pytest.mark.parametrize("name", ["together", "by address", "c10d together"])
def test_two_nodes_meet(scenes: tuple, name: str) -> None:
    _, results, _ = scenes
    pair = [results[f"{name} {label}"] for label in (0, 1)]
    assert [one["code"] for one in pair] == [0, 0], pair
    lines = sorted(line for one in pair for line in one["said"] if line.startswith("rank"))
    assert [line.partition(" at ")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        (
            "unlike",
            (0, 1),
            r"node 1 \(.+\) was started with --nnodes 3, node 0 \(.+\) with --nnodes 2",
        ),
        ("c10d unlike", (0, 1), r"was started with --nnodes 2, .* with --nnodes 3"),
        ("twice", (0, 1, 2), r"two nodes were started with --node-rank 1"),
    ],
)
def test_nodes_that_were_started_unlike_all_say_so(
    scenes: tuple, name: str, labels: tuple[int, ...], said: str
) -> None:
    _, results, _ = scenes
    for label in labels:
        assert results[f"{name} {label}"]["code"] == 1
        (line,) = results[f"{name} {label}"]["said"]
        assert re.search(said, line), line


def test_when_a_node_fails_all_nodes_start_again_at_a_new_store(scenes: tuple) -> None:
    shown, results, _ = scenes
    pair = [results[f"again {rank}"] for rank in (0, 1)]
    assert [one["code"] for one in pair] == [0, 0], pair
    assert any("restart 1 of 1: rank 1 failed with exit code 3" in line for line in pair[1]["said"])
    stores = [
        [line.partition(" at ")[2] for line in one["said"] if line.startswith("rank")]
        for one in pair
    ]
    assert stores[0] == stores[1]
    first, second = stores[0]
    assert first == shown.addresses["again 0"] != second


def test_a_node_that_has_ended_is_not_waited_for(scenes: tuple) -> None:
    _, results, _ = scenes
    assert results["alone 1"]["said"][-1] == "error: rank 1 failed with exit code 3"
    assert re.search(r"^error: node 1 \(.+\) has ended", results["alone 0"]["said"][-1])
    assert results["alone 0"]["code"] == results["alone 1"]["code"] == 1


def test_a_signal_is_heard_while_others_are_waited_for(scenes: tuple) -> None:
    _, results, _ = scenes
    assert results["told to stop"]["code"] == 143
    assert results["told to stop"]["said"] == ["error: stopped by SIGTERM"]


def test_none_of_them_leaves_anything(scenes: tuple) -> None:
    _, _, folder = scenes
    assert [path.name for path in folder.iterdir()] == ["recipe.py"]
