"""The pools that a kernel has reached, and when one is reached anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from jupyter_distrib.kernel.session.pools import connection as connection_module
from jupyter_distrib.kernel.session.pools.connection import Connection, ConnectionFacts, PoolAddress
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.pools.base import Capabilities
from jupyter_distrib.pools.ray.pool import RayPool


class Elsewhere:
    kind = "elsewhere"
    options: ClassVar[tuple[Any, ...]] = ()
    capabilities: ClassVar[Capabilities] = RayPool.capabilities

    def connect(self, *_: object) -> Any:
        return SimpleNamespace(send=lambda *_: None, close=lambda: None)


def reached(monkeypatch: pytest.MonkeyPatch, **options: str) -> Connection:
    monkeypatch.setattr(connection_module, "capabilities_of", lambda kind: Elsewhere.capabilities)
    address = PoolAddress(name="lab", kind="elsewhere", options=options)
    hello = KernelIdentity().hello()
    return Connection(address, hello, opened=Elsewhere(), on_lost=lambda _: None, on_change=lambda: None)


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
    monkeypatch.setattr(connection_module, "capabilities_of", lambda kind: Capabilities(remote=remote))
    facts = ConnectionFacts.of(PoolAddress(name="lab", kind="some", options=options))
    assert (facts.remote, facts.elsewhere, facts.packages_mode) == (remote, elsewhere, mode)
    if "environment_limit" in options:
        assert facts.packages_limit_bytes == 2_000_000
