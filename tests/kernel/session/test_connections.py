"""The pools that a kernel has reached, and when one is reached anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.pools import connection, pool_manager
from jupyter_distrib.kernel.session.pools.connection import Connection, ConnectionFacts, ConnectionState, PoolAddress
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.pools.base import Capabilities, Node
from jupyter_distrib.pools.ray.pool import RayPool
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors


class Link(Node):
    """A node of another package, with what such a class must have."""

    def __init__(self) -> None:
        self.closed = 0
        self.asked = threading.Event()

    def send(self, command: m.Command, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        self.asked.set()

    def close(self) -> None:
        self.closed += 1


class Elsewhere:
    kind = "elsewhere"
    options: ClassVar[tuple[Any, ...]] = ()
    capabilities: ClassVar[Capabilities] = RayPool.capabilities

    def __init__(self, node: Any = None) -> None:
        self.node = node or Link()

    def connect(self, *_: object) -> Any:
        return self.node


def reached(monkeypatch: pytest.MonkeyPatch, node: Any = None, **options: str) -> Connection:
    monkeypatch.setattr(connection, "capabilities_of", lambda kind: Elsewhere.capabilities)
    address = PoolAddress(name="lab", kind="elsewhere", options=options)
    hello = KernelIdentity().hello()
    return Connection(address, hello, opened=Elsewhere(node), on_lost=lambda _: None, on_change=lambda: None)


def test_a_kernel_that_may_start_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    session = Session()
    with monkeypatch.context() as limited:
        limited.setattr(pool_manager, "Connection", refuse)
        with pytest.raises(PoolError, match=r"^pool inline cannot be reached: this user may not start more proc"):
            session.pools.connect("inline")
    assert session.pools.connect("inline").facts.pool == "inline"


def test_a_changed_address_of_the_cluster_in_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "one:6379")
    automatic, named = reached(monkeypatch), reached(monkeypatch, address="other:6379")
    assert automatic.is_current()
    monkeypatch.setenv("RAY_ADDRESS", "two:6379")
    assert not automatic.is_current()
    assert named.is_current()
    monkeypatch.setenv("RAY_ADDRESS", "one:6379")
    assert automatic.is_current()


@pytest.mark.parametrize(
    ("options", "remote", "elsewhere", "mode"),
    [
        ({}, False, False, "off"),
        ({"environment": "install"}, False, False, "off"),
        ({"python": "/opt/python"}, False, True, "off"),
        ({"python": "/opt/python", "environment": "install", "environment_limit": "2MB"}, False, True, "install"),
        ({}, True, True, "off"),
        ({"environment": "check"}, True, True, "check"),
    ],
)
def test_packages_are_compared_only_where_ranks_have_another_interpreter(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], remote: bool, elsewhere: bool, mode: str
) -> None:
    monkeypatch.setattr(connection, "capabilities_of", lambda kind: Capabilities(remote=remote))
    facts = ConnectionFacts.of(PoolAddress(name="lab", kind="some", options=options))
    assert (facts.remote, facts.elsewhere, facts.packages_mode) == (remote, elsewhere, mode)
    if "environment_limit" in options:
        assert facts.packages_limit_bytes == 2_000_000


def test_a_node_that_does_not_answer_is_closed_unless_it_can_do_more(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Link()
    connection = reached(monkeypatch, node)

    assert not connection.node.has_ended()
    assert (connection.state, node.closed) == (ConnectionState.REACHED, 0)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(connection.ask)
        assert node.asked.wait(10)
        connection.abandon()
        with pytest.raises(PoolError, match="does not answer"):
            answer.result()

    assert node.closed == 1
    assert connection.state is ConnectionState.LOST


def test_a_node_without_what_a_node_can_do_is_refused_when_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    node = SimpleNamespace(send=lambda *_: None, close=lambda: closed.append("closed"))

    with pytest.raises(PoolError, match=r"SimpleNamespace is not a jupyter_distrib\.extend\.Node\.$"):
        reached(monkeypatch, node)

    assert closed == ["closed"]


def test_who_stops_looking_while_a_change_is_told_is_not_called_as_none() -> None:
    heard, answers = list[str](), [None, lambda: heard.append("changed")]

    class Left(Session):
        """Nobody looks any more as soon as `on_change` was read."""

        @property
        def on_change(self) -> Any:
            return answers.pop()

        @on_change.setter
        def on_change(self, value: object) -> None: ...

    Left().changed()
    assert heard == ["changed"]
