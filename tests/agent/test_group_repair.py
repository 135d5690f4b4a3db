"""The limits of what ranks with devices may take after a run that did not end well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.agent.groups import repair as group_repair
from jupyter_distrib.agent.groups.repair import GroupRepair
from jupyter_distrib.agent.groups.store import RESET_LIMIT_S, GroupResets
from jupyter_distrib.server.group_health import GroupHealth, ProgressReports
from jupyter_distrib.wire import messages as m
from tests.coordinator.test_worker_group import Later


class FakeRank:
    state = "idle"
    has_device = True

    def __init__(self) -> None:
        self.posted: list[object] = []
        self.process = SimpleNamespace(killed=False, kill=self.kill)

    def kill(self) -> None:
        self.process.killed = True

    def post(self, message: object) -> None:
        self.posted.append(message)


@pytest.mark.parametrize("ready", [True, False])
def test_a_rank_that_is_not_ready_in_time_is_killed(ready: bool) -> None:
    loop, rank = Later(), FakeRank()
    begun: list[None] = []
    ranks = GroupResets(loop, lambda: begun.append(None))  # type: ignore[arg-type]
    ranks.start_waiting(rank)  # type: ignore[arg-type]
    assert (rank.state, begun) == ("starting", [None])
    if ready:
        ranks.stop_waiting(rank)  # type: ignore[arg-type]
    loop.pass_s(RESET_LIMIT_S)
    assert rank.process.killed is not ready


class Stage:
    """A worker group of two ranks after a run that both ended by an exception."""

    def __init__(self, *, spans_nodes: bool) -> None:
        self.loop, self.told, self.renewed = Later(), list[Any](), list[None]()
        self.ranks = [FakeRank(), FakeRank()]
        store = SimpleNamespace(
            spans_nodes=spans_nodes,
            renew=lambda: self.renewed.append(None),
            resets=GroupResets(self.loop, lambda: None),  # type: ignore[arg-type]
        )
        self.repair = GroupRepair(
            self.ranks,  # type: ignore[arg-type]
            store,  # type: ignore[arg-type]
            loop=self.loop,  # type: ignore[arg-type]
            emit=lambda event, fds: self.told.append(event),
            on_ready=lambda: None,
        )
        progress_reports = ProgressReports()
        progress_reports.expect(0)
        progress_reports.expect(1)
        command = SimpleNamespace(run="r", group="g")
        run = SimpleNamespace(
            command=command,
            progress_reports=progress_reports,
            health=GroupHealth(clean=False),
            cut_any=False,
            is_on_all=True,
        )
        self.repair.start(run)  # type: ignore[arg-type]

    def report(self, rank: int) -> None:
        self.repair.on_report(m.DeviceProgress(run="r", rank=rank, finished=True, sequence=3), None)


def test_groups_are_made_anew_when_a_rank_does_not_report() -> None:
    stage = Stage(spans_nodes=False)
    stage.report(0)
    assert not stage.renewed
    stage.loop.pass_s(group_repair.REPORT_LIMIT_S)
    assert len(stage.renewed) == 1
    stage.report(1)
    assert len(stage.renewed) == 1
    assert not any(rank.posted for rank in stage.ranks)


def test_the_coordinator_is_told_that_a_rank_has_not_reported() -> None:
    stage = Stage(spans_nodes=True)
    stage.report(0)
    stage.loop.pass_s(group_repair.REPORT_LIMIT_S)
    assert stage.told == [m.NodeProgress(group="g", run="r", finished=False, sequences=(3,))]


def test_ranks_that_have_all_reported_alike_keep_their_groups() -> None:
    stage = Stage(spans_nodes=False)
    stage.report(0)
    stage.report(1)
    stage.loop.pass_s(group_repair.REPORT_LIMIT_S)
    assert not stage.renewed
    assert [len(rank.posted) for rank in stage.ranks] == [1, 1]
