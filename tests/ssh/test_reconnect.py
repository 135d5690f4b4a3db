"""An ssh that breaks in the middle of a cell: another one takes its place, and the ranks go on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from textwrap import dedent
from threading import Event

import pytest

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.pools.command.connect import connect
from jupyter_distrib.pools.ssh.pool import SshPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire.messages import Exited, WorkerGroupOpened, Wrote
from tests.processes import wait_until
from tests.ssh.bed import Bed, Host
from tests.ssh.test_notebook import commands

pytestmark = pytest.mark.slow


class Ranks:
    """Two ranks, one on each host."""

    def __init__(self, bed: Bed, **options: str) -> None:
        self.client = PoolClient(SshPool(**bed.options, nodes="2", **options))
        self.group: WorkerGroupOpened = self.client.group(2)

    def begin(self, source: str, **more: object) -> str:
        """Start a cell, and wait for the first that it prints."""
        run = self.client.start(self.group, source, **more)
        while not isinstance(self.client.seen.get(timeout=60), Wrote):
            pass
        return run


@pytest.fixture(scope="module")
def ranks(bed: Bed) -> Iterator[Ranks]:
    _others.update(pid for host in bed.hosts for pid in ssh_to(host))
    one = Ranks(bed, reconnect="59")  # an option of its own, so a coordinator of its own
    yield one
    one.client.close()


_others: set[int] = set()
"""Those of earlier tests, whose coordinators have not ended yet."""


def ssh_to(host: Host) -> list[int]:
    return [pid for pid, line in commands("ssh").items() if f"-- {host.name}" in line and pid not in _others]


def kill_ssh(host: Host, number: int = signal.SIGKILL) -> int:
    [pid] = ssh_to(host)
    os.kill(pid, number)
    return pid


def wait_for_another(host: Host, before: int) -> None:
    assert wait_until(lambda: any(pid != before for pid in ssh_to(host)), 40)


LINES = """
import os, time
print("in", flush=True)
for number in range(1000):
    print(number, flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
for number in range(1000, 2000):
    print(number, flush=True)
os.getpid()
"""


def killed_here(host: Host) -> None:
    wait_for_another(host, kill_ssh(host))


def hung_here(host: Host) -> None:
    """As when the network is cut: nobody says so."""
    wait_for_another(host, hung := kill_ssh(host, signal.SIGSTOP))
    assert wait_until(lambda: hung not in commands("ssh"), 15), "it was stopped, and is ended all the same"


def killed_there(host: Host) -> None:
    [before] = ssh_to(host)
    for session in host.sessions():
        os.kill(session, signal.SIGKILL)
    wait_for_another(host, before)


@pytest.mark.parametrize("cuts", [(killed_here, killed_here), (killed_there,), (hung_here,)])
def test_every_line_comes_once_and_the_ranks_stay(
    ranks: Ranks, bed: Bed, tmp_path_factory: pytest.TempPathFactory, cuts: tuple[Callable[[Host], None], ...]
) -> None:
    go = bed.folder / f"go{tmp_path_factory.mktemp('go').name}"
    run = ranks.begin(LINES, inputs={"go": str(go)})
    for cut in cuts:
        cut(bed.hosts[1])
    go.touch()
    outcome = ranks.client.finish(run, (0, 1))
    assert [outcome.text(rank).split() for rank in range(2)] == [["in", *map(str, range(2000))]] * 2
    assert outcome.values == {worker.rank: worker.pid for worker in ranks.group.workers}


def moved_bytes(host: Host) -> int:
    for pid in ssh_to(host):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(lines[0].split()[1]) + int(lines[1].split()[1])
    return 0


def test_a_value_of_a_gigabyte_arrives_whole_in_both_directions(ranks: Ranks, bed: Bed) -> None:
    large = random.Random(8).randbytes(1 << 20) * 1024
    run = ranks.client.start(ranks.group, "large if rank == 1 else len(large)", inputs={"large": large})
    for _ in range(4):
        began = moved_bytes(bed.hosts[1])
        assert wait_until(lambda began=began: moved_bytes(bed.hosts[1]) > began + (100 << 20), 60)  # type: ignore[misc]
        killed_here(bed.hosts[1])
    outcome = ranks.client.finish(run, (0, 1))
    assert outcome.values == {0: len(large), 1: large}


def test_one_that_never_comes_back_is_lost_with_the_reason_and_leaves_nothing(bed: Bed) -> None:
    there = set(bed.hosts[1].processes())
    own = Ranks(bed, reconnect="4")
    began = set(bed.hosts[1].processes()) - there
    assert began
    try:
        run = own.begin(
            dedent("""\
                import time
                print('in', flush=True)
                time.sleep(100)""")
        )
        config = bed.config.read_text()
        bed.config.write_text(config.replace("Port 2022", "Port 2023"))
        for pid in ssh_to(bed.hosts[1]):
            os.kill(pid, signal.SIGKILL)
        outcome = own.client.finish(run, (0, 1))
        reason = outcome.of(Exited, 1)[0].reason
        assert "node host2 was lost" in reason, reason
        assert "was not taken up again within 4 s (no SSH server answers on host2" in reason, reason
        assert wait_until(lambda: not began & set(bed.hosts[1].processes()), 20)
    finally:
        bed.config.write_text(config)
        own.client.close()


def test_a_relay_whose_coordinator_ends_without_a_word_ends_at_once(bed: Bed) -> None:
    """It sees that only its input ends. The limit is far away."""
    archive: Future[bytes] = Future()
    archive.set_result(source_archive.archive())
    there = set(bed.hosts[0].processes())
    takeover = {"secret": "s", "limit_s": 600.0, "holder": (), "input_shows_the_end": True}
    start = {"label": "a test", "session": "s", "interface": "lo", "env": {}, "takeover": takeover}
    connection = connect(SshPool(**bed.options), "host1", archive, start, Event())
    assert set(bed.hosts[0].processes()) - there
    connection.link.close()
    assert wait_until(lambda: not set(bed.hosts[0].processes()) - there, 15)
    connection.process.wait()
    connection.log.close()
