"""A cloud for each test, which must have no machine and no keeper afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jupyter_distrib.pools.machines.record import known
from tests.pools.machines.cloud import Cloud
from tests.processes import is_alive, wait_until


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one = Cloud(tmp_path / "cloud")
    yield one
    for name in ("stuck", "hang"):
        one.fault(name, on=False)
    keepers = [record.keeper for place, record in known() if place.is_held()]
    for pid in keepers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert wait_until(lambda: not any(map(is_alive, keepers)), 60), "the keeper goes on"
    one.crash()
    assert wait_until(lambda: not one.processes(), 10), one.processes()
