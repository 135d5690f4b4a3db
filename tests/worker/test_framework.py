"""A framework that this package does not know: its ranks, its strategy, and nothing edited for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook
from tests.pools.command.test_restarts import POOL as TWO_NODES

pytestmark = pytest.mark.slow  # ranks that are programs of their own

THEIRS = """
import os
from jupyter_distrib.extend import Strategy
from jupyter_distrib.worker.address_exchange import PlainGroups

class Sightings:
    communication = ()
    def begin(self): pass
    def counts(self): return ()
    def inspect_groups(self): return ()

class Cluster(PlainGroups):
    ends_at_reset = True
    met = False
    def exchange(self, text):
        self.met = True
        return super().exchange(text)
    def reset(self, host, port, listen_fd):
        if self.met: raise RuntimeError("they have met.")
        super().reset(host, port, listen_fd)

class MadeUp:
    name = "theirs:MadeUp"
    sightings = Sightings()
    calls = []
    def load(self): self.calls.append("load")
    def preload(self): yield from ()
    def set_up(self, order):
        self.calls.append("settle")
        self.groups = PlainGroups(order.rank, order.world_size)
    def prepare(self): self.calls.append("prepare")
    def finish(self, values): self.calls.append("finish")
    def device(self, name): return f"made up {name}"
    def use_threads(self, count): self.threads = count
    def use_device(self): pass
    def drain(self, limit_s): raise AssertionError("CPU ranks have nothing to drain")
    def is_of_device(self, error): return False
    def tensor_bytes(self, value): return 0
    def warm_device(self): pass
    def release_memory(self): pass
    def device_memory(self): return None
    def measure_peak(self): pass
    def peak_bytes(self): return None
    def phase_times(self): return None

class Clustered(MadeUp):
    name = "theirs:Clustered"
    def set_up(self, order): self.groups = Cluster(order.rank, order.world_size)

BEGUN = os.path.join(os.path.dirname(__file__), "begun")

class Late(Cluster):
    # Its rank 0, which is to make its groups anew, leaves only when rank 1 has begun the next cell.
    def exchange(self, text):
        if self._rank == 1 and os.path.exists(BEGUN): open(BEGUN, "w").close()
        return super().exchange(text)
    def reset(self, host, port, listen_fd):
        if self.met and self._rank == 0:
            with open(BEGUN): pass
        super().reset(host, port, listen_fd)

class Lagging(MadeUp):
    name = "theirs:Lagging"
    def set_up(self, order): self.groups = Late(order.rank, order.world_size)

class Once(Strategy):
    framework = Clustered.name
    def begin(self, run): run.names["addresses"] = run.exchange(os.environ["RANK"])

class OnceLate(Once):
    framework = Lagging.name

class Spread(Strategy):
    framework = MadeUp.name
    @classmethod
    def environment(cls, options): return {"THEIR_VARIABLE": "as they want it"}
    def begin(self, run):
        run.names["addresses"] = run.exchange(f"host-{os.environ['RANK']}")
        run.names["again"] = run.exchange(os.environ["RANK"])
"""
CELL = """\
import os, sys
from jupyter_distrib.interfaces import framework
(device, 'torch' in sys.modules, addresses, again, os.environ['THEIR_VARIABLE'], framework.current.calls)"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "theirs.py").write_text(THEIRS)
    info = folder / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[jupyter_distrib.strategies]\nspread = theirs:Spread\nonce = theirs:Once\nlate = theirs:OnceLate\n"
    )
    with Notebook(folder, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}) as book:
        book.ok("%load_ext jupyter_distrib")
        yield book


def test_its_ranks_hold_no_torch_and_tell_one_another_their_addresses(book: Notebook) -> None:
    first = book.ok(f"%%distributed --ranks 2 --strategy spread\n{CELL}").result
    second = book.ok(f"%%distributed --ranks 2 --strategy spread\n{CELL}").result

    told = "('made up cpu', False, ('host-0', 'host-1'), ('0', '1'), 'as they want it', ['load', 'settle', 'prepare'"
    assert first.count(told) == 1, first  # both ranks said the same, which is shown once
    assert f"{told}, 'finish', 'prepare'" in second


def test_values_that_its_ranks_keep_come_to_the_notebook(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --strategy spread --keep x\nx = rank + 1")

    assert book.ok("x[1]").result == "2"
    assert book.ok("%%distributed --ranks 2 --strategy spread\nx").text.count("2")


def test_torch_cells_of_the_same_notebook_have_ranks_of_their_own(book: Notebook) -> None:
    assert "made up" in book.ok("%%distributed --ranks 2 --strategy spread\ndevice").result

    assert book.ok("%%distributed --ranks 2 --strategy ddp\nstr(device), 'addresses' in globals()").result
    refused = book.fails("%%distributed --on 0 --strategy spread\n1").evalue
    assert (
        "--strategy spread computes with theirs:MadeUp, and these ranks with jupyter_distrib.worker.pytorch" in refused
    )


def test_a_rank_that_waits_for_an_address_can_be_stopped(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --ranks 2 --strategy spread
            from jupyter_distrib.interfaces import framework
            if rank == 1:
                print('waiting', flush=True)
                framework.current.groups.exchange('mine')
            import time
            while rank == 0: time.sleep(0.1)""")
    )
    book.until("waiting")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert "host-1" in book.ok(f"%%distributed --ranks 2 --strategy spread\n{CELL}").result


def test_ranks_that_end_when_their_groups_are_reset_are_replaced_before_the_next_cell(book: Notebook) -> None:
    line = "%%distributed --ranks 2 --strategy once\n"
    before = book.ok(f"{line}import os; os.getpid(), addresses").result
    assert book.ok(f"{line}import os; os.getpid(), addresses").result == before

    for _ in range(2):
        assert book.fails(f"{line}assert rank == 0").ename == "AssertionError"
        after = book.ok(f"{line}import os; os.getpid(), addresses").result
        assert "('0', '1')" in after
        assert after != before


def test_ranks_of_two_nodes_meet_also_when_one_is_replaced_after_they_were_told_where(book: Notebook) -> None:
    line = f"%%distributed {TWO_NODES} --ranks 2 --strategy late\n"
    assert book.ok(f"{line}addresses").result == "ranks 0-1: ('0', '1')"

    assert book.fails(f"{line}import os, theirs\nif rank: os.mkfifo(theirs.BEGUN)\nassert not rank").ename
    assert book.ok(f"{line}addresses").result == "ranks 0-1: ('0', '1')"
