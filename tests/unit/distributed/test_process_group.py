"""The ranks of a start meet each other, not what an earlier start has left behind."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from torchtune_cp.distributed.process_group import _meet


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_restart_does_not_meet_at_the_addresses_of_the_start_before(
    monkeypatch: pytest.MonkeyPatch, nodes: str
) -> None:
    # As torch's agent has it: one store on this node, kept over restarts. On several nodes the agents
    # count restarts each for itself, so that the count can be in no name there.
    agents = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=20))
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(agents.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    seen = []
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        store, _, _ = _meet()
        seen.append(store.check(["an address"]))
        store.set("an address", "of this start")
    assert seen == [False, nodes != "1"]
