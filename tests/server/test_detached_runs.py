"""What is remembered of a detached run for the case that the process which holds it is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

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
        tell = runs.start_record(client, detached(), (), 2, gpus=False)
        for folder in ("/data/a", "/data/b", "/data/a"):
            tell(m.Saving(run="s-7", rank=0, folder=folder, at_s=0.0), ())
        (going_on,) = last_seen.runs()
        tell(m.Ended(run="s-7", at_s=1.0), ())
        (ended,) = last_seen.runs()
    assert going_on.checkpoints == ended.checkpoints == ["/data/a", "/data/b"]
    assert (going_on.ended, ended.ended) == (False, True)
