"""Fixtures of all tests: a runtime folder of the test run's own, real kernels, and a check that nothing is left behind."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import ensure_event_loop

from jupyter_distrib.system import signals
from tests import temporary_files
from tests.notebook import Notebook
from tests.processes import agents, marked, ranks, wait_until, wait_until_gone

SHARED_MEMORY = Path("/dev/shm")
OTHER_JOBS = ("browser", "frameworks", "ray")
"""Their tests share browsers, trainings and clusters, which come and go in this process at any time."""
UNNAMED_FILES = ("deepspeed", "spark")
"""Their distributors leave temporary files that carry no name of theirs."""
left_by_other_jobs: set[str] = set()
"""Names of temporary files."""


signals.reset()  # `sh .ci/test &` in a script ignores SIGINT, which tests send, and their kernels would inherit that


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--by-turns",
        action="store_true",
        help="run a third of the cases of slow tests; the number of commits says which",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("by_turns"):
        return
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = {
        case
        for test, cases in tests.items()
        for number, case in enumerate(cases)
        if (number + zlib.crc32(test.encode()) + commits()) % 3
    }
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later collection of garbage, which takes a second with it."""
    gc.collect()
    gc.freeze()


@functools.cache
def commits() -> int:
    """The number of commits; 0 outside a checkout."""
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(counted.stdout or 0)


@pytest.fixture(scope="session", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Sockets, leases, logs and temporary files of this test run; its agents and coordinators end with it when they are
    asked to."""
    ensure_event_loop()  # jupyter_client keeps one for as long as the process lives
    tmp_path_factory.getbasetemp()  # stays where it is
    folder = Path(tempfile.mkdtemp(prefix="jd-"))  # short: a socket's path has 107 bytes
    temporary_files.use(folder / "tmp")
    on_hosts = temporary_files.of_hosts()
    os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"] = str(folder / "run")
    os.environ["JUPYTER_DISTRIB_LOG_DIR"] = str(folder / "logs")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")  # else the cells of the tests go into the user's history
    os.environ["JUPYTER_DISTRIB_IDLE_S"] = "120"
    yield folder
    found = agents(folder / "run")
    for pid in found:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGTERM)
    left = wait_until_gone(found, 60)
    assert not left, f"they outlive SIGTERM: {left}"
    assert not agents(folder / "run"), "begun while the others were ending"
    names = temporary_files.left() - left_by_other_jobs
    assert not names, f"temporary files left behind: {sorted(names)}"
    assert wait_until(lambda: not temporary_files.deserted(on_hosts), 10), temporary_files.deserted(on_hosts)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def only_root_gives_files_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that needs a file of somebody else is skipped for an ordinary user, who cannot make one."""

    def chown(*arguments: Any, **keywords: Any) -> None:
        try:
            real(*arguments, **keywords)
        except PermissionError:
            pytest.skip("only root can give a file away")

    real = os.chown
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "chown", chown)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, descriptor, shared memory or temporary file of this process may outlive the test that made it."""
    before, shared = held(), set(SHARED_MEMORY.glob("*"))
    yield
    if job(request.path) in (*OTHER_JOBS, *UNNAMED_FILES):
        left_by_other_jobs.update(temporary_files.left())
    if job(request.path) in OTHER_JOBS:
        return
    if "torch_keeps_descriptors" in request.fixturenames:
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


def job(path: Path) -> str:
    """The folder of tests that a file is in."""
    return path.relative_to(Path(__file__).parent).parts[0]


def held() -> set[str]:
    """Threads of ours, open descriptors by number and target, and temporary files, of this process."""
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
    return threads | descriptors | {f"temporary {name}" for name in temporary_files.left() - left_by_other_jobs}


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
