"""Fixtures of all tests: a runtime folder of the test run's own, real kernels, and a check that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import agents, marked, ranks, wait_until_gone


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[Path]:
    """Sockets, leases and logs of this test run; its agents and coordinators end with it when they are asked to."""
    folder = Path(tempfile.mkdtemp(prefix="jd-"))
    os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"] = str(folder / "run")
    os.environ["JUPYTER_DISTRIB_LOG_DIR"] = str(folder / "logs")
    os.environ["JUPYTER_DISTRIB_IDLE_S"] = "120"
    yield folder
    found = agents(folder / "run")
    for pid in found:
        os.kill(pid, signal.SIGTERM)
    left = wait_until_gone(found, 60)
    assert not left, f"they outlive SIGTERM: {left}"
    assert not agents(folder / "run"), "begun while the others were ending"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """A fresh kernel with the extension loaded, in an empty folder; afterwards none of its ranks may be alive."""
    with Notebook(tmp_path) as book:
        assert book.cell("%load_ext jupyter_distrib").status == "ok"
        session = book.cell(
            "from jupyter_distrib.kernel.session import session as _s; print(_s.current().name)"
        ).stdout.strip()
        yield book
    leftovers_after(session)


@pytest.fixture(scope="module")
def shared_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for all tests of a module, for what does not depend on a fresh one."""
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        assert book.cell("%load_ext jupyter_distrib").status == "ok"
        yield book


def leftovers_after(session: str, limit_s: float = 2.0) -> None:
    """Fail if a process of this session's worker groups lives longer than the promise allows, or one that nobody knows."""
    deadline, runtime = time.monotonic() + limit_s, Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"])
    while (left := {*marked(session), *ranks(runtime, session)}) and time.monotonic() < deadline:
        wait_until_gone(left, deadline - time.monotonic())
    assert not left, f"processes left behind: {left}"
