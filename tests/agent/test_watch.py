"""What the watch makes of a rank that does not answer: C code, a machine without time for it, or the agent itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.agent.ranks import usage
from jupyter_distrib.agent.runs import watch
from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire import messages as m

AWAKE_S = 100.0


class Stage:
    """A run of one rank, whose clock and processor the test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.cpu_s, self.runnable, self.probes = AWAKE_S, 0.0, False, 0
        self.looks: list[m.RankSighting] = []
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(usage, "read", lambda pid: usage.Usage(rss_bytes=1, cpu_s=self.cpu_s, state="S"))
        monkeypatch.setattr(usage, "has_runnable_thread", lambda pid: self.runnable)
        rank: Any = SimpleNamespace(pid=1, post=self._post, notes=SimpleNamespace(place=""))
        command: Any = SimpleNamespace(run="r", ranks=(0,), run_size=1, cell=SimpleNamespace(filename="Cell In[1]"))
        loop: Any = SimpleNamespace(later=lambda delay_s, call: Timer(call))
        stalls: Any = SimpleNamespace()
        monkeypatch.setattr(watch, "Stalls", lambda *_, **__: stalls)
        self.watch = watch.Watch(command, loop, ranks=lambda: {0: rank}, gpus={}, emit=self._record, stop=lambda: None)
        self.after(watch.FIRST_S)

    def after(self, seconds: float, cpu_s: float = 0.0) -> m.RankSighting:
        """Let time pass until the next tick; return how the rank looks then."""
        self.now_s += seconds
        self.cpu_s += cpu_s
        self.watch._tick()
        return self.looks[-1]

    def _post(self, command: object) -> None:
        self.probes += isinstance(command, m.Probe)

    def _record(self, event: m.Event) -> None:
        if isinstance(event, m.NodeSawRanks):
            self.looks += event.looks


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_rank_that_sleeps_and_does_not_answer_is_silent(stage: Stage) -> None:
    assert [stage.after(1.0).state for _ in range(4)] == ["running", "running", "silent", "silent"]
    assert stage.looks[-1].silent_s == pytest.approx(4.0)
    assert stage.probes == 1, "nothing piles up in a rank that cannot answer"


def test_a_rank_that_computes_and_does_not_answer_is_silent(stage: Stage) -> None:
    stage.runnable = True
    assert [stage.after(1.0, cpu_s=1.0).state for _ in range(3)] == ["running", "running", "silent"]
    assert stage.looks[-1].silent_s == 0.0


def test_a_rank_that_waits_for_a_processor_is_starved(stage: Stage) -> None:
    stage.runnable = True
    found = [stage.after(1.0, cpu_s=0.1) for _ in range(15)][-1]
    assert (found.state, found.silent_s) == ("starved", 0.0)


def test_answers_that_the_agent_has_not_read_in_time_are_not_missed(stage: Stage) -> None:
    stage.after(1.0)
    assert stage.after(30.0).state == "running", "the agent was held up"
    assert [stage.after(1.0).state for _ in range(2)] == ["silent", "silent"]
