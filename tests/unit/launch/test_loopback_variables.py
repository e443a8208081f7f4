"""Which interface gloo and NCCL are told, and what of the user's stays."""

from pathlib import Path

import pytest

from torchtune_cp.launch.loopback import loopback_variables


@pytest.fixture
def _nothing_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_nothing_chosen")
@pytest.mark.skipif(Path("/etc/nccl.conf").exists(), reason="/etc/nccl.conf has a say here")
def test_the_loopback_interface_unless_the_user_has_chosen_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loopback_variables() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    (tmp_path / "nccl.conf").write_text("NCCL_SOCKET_IFNAME=eth0\n")
    assert loopback_variables() == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert loopback_variables() == {}
