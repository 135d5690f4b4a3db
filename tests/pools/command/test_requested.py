"""Hosts that an engine was asked for in several requests, for a run that has grown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jupyter_distrib.coordinator.engine import ReservedNodes
from jupyter_distrib.pools.command.requested import RequestedHosts
from jupyter_distrib.wire import messages as m

OPENING = m.OpenWorkerGroup(group="g", size=2, gpus=False)
NOBODY: Any = None


class Asked(RequestedHosts):
    """One request, with what its engine says of its end."""

    engine = "Asked"

    def __init__(self, said: str, further: str = "") -> None:
        super().__init__(NOBODY, OPENING, NOBODY, str)
        self._said, self._of_further = said, further

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        self._reserved = ReservedNodes(channels=[], addresses=["a"], sizes=[2], gpus=False, engine_has_gpus=False)
        return self._reserved

    def release(self, *, keep_agents: bool) -> None:
        """Do nothing."""

    def _of_ranks(self, ranks: int) -> RequestedHosts:
        return Asked(self._of_further)

    def _is_another_waiting(self) -> bool:
        return False

    def end(self) -> str:
        return self._said


def test_the_end_of_a_further_request_is_reported_as_well() -> None:
    hosts = Asked("", "job 2 was preempted")
    hosts.acquire({})
    assert hosts.acquire_more(2, 1)
    assert hosts.cause(OSError("its connection has ended")) == "job 2 was preempted: its connection has ended"
    hosts.drop_more()
    assert hosts.cause(OSError("its connection has ended")) == "its connection has ended"
