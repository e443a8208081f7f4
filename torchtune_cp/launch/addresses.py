"""Addresses of stores: which machine they belong to, listening at one, waiting until a store answers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import signal
import socket
import time
from datetime import timedelta
from typing import NoReturn

LOOPBACK = "127.0.0.1"


class AddressError(Exception):
    """An address at which this process cannot listen, or which does not answer as expected."""


def shown(host: str, port: int) -> str:
    """Write an address as torchrun's options take it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Say whether only processes of this machine can mean this one by that name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own(host: str) -> bool:
    """Say whether `host` is this machine.

    Raises:
        AddressError: The name is not known.
    """
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"the host name is not known here ({_reason(error)})") from None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def listen(host: str, port: int) -> socket.socket:
    """Listen on the loopback interface if `host` is of it, else on every interface.

    Args:
        host: The name by which the others reach this machine.
        port: 0 takes a free one.

    Raises:
        AddressError: Another program holds the port, or this user may not have it.
    """
    try:
        if not is_loopback(host):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", port))
        # The name may also resolve to an IPv6 address; one socket listens at one of them.
        address = LOOPBACK if host == "localhost" else host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    except OSError as error:
        held = error.errno == errno.EADDRINUSE
        reason = "another program uses the port" if held else _reason(error)
        raise AddressError(f"cannot listen at {shown(host, port)}: {reason}") from None


def wait_for_store(host: str, port: int, deadline: float) -> None:
    """Wait until a store of torch answers at an address.

    Another process asks: the look-up of a name may hang, torch's client waits without end for a program
    that accepts connections and sends nothing, and writes a page of warnings while it waits for any other.

    Args:
        host: Name or address.
        port: Of the store.
        deadline: On the clock of `time.monotonic`.

    Raises:
        AddressError: No store answered in time; the message describes what was found instead.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _ask_until_it_answers(host, port, deadline, writing)
    os.close(writing)
    reply = b""
    try:
        while (left := deadline - time.monotonic()) > 0:
            # Short waits: a signal's handler runs between two of them.
            if not select.select([reading], [], [], min(left, 0.1))[0]:
                continue
            piece = os.read(reading, 4096)
            if not piece:
                break
            reply += piece
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    answers = reply.decode(errors="replace").split("\n")[:-1]
    if "ok" not in answers:
        raise AddressError(answers[-1] if answers else "no answer")


def _ask_until_it_answers(host: str, port: int, deadline: float, answer: int) -> NoReturn:
    from torch.distributed import TCPStore

    def report(what: str) -> None:
        os.write(answer, f"{what}\n".encode())

    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # the parent decides, and ends this process
        # Should the parent be killed: torch's client may wait without end.
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 0) + 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                socket.create_connection((host, port), timeout=left).close()
            except socket.gaierror as error:
                report(f"the host name is not known here ({_reason(error)})")
            except (OSError, UnicodeError) as error:
                refused = isinstance(error, ConnectionRefusedError)
                report("nothing listens there" if refused else _reason(error))
            else:
                report("the port is used by another program, not by a torch store")
                with contextlib.suppress(RuntimeError):
                    TCPStore(
                        host,
                        port,
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=left),
                    )
                    report("ok")
                    break
            time.sleep(0.2)
    finally:
        os._exit(0)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
