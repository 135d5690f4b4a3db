"""The first process of a pod, as process 1 of a real namespace: when it ends, and what it reaps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jupyter_distrib.pools.kubernetes import keeper
from tests.processes import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux") or os.getuid() != 0, reason="namespaces need root"),
]
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def pod(
    monkeypatch: pytest.MonkeyPatch, *, first_s: int, alone_s: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that keeps a pod, and the pid of it as seen from here."""
    monkeypatch.setattr(keeper, "FIRST_S", first_s)
    monkeypatch.setattr(keeper, "ALONE_S", alone_s)
    with subprocess.Popen([*UNSHARE, *keeper.keeper(sys.executable)]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            assert wait_until(lambda: children.read_text().split(), 10)
            root = int(children.read_text().split()[0])
            assert wait_until(lambda: b"-c" in Path(f"/proc/{root}/cmdline").read_bytes(), 10)
            yield process, root
        finally:
            process.kill()


def brought_in(root: int, *words: str) -> subprocess.Popen[bytes]:
    """A process that comes in from outside, as `kubectl exec` does it."""
    command = ["nsenter", f"--target={root}", "--pid", "--mount", "--", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_pod_that_nobody_comes_to_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with pod(monkeypatch, first_s=1, alone_s=60) as (process, _):
        assert process.wait(10) == 0, "the Job is complete then"


def test_a_pod_stays_while_somebody_is_there_and_ends_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    with pod(monkeypatch, first_s=3, alone_s=1) as (process, root):
        with brought_in(root, *keeper.company(sys.executable)) as company:
            assert company.stdin is not None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(5)
            company.stdin.close()
            assert company.wait(10) == 0
        assert process.wait(10) == 0


def test_company_that_hears_nothing_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SILENT_S", 1)
    with subprocess.Popen(keeper.company(sys.executable), stdin=subprocess.PIPE) as company:
        assert company.wait(10) == 0


def test_what_ranks_have_left_in_the_background_keeps_no_pod_and_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pod(monkeypatch, first_s=3, alone_s=2) as (process, root):
        with brought_in(
            root, "sh", "-c", "for i in 1 2 3; do (true &); done; (sleep 600 &); echo ready; read x"
        ) as one:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n"
            children = Path(f"/proc/{root}/task/{root}/children")
            assert wait_until(lambda: len(children.read_text().split()) == 1, 10), "what has ended is reaped"
            one.communicate(b"\n")
        assert process.wait(10) == 0


def test_it_ends_at_once_when_the_cluster_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pod(monkeypatch, first_s=60, alone_s=60) as (process, root):
        handles = Path(f"/proc/{root}/status")
        assert wait_until(lambda: int(handles.read_text().partition("SigCgt:\t")[2][:16], 16) & 1 << 14, 10)
        os.kill(root, 15)
        assert process.wait(5) == 143
