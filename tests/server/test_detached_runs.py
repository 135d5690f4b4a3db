"""What is remembered of a detached run for the case that the process which holds it is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_distrib.server import detached_runs
from jupyter_distrib.server.detached_runs import DetachedRuns
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import last_seen
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link
from tests.server.test_journal import detached

HELLO = m.Hello(protocol=1, session="s", pid=1, label="a.ipynb", python="", torch="", cloudpickle="")


def test_the_checkpoints_of_a_run_are_remembered_after_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ours, theirs = socket.socketpair()
    client: Client[object] = Client(link=Link(ours), hello=HELLO)  # type: ignore[type-var]
    runs = DetachedRuns(lambda *_: None, tmp_path, "agent-1")
    with ours, theirs:
        emit = runs.start_record(client, detached(), (), 2, gpus=False)
        for folder in ("/data/a", "/data/b", "/data/a"):
            emit(m.Saving(run="s-7", rank=0, folder=folder, at_s=0.0), ())
        (going_on,) = last_seen.runs()
        emit(m.Ended(run="s-7", at_s=1.0), ())
        (ended,) = last_seen.runs()
    assert going_on.checkpoints == ended.checkpoints == ["/data/a", "/data/b"]
    assert (going_on.ended, ended.ended) == (False, True)


@pytest.fixture
def client() -> Iterator[Client[object]]:  # type: ignore[type-var]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Client(link=Link(ours), hello=HELLO)


def end(runs: DetachedRuns, client: Client[object], number: int, size_bytes: int, *, read: bool) -> None:  # type: ignore[type-var]
    """Record a run that returns a value of this size; the kernel has gone before its end unless it has read it."""
    run = f"s-{number}"
    emit = runs.start_record(client, replace(detached(), run=run), (), 2, gpus=False)
    if not read:
        runs.remove_listener(client)
    value = os.memfd_create("value")
    os.ftruncate(value, size_bytes)
    emit(m.Returned(run=run, rank=0, value=None, at_s=0.0), (value,))
    os.close(value)
    emit(m.Ended(run=run, at_s=1.0), ())


@pytest.mark.parametrize("size_bytes", [10, detached_runs.KEPT_READ_BYTES // 3])
def test_of_many_runs_that_a_kernel_has_received_the_newest_stay(
    client: Client[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size_bytes: int,  # type: ignore[type-var]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    kept = 20 if size_bytes == 10 else 3
    runs = DetachedRuns(lambda *_: None, tmp_path, "agent-1")
    end(runs, client, 0, size_bytes, read=False)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 51):
        end(runs, client, number, size_bytes, read=True)

    assert list(runs._journals) == ["s-0", *(f"s-{number}" for number in range(51 - kept, 51))]
    assert len(os.listdir("/proc/self/fd")) == before + kept
    assert len([*tmp_path.glob("*.detached")]) == len(last_seen.runs()) == kept + 1
    for run in list(runs._journals):
        runs._journals.pop(run).close()


def test_a_run_with_values_above_the_limit_stays_until_the_next_has_ended(
    client: Client[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[type-var]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = DetachedRuns(lambda *_: None, tmp_path, "agent-1")
    for number in (1, 2):
        end(runs, client, number, 2 * detached_runs.KEPT_READ_BYTES, read=True)
        assert list(runs._journals) == [f"s-{number}"]
    runs._journals.pop("s-2").close()
