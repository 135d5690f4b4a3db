"""Entries of the path that are not strings: Python ignores them, and so does this package."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.agent import install_packages
from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.kernel.analysis import run_facts
from jupyter_distrib.kernel.session.cell_order import ProcessState
from jupyter_distrib.kernel.session.pools import notebook_packages
from jupyter_distrib.pools import server_home
from jupyter_distrib.pools.trial import Trial
from jupyter_distrib.system import entry_points, file_owner, package_folders, process_environment
from jupyter_distrib.wire import messages as m

ENTRIES = [None, b"/lib/site-packages", ["/lib/site-packages"], 1.5, Path("/lib/site-packages")]
READERS: dict[str, Callable[[], object]] = {
    "file_owner": lambda: file_owner.is_library.__wrapped__("/nowhere/mine.py"),
    "package_folders": lambda: (package_folders.on_path(), package_folders.added_first()),
    "entry_points": lambda: len(entry_points._of_all_packages.__wrapped__()),
    "version": lambda: process_environment.version("pytest"),
    "no version": lambda: process_environment.version("not-installed"),
    "run_facts": run_facts.versions.__wrapped__,
    "source_archive": lambda: len(source_archive.archive(("cloudpickle",))) // 10_000,
    "notebook_packages": notebook_packages.source_folders,
    "install_packages": lambda: install_packages.compare(m.Packages(mode="check", packages=(), limit_bytes=0)),
    "process state": lambda: ProcessState.now().path,
    "server_home": lambda: server_home._is_lower_layer(Path("/nowhere")),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_entries_that_are_not_strings_change_nothing(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read()
    monkeypatch.setattr(sys, "path", [*ENTRIES, *sys.path, *ENTRIES])
    assert read() == expected


def test_a_trial_of_a_pool_gets_the_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    is_over = threading.Event()

    def note(_: bool, text: str) -> None:
        said.append(text)
        is_over.set()

    monkeypatch.setattr(sys, "path", [*ENTRIES, *sys.path])
    Trial("no-such-kind", {}, note)
    assert is_over.wait(60)
    assert "no-such-kind" in said[0]
