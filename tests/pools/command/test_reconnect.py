"""A connection that breaks is taken up again: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.pools.command.pool import CommandPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire.messages import Exited, Noted, Stop, WorkerGroupOpened, Wrote
from tests.pools.command import breaking_command
from tests.pools.command.test_connect import folders
from tests.processes import wait_until

pytestmark = pytest.mark.slow


class Bed:
    """Two hosts whose connections break when they are told to."""

    def __init__(self, folder: Path, kind: str, **options: str) -> None:
        self.folder, self.kind = folder, kind
        start = f"{sys.executable} {breaking_command.__file__} {folder} {{host}} {{python}}"
        self.pool = CommandPool(hosts="a,b", start=start, python=sys.executable, nodes="2", **options)
        self.client = PoolClient(self.pool)
        self.group: WorkerGroupOpened = self.client.group(2)

    def breaks(self, host: str, *sizes: int) -> None:
        """Let the connection break after so many bytes, and the ones after it."""
        for number, size in enumerate(sizes):
            hidden = self.folder / f"new-{host}"
            hidden.write_text(str(size))
            hidden.rename(self.folder / f"{host}.{number:04}")

    @property
    def left(self) -> list[Path]:
        """The breaks that are still to come."""
        return list(self.folder.glob("?.*"))

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    one = Bed(tmp_path, "command")
    yield one
    one.close()


LINES = """
import os, time
for number in range(2000):
    print(number, flush=True)
    if number == 1000:
        print("half", flush=True)
        while [name for name in os.listdir(folder) if name[1] == "."]:
            print(number, flush=True)
            time.sleep(0.01)
os.getpid()
"""


def expected(text: str) -> bool:
    """Whether no line is missing and none comes twice, but for those of the wait in the middle."""
    lines = text.split()
    middle = len(lines) - 2001
    want = [*map(str, range(1001)), "half", *["1000"] * middle, *map(str, range(1001, 2000))]
    return middle >= 0 and lines == want


def test_every_line_comes_once_however_often_and_wherever_the_connection_breaks(bed: Bed) -> None:
    chance = random.Random(7)
    bed.breaks("a", *[chance.randrange(1, 3000) for _ in range(8)])
    bed.breaks("b", *[chance.randrange(1, 30000) for _ in range(4)])
    outcome = bed.client.run(bed.group, LINES, inputs={"folder": str(bed.folder)})
    assert not bed.left, outcome.events[-3:]
    assert [expected(outcome.text(rank)) for rank in range(2)] == [True, True]
    assert outcome.values == {worker.rank: worker.pid for worker in bed.group.workers}


def test_a_large_value_comes_whole_in_both_directions(bed: Bed) -> None:
    large = random.Random(8).randbytes(1 << 20) * 64
    bed.breaks("a", 5_000_000, 20_000_000, 4_000_000)
    bed.breaks("b", 50_000_000)
    outcome = bed.client.run(bed.group, "large if rank == 0 else len(large)", inputs={"large": large})
    assert not bed.left
    assert outcome.values == {0: large, 1: len(large)}
    bed.breaks("a", 30_000_000, 1)
    assert bed.client.run(bed.group, "large if rank == 0 else 7", inputs={"large": large}).values == {0: large, 1: 7}
    assert not bed.left


def test_stop_reaches_ranks_whose_connection_has_just_broken(bed: Bed) -> None:
    run = bed.client.start(
        bed.group,
        dedent("""\
            import time
            print('in', flush=True)
            time.sleep(100)"""),
    )
    while not isinstance(bed.client.seen.get(timeout=60), Wrote):
        pass
    bed.breaks("a", 1)
    assert wait_until(lambda: not bed.left, 10)
    bed.client.send(Stop(run=run))
    assert bed.client.finish(run, (0, 1)).of(Exited) == []


def test_one_that_does_not_come_back_is_lost_with_the_reason_and_nothing_is_left(tmp_path: Path) -> None:
    bed = Bed(tmp_path, "command", reconnect="5")
    try:
        there = len(folders("command"))
        (tmp_path / "a-refused").touch()
        bed.breaks("a", 1)
        outcome = bed.client.run(bed.group, "import time\ntime.sleep(100)")
        reason = outcome.of(Exited, 0)[0].reason
        assert "its connection has ended" in reason, reason
        assert "was not taken up again within 5 s" in reason, reason
        assert "a is out of reach" in reason, reason
        [note] = outcome.of(Noted)
        assert note.text.startswith("node a: its connection has ended"), note
        assert "being re-established; the ranks there go on meanwhile" in note.text
        assert wait_until(lambda: len(folders("command")) < there, 15)
    finally:
        bed.close()
