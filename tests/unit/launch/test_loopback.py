"""With one node nothing listens where another machine could reach it, by /proc/net and by trying."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux's /proc/net"),
]

RECIPE = """
import os, sys, time
import torch
from pathlib import Path

torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
folder = Path(sys.argv[1])
(folder / f"{os.environ['RANK']} of {int(total)}").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
torch.distributed.destroy_process_group()
"""


def _processes_of(launcher: int) -> Iterator[int]:
    """A process and all that it started, however indirectly."""
    yield launcher
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == launcher:
                    yield from _processes_of(int(entry.name))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # The kernel writes 32-bit words in the machine's order.
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))


def _listening(launcher: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    sockets = set()
    for pid in _processes_of(launcher):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A: LISTEN
                address, _, port = fields[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return found


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _outer_interface() -> tuple[str, str] | None:
    """An interface that other machines reach, and its address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 1))  # sends nothing
        except OSError:
            return None
        address = probe.getsockname()[0]
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
        return (routes[0].split()[0], address) if routes else None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen, Path]]]:
    (tmp_path / "recipe.py").write_text(RECIPE)
    hidden = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    processes = []

    def one(name: str, *options: str, **variables: str) -> tuple[subprocess.Popen, Path]:
        (tmp_path / name).mkdir()
        command = ["run", "--nproc_per_node", "2", *options, "recipe.py", name]
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtune_cp", *command],
            cwd=tmp_path,
            env=environment | {"OMP_NUM_THREADS": "1"} | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process, tmp_path / name

    yield one
    for process in processes:
        process.kill()
        process.wait()


def test_one_node_listens_on_loopback_only_unless_told_otherwise_and_runs_stand_side_by_side(
    start: Callable[..., tuple[subprocess.Popen, Path]],
) -> None:
    outer = _outer_interface()
    runs = [start("plain")]
    if outer is not None:
        # What the user names is used, and seen by this test.
        runs.append(start("told", GLOO_SOCKET_IFNAME=outer[0]))
    deadline = time.monotonic() + 120
    for process, folder in runs:
        while len(list(folder.iterdir())) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline, "did not start"
            time.sleep(0.05)
        assert {mark.name for mark in folder.iterdir()} == {"0 of 2", "1 of 2"}
    plain = _listening(runs[0][0].pid)
    assert len(plain) >= 3  # the store, and gloo in both ranks
    assert [str(address) for address, _ in plain if not _is_loopback(address)] == []
    if outer is not None:
        for _, port in plain:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((outer[1], port), timeout=5).close()
        told = _listening(runs[1][0].pid)
        assert {str(address) for address, _ in told if not _is_loopback(address)} == {outer[1]}
    for process, folder in runs:
        (folder / "go").touch()
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0
