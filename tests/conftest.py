"""Fixtures of all tests: a runtime folder of the test run's own, real kernels, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from jupyter_core.utils import ensure_event_loop

from tests.notebook import Notebook
from tests.processes import agents, marked, ranks, wait_until_gone

SHARED_MEMORY = Path("/dev/shm")
OTHER_JOBS = ("browser", "frameworks", "ray")
"""Their tests share browsers, trainings and clusters, which come and go in this process at any time."""


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[Path]:
    """Sockets, leases and logs of this test run; its agents and coordinators end with it when they are asked to."""
    ensure_event_loop()  # jupyter_client keeps one for as long as the process lives
    folder = Path(tempfile.mkdtemp(prefix="jd-"))
    os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"] = str(folder / "run")
    os.environ["JUPYTER_DISTRIB_LOG_DIR"] = str(folder / "logs")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    os.environ["JUPYTER_DISTRIB_IDLE_S"] = "120"
    yield folder
    found = agents(folder / "run")
    for pid in found:
        os.kill(pid, signal.SIGTERM)
    left = wait_until_gone(found, 60)
    assert not left, f"they outlive SIGTERM: {left}"
    assert not agents(folder / "run"), "begun while the others were ending"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, descriptor or shared memory of this process may outlive the test that made it."""
    before, shared = held(), set(SHARED_MEMORY.glob("*"))
    yield
    job = request.path.relative_to(Path(__file__).parent).parts[0]
    if job in OTHER_JOBS or "torch_keeps_descriptors" in request.fixturenames:
        return
    deadline = time.monotonic() + 6.0  # who has lost an agent looks for 5 s whether it is gone
    while (left := held() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)  # threads end after what they were waited for
    assert not left, f"left behind: {sorted(left)}"
    assert not {path for path in set(SHARED_MEMORY.glob("*")) - shared if "jupyter_distrib" in path.name}


@pytest.fixture
def torch_keeps_descriptors() -> None:
    """For tests of device meshes, and on a GPU: torch keeps the store of their groups, or the context, for as long as
    the process lives."""


def held() -> set[str]:
    """Threads of ours, and open descriptors by number and target, in this process."""
    threads = {
        f"thread {each.name} {each.ident}"
        for each in threading.enumerate()
        # One waits for the end of each agent, which may come when the run of all tests is over.
        if "jupyter_distrib" in each.name and each.name != "jupyter_distrib-agent"
    }
    descriptors = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the listing's own
            descriptors.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return threads | descriptors


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """A fresh kernel with the extension loaded, in an empty folder; afterwards none of its ranks may be alive."""
    with Notebook(tmp_path) as book:
        assert book.cell("%load_ext jupyter_distrib").status == "ok"
        session = book.cell(
            "from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)"
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
