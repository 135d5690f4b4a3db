"""The end of agents and coordinators that nobody needs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.testing import PoolClient
from tests.processes import agents, wait_until_gone


@pytest.mark.slow
def test_one_whose_folder_is_gone_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a user has logged out, and the system has removed what was in /run."""
    folder = Path(tempfile.mkdtemp(prefix="jd-idle-"))
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "1")
    client = PoolClient(LocalPool())
    found = agents(folder / "run")
    assert found
    shutil.rmtree(folder)
    client.close()
    assert wait_until_gone(found, 20) == []
