"""Torch's elastic agent with hooks: at its regular check, before a restart, and around a stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as torch_launcher


@dataclass(frozen=True)
class AgentWatch:
    """What is called while torch's agent supervises the workers of this node.

    Attributes:
        tick: Called ten times a second while they run (torchrun's `--monitor-interval`); what it raises
            ends the run.
        may_restart: Called with the failures by rank and the number of the restart, counted from 1;
            returns whether to restart. Not called when no restart is left.
        stopping: Entered for the time in which the agent ends the workers before it starts others:
            after a failure, or because nodes join or leave.
    """

    tick: Callable[[], None]
    may_restart: Callable[[Mapping[int, Any], int], bool]
    stopping: Callable[[], AbstractContextManager[None]]


class _WatchfulAgent(LocalElasticAgent):
    watch: ClassVar[AgentWatch]
    _restarts = 0

    # Torch documents both methods as those that a custom agent implements.
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.watch.tick()
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and self._restarts < worker_group.spec.max_restarts:
            self._restarts += 1
            if not self.watch.may_restart(result.failures, self._restarts):
                # All workers have been ended by now; raising leaves the loop that would restart them.
                raise ChildFailedError(worker_group.spec.get_entrypoint_name(), result.failures)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        with self.watch.stopping():
            super()._stop_workers(worker_group)


@contextlib.contextmanager
def watched_agent(watch: AgentWatch) -> Iterator[None]:
    """Have torchrun use an agent that calls `watch` (torch takes no agent as an argument)."""
    _WatchfulAgent.watch = watch
    before = torch_launcher.LocalElasticAgent
    torch_launcher.LocalElasticAgent = _WatchfulAgent  # type: ignore[misc]
    try:
        yield
    finally:
        torch_launcher.LocalElasticAgent = before  # type: ignore[misc]
