"""Fixtures of the agent's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.lease_holder import Holder


@pytest.fixture
def holder() -> Iterator[Holder]:
    """Another process, which holds leases."""
    with Holder() as process:
        yield process
