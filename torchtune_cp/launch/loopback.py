"""The loopback interface, on which the processes of a single node listen for each other."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def loopback_variables() -> dict[str, str]:
    """Return the variables that have gloo and NCCL listen on the loopback interface alone.

    By themselves gloo takes the interface of the host's name and NCCL the first one that is not the
    loopback one. What the user has chosen, in the environment or in a file of NCCL's, stays.
    """
    names = {name for _, name in socket.if_nameindex()}
    interface = next((name for name in ("lo", "lo0") if name in names), None)
    if interface is None:
        return {}
    # NCCL takes a name as the beginning of one by default.
    wanted: dict[str, str] = {"GLOO_SOCKET_IFNAME": interface}
    if not _nccl_file_names_an_interface():
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _nccl_file_names_an_interface() -> bool:
    own = os.environ.get("NCCL_CONF_FILE", "~/.nccl.conf")
    # Not Path.expanduser, which raises for a user who is not there.
    for path in (Path("/etc/nccl.conf"), Path(os.path.expanduser(own))):
        try:
            if "NCCL_SOCKET_IFNAME" in path.read_text(encoding="utf-8", errors="replace"):
                return True
        except OSError:
            continue  # most machines have neither file
    return False
