"""The way to pods: what goes through it, and what happens when it ends, is silent, or has not begun yet."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.wire import messages as m
from tests.kubernetes.bed import IMAGE, Cluster
from tests.kubernetes.conftest import Open
from tests.kubernetes.test_nothing_is_left import coordinators
from tests.kubernetes.test_pods import FOR_EVER, SUM
from tests.notebook import Notebook
from tests.processes import wait_until
from tests.settings_files import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GIGABYTE = 1 << 30
ORPHANS = """
import os, signal, time
for _ in range(100):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.1)
        os._exit(0)
    os.wait()
rank
"""
STATES = """
import os
states = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        states.append(open(f"/proc/{pid}/stat", errors="replace").read().rpartition(")")[2].split()[0])
    except OSError:
        pass
(len(states), states.count("Z"))
"""


def test_a_pod_that_goes_before_a_python_has_answered_is_reported_with_the_reason(
    cluster: Cluster, client: Open, tmp_path: Path
) -> None:
    python, reached = cluster.folder / f"python-{tmp_path.name}", cluster.folder / f"reached-{tmp_path.name}"
    python.write_text(f'#!/bin/sh\ncase "$*" in *waitpid*) exec python3 "$@" ;; esac\n: >{reached}\nexec sleep 600\n')
    python.chmod(0o755)
    one = client(python=str(python))
    one.send(m.OpenWorkerGroup(group="starts", size=1, gpus=False))
    assert wait_until(reached.exists, 30)
    cluster.do("evict", cluster.names("pods")[0])
    refused = one.wait(m.WorkerGroupRefused)
    assert re.fullmatch(
        r"pod jd-\S+ on node n\d was evicted \(The node was low on resource: .*\) before its ranks had started: run "
        r"the cell again\.",
        refused.reason,
    ), refused.reason
    assert wait_until(cluster.is_empty, 20)


def test_a_pod_that_goes_while_files_are_copied_is_not_reported_as_a_file_that_cannot_be(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its end comes while a cell is sent: the cell tells the end of the pod, once."""
    write_trusted(tmp_path, f'pool = "cluster"\n[pools.cluster]\nkind = "kubernetes"\nimage = "{IMAGE}"\n')
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.cell("%%distributed --ranks 1\nrank").result == "rank 0: 0"
        (tmp_path / "new.py").write_text("new = 1\n")
        cluster.do("evict", cluster.names("pods")[0])
        lost = book.cell("%%distributed\nrank", timeout_s=100)
        if lost.status == "error":  # else the pod was known to be gone, and the cell has a new one
            assert "was evicted" in lost.traceback, lost.text
        assert "could not be copied" not in lost.text
        cell = dedent("""\
            %%distributed
            import new
            new.new""")
        assert book.cell(cell, timeout_s=100).result.endswith(": 1")
        book.ok("%distributed_pool stop cluster")


def test_a_silent_network_is_noticed_within_ten_seconds(cluster: Cluster, client: Open) -> None:
    one = client(reconnect="0")
    group = one.group(1)
    one.start(group, FOR_EVER)
    one.wait(m.Started)
    with cluster.frozen():
        began_s = time.monotonic()
        reason = one.wait(m.WorkerGroupClosed).reason
    assert "nothing has come" in reason, reason
    assert time.monotonic() - began_s < 20, "ten until it is noticed, and those in which the cluster is asked why"


def test_a_kubectl_that_ends_well_is_not_a_proper_end(cluster: Cluster, client: Open, tmp_path: Path) -> None:
    """kubectl ends with status 0 if the server closes the connection."""
    program = tmp_path / "kubectl-that-ends-well"
    program.write_text('#!/bin/sh\nkubectl "$@"\nstatus=$?\ncase "$*" in *exec*) exit 0 ;; esac\nexit $status\n')
    program.chmod(0o755)
    one = client(kubectl=str(program), reconnect="0")
    group = one.group(1)
    one.start(group, FOR_EVER)
    one.wait(m.Started)
    began_s = time.monotonic()
    cluster.do("cut", cluster.names("pods")[0])
    assert "its connection has ended" in (reason := one.wait(m.WorkerGroupClosed).reason), reason
    assert time.monotonic() - began_s < 10
    assert one.run(one.group(1), "rank").values == {0: 0}


def test_a_value_of_a_gigabyte_goes_in_and_out_with_a_few_parts_at_a_time_in_memory(
    cluster: Cluster, client: Open
) -> None:
    big = bytes(range(256)) * (GIGABYTE // 256)
    others = coordinators()
    one = client(copy_files="", idle="114")  # with a coordinator of its own
    group = one.group(1)
    [pid] = {*coordinators()} - {*others}
    digest = hashlib.sha256(big).hexdigest()
    hashed = "import hashlib\nhashlib.sha256(big).hexdigest()"
    with Peak(pid) as into:
        assert one.run(group, hashed, inputs={"big": bytearray(big)}).values[0] == digest
    with Peak(pid) as out:
        outcome = one.run(group, f"bytes(range(256)) * {GIGABYTE // 256}")
    assert hashlib.sha256(outcome.values[0]).hexdigest() == digest
    assert into.most_bytes < 400e6, f"{into.most_bytes / 1e6:.0f} MB"
    assert out.most_bytes < 1.4 * GIGABYTE, f"{out.most_bytes / 1e6:.0f} MB: the value once"


class Peak:
    """The most memory of its own that a process has meanwhile, shared memory not counted."""

    def __init__(self, pid: int) -> None:
        self._path, self._ended = Path(f"/proc/{pid}/status"), threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        while not self._ended.wait(0.01):
            found = re.search(r"RssAnon:\s*(\d+) kB", self._path.read_text())
            assert found is not None
            self.most_bytes = max(self.most_bytes, int(found[1]) * 1024)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_sixteen_pods_reach_one_another(cluster: Cluster, client: Open) -> None:
    one = client(nodes="16")
    group = one.group(16)
    outcome = one.run(group, SUM, strategy="ddp")
    assert [value[1] for value in outcome.values.values()] == [16] * 16
    assert len(cluster.get("pods")) == 16
    assert len({value[0] for value in outcome.values.values()}) == 16


def test_what_has_ended_in_a_pod_is_reaped(cluster: Cluster, client: Open) -> None:
    one = client()
    group = one.group(2)
    before = one.run(group, STATES).values[0]
    assert one.run(group, ORPHANS).values == {0: 0, 1: 1}
    assert wait_until(lambda: one.run(group, STATES).values[0] == before, 30), (before, one.run(group, STATES).values)
    assert before[1] == 0
