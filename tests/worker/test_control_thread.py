"""The thread of a rank that hears the agent."""

from __future__ import annotations

import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import Cell as CellSource
from jupyter_distrib.worker.debugging.debugger_channel import DebuggerChannel
from jupyter_distrib.worker.debugging.probe import Prober
from jupyter_distrib.worker.interrupts import Interrupts
from jupyter_distrib.worker.messenger import Messenger
from jupyter_distrib.worker.process.control_thread import ControlThread, Entry


class Heard:
    """A control thread with made-up neighbours, and the agent's end of its link."""

    def __init__(self, *, use_device: Any = lambda: None) -> None:
        mine, theirs = socket.socketpair()
        self.link, self.theirs = Link(mine), Link(theirs)
        self.inbox: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self.aborted = threading.Event()
        self.groups = SimpleNamespace(apart=False, abort=lambda then: self.aborted.set())
        messenger = Messenger(self.link)
        self.interrupts = Interrupts(messenger)
        sightings = SimpleNamespace(communication=(), begin=lambda: None, counts=self._fail)
        self.prober = Prober(0, sightings)  # type: ignore[arg-type]
        self.control = ControlThread(
            self.link,
            self.inbox,
            messenger=messenger,
            interrupts=self.interrupts,
            prober=self.prober,
            groups=self.groups,  # type: ignore[arg-type]
            debugger=DebuggerChannel(0, messenger.send, self.interrupts, self._fail),
            use_device=use_device,
        )

    def _fail(self, *_: object) -> NoReturn:
        raise SystemError("while the main thread changes what it looks at")

    def close(self) -> None:
        self.theirs.close()
        assert self.inbox.get(timeout=10) is None
        self.link.close()


def test_it_takes_the_ranks_device_before_it_asks_anything() -> None:
    """Else its first question to CUDA would make a context on GPU 0."""
    threads = []
    heard = Heard(use_device=lambda: threads.append(threading.current_thread().name))
    heard.control.start()
    heard.theirs.send(m.Forget(group="g", keys=()))
    heard.inbox.get(timeout=10)

    assert threads == ["jupyter_distrib-control"]
    heard.close()


def test_a_device_that_fails_leaves_the_rank_able_to_hear() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: out of memory")

    heard = Heard(use_device=broken)
    heard.control.start()
    heard.theirs.send(m.Forget(group="g", keys=("k",)))

    assert heard.inbox.get(timeout=10) == (m.Forget(group="g", keys=("k",)), [])
    heard.close()


def test_a_stop_aborts_also_where_the_cell_has_just_ended() -> None:
    """A group is aborted on all ranks or on none."""
    heard = Heard()
    cell = CellSource(source="", filename="c")
    run = m.Execute(run="r", group="g", ranks=(0,), cell=cell, inputs=m.Parcel(data=b""), setting=m.Setting())
    heard.control.start()
    heard.prober.begin("r", "c")
    heard.theirs.send(run)
    heard.inbox.get(timeout=10)
    heard.theirs.send(m.Probe(run="r"))
    answer, _ = heard.theirs.receive()  # a look that fails is answered, too: else the agent would never ask again
    assert isinstance(answer, m.ProbeAnswer)
    assert (answer.run, answer.groups) == ("r", None)
    heard.theirs.send(m.Forget(group="g", keys=()))
    assert heard.inbox.get(timeout=10) == (m.Forget(group="g", keys=()), [])  # a look that fails leaves it able to hear
    heard.control.ended("r")
    heard.theirs.send(m.CutSockets(run="r", inodes=(7,)))

    assert heard.aborted.wait(10)
    assert heard.groups.apart
    assert not heard.interrupts.stopping
    heard.close()
