"""Real sshd: two hosts for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ssh.bed import Bed, missing


@pytest.fixture(autouse=True, scope="session")
def sshd_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def bed(sshd_is_here: None) -> Iterator[Bed]:
    one = Bed()
    yield one
    one.close()
