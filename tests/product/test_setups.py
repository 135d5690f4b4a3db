"""`%%distributed_setup`: a cell that runs in the notebook and on every rank before its first cell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook
from tests.product import setup_cases
from tests.product.test_growth import pool

pytestmark = pytest.mark.slow

REGISTRY = """
ALL = {}
def register(thing):
    if thing.__name__ in ALL:
        raise KeyError(f"{thing.__name__} is registered twice")
    ALL[thing.__name__] = thing
    return thing
"""
SETUP = """%%distributed_setup {name}
import config, registry, torch
config.LR = chosen(3)
@registry.register
class Point:
    class Inner: pass
    def __init__(self, x): self.x = x
@registry.register
def build(): return Point(1)
torch.serialization.add_safe_globals([Point])
"""


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    """A kernel in a folder with modules of the user's."""
    (tmp_path / "config.py").write_text("LR = 1\n")
    (tmp_path / "registry.py").write_text(REGISTRY)
    (tmp_path / "script.py").write_text("import config\nprint('the script reads', config.LR)\n")
    with Notebook(tmp_path) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                def chosen(value): return value * factor
                factor = 1""")
        )
        session = book.ok("from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)")
        yield book
    leftovers_after(session.stdout.strip())


def reads(outcome: str) -> str:
    return f"%%distributed --ranks 2\nimport config, registry\n{outcome}"


def test_it_holds_in_the_notebook_and_on_ranks_of_every_age(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2\npass")
    assert book.ok(SETUP.format(name="points") + "config.LR").result == "3"
    seen = "(config.LR, sorted(registry.ALL))"

    assert book.ok(reads(seen)).result == "ranks 0-1: (3, ['Point', 'build'])"
    assert book.ok(reads(seen)).result == "ranks 0-1: (3, ['Point', 'build'])"  # a second time it would raise
    assert book.ok(reads(seen).replace("2", "3")).result == "ranks 0-2: (3, ['Point', 'build'])"
    assert book.ok(reads(seen).replace("2", "2 --fresh")).result == "ranks 0-1: (3, ['Point', 'build'])"
    lost = dedent("""\
        import os
        if rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)
        config.LR""")
    assert book.ok(reads(lost).replace("2", "2 --max-restarts 1")).result == "ranks 0-1: 3"


def test_a_class_is_one_class_on_a_rank_and_the_notebooks_own_when_it_returns(book: Notebook, tmp_path: Path) -> None:
    book.ok(SETUP.format(name=""))
    book.ok("point, Same = Point(7), Point; torch.save(point, 'point.pt')")

    cell = dedent("""\
        import torch
        own = registry.ALL['Point']
        same = own is Point is Same, isinstance(point, own), type(registry.ALL['build']()) is Point
        same, type(torch.load('point.pt')) is own, Point.Inner.__qualname__""")
    there = book.ok(reads(cell))
    assert there.result == "ranks 0-1: ((True, True, True), True, 'Point.Inner')"
    book.ok(reads("registry.ALL['build'](), registry.ALL['Point']"))
    assert book.ok("[(type(made) is Point, cls is Point) for made, cls in _]").result == "[(True, True), (True, True)]"
    book.ok(
        dedent("""\
            Point.later = 5
            def double(self): return 2 * self.x * factor
            Point.double = double
            factor = 10""")
    )
    changed = book.ok(reads("registry.ALL['build']().later, registry.ALL['Point'](2).double(), Point.__name__"))
    assert changed.result == "ranks 0-1: (5, 40, 'Point')"


def test_run_again_it_is_the_same_and_changed_it_runs_anew(book: Notebook) -> None:
    book.ok("%%distributed_setup\nprint('first')")
    book.ok("%%distributed_setup two\nprint('second', factor)")
    assert "first" in (view := book.ok("%%distributed --ranks 2\npass").view)
    assert "second 1" in view

    book.ok("%%distributed_setup\nprint('first')")
    book.ok("%%distributed_setup two\nprint('second', factor)")
    assert book.ok("%%distributed\npass").view == ""
    listed = book.ok("%distributed_setup --list").result.splitlines()
    assert [line.split()[0] for line in listed[1:]] == ["setup-1", "two"]

    book.ok("factor = 2")
    book.ok("%%distributed_setup two\nprint('second', factor)")
    assert "second 2" in (view := book.ok("%%distributed\npass").view)
    assert "first" not in view
    book.ok("%%distributed_setup two\nprint('third')")
    assert "third" in (view := book.ok("%%distributed\npass").view)
    assert "second" not in view


def test_a_failing_one_ends_the_cell_until_it_is_mended(book: Notebook) -> None:
    book.ok(
        dedent("""\
        %%distributed_setup careful
        import os

        if 'RANK' in os.environ:
            {}['nothing']""")
    )

    failed = book.fails("%%distributed --ranks 2\nprint('begun')")
    assert failed.ename == "KeyError"
    assert "begun" not in failed.text
    assert "line 5" in failed.traceback, failed.traceback
    assert "{}['nothing']" in failed.traceback
    assert "in the set-up careful" in failed.traceback
    assert "begun" not in book.fails("%%distributed\nprint('begun')").text

    book.ok(
        dedent("""\
            %%distributed_setup careful
            import os, sys
            if 'RANK' in os.environ: sys.exit(0)""")
    )
    left = book.fails("%%distributed\nprint('begun')")
    assert "The set-up careful called sys.exit(0)" in left.evalue
    assert "begun" not in left.text
    book.ok("%%distributed_setup careful\npass")
    assert "begun" in book.ok("%%distributed\nprint('begun')").view


def test_one_that_fails_in_the_notebook_changes_nothing(book: Notebook) -> None:
    book.ok("%%distributed_setup mine\nprint('the old one')")

    failed = book.fails(
        dedent("""\
            %%distributed_setup mine
            value = 1
            value / 0""")
    )
    assert failed.ename == "ZeroDivisionError"
    assert "----> 3 value / 0" in failed.traceback
    assert "setup_cell.py" not in failed.traceback
    assert "run_cell_magic" not in failed.traceback
    assert "line 2: %prun" in book.fails("%%distributed_setup mine\n%prun 1").evalue
    assert "more than 1.0 MB" in book.fails("big = bytes(2_000_000)\nget_ipython().run_cell_magic('distributed_setup', 'mine', 'len(big)')").evalue  # fmt: skip
    assert "the old one" in book.ok("%%distributed --ranks 1\npass").view


def test_a_long_one_is_shown_and_can_be_stopped(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed_setup long
            import os, threading
            if 'RANK' in os.environ:
                threading.Event().wait()""")
    )

    book.start("%%distributed --ranks 2\nprint('begun')")
    book.until("runs the set-up long")
    book.interrupt()
    stopped = book.finish()

    assert stopped.ename == "KeyboardInterrupt"
    assert "begun" not in stopped.text
    assert "line 4" in stopped.traceback, stopped.traceback
    book.ok("%%distributed_setup long\nprint('short')")
    assert "short" in book.ok("%%distributed\npass").view


def test_after_undo_new_ranks_do_not_run_it(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed_setup one
            import config
            config.LR = 3""")
    )
    assert book.ok(reads("config.LR")).result == "ranks 0-1: 3"
    assert "one" in book.ok("%distributed_status").result

    assert "--fresh" in book.ok("%distributed_setup --undo one").stdout
    assert book.ok(reads("config.LR")).result == "ranks 0-1: 3"
    assert book.ok(reads("config.LR").replace("2", "2 --fresh")).result == "ranks 0-1: 1"
    assert "it has: none" in book.fails("%distributed_setup --undo one").evalue
    assert book.ok("%distributed_setup").result == "This notebook has no set-ups."


def test_functions_submitted_runs_sweeps_scripts_and_inline_ranks(book: Notebook) -> None:
    book.ok(SETUP.format(name="points"))
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def read(): return config.LR, registry.ALL['Point'] is Point""")
    )

    assert book.ok("read.distributed()").result == "ranks 0-1: (3, True)"
    assert book.ok("read.submit().result()").result == "ranks 0-1: (3, True)"
    swept = book.ok("%%distributed --sweep factor=5,6 --ranks 1\nfactor, config.LR")
    assert "(5, 3)" in swept.result
    assert "(6, 3)" in swept.result
    assert "the script reads 3" in book.ok("%distributed_run script.py").view
    assert (
        book.ok("%%distributed --pool inline --ranks 2\nconfig.LR, registry.ALL['Point'] is Point").result
        == "ranks 0-1: (3, True)"
    )


def test_what_it_sets_in_the_process_lasts(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed_setup
            import os, signal
            %env FOR_ALL=1
            %matplotlib inline
            if 'RANK' in os.environ:
                os.environ['OWN'] = os.environ['RANK']
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            import asyncio
            await asyncio.sleep(0)""")
    )
    read = "import os, signal\nos.environ['FOR_ALL'], os.environ.get('OWN'), signal.getsignal(signal.SIGUSR2).name"
    for _ in range(2):
        values = book.ok(f"%%distributed --ranks 2\n{read}").result
        assert values == "rank 0: ('1', '0', 'SIG_IGN')\nrank 1: ('1', '1', 'SIG_IGN')"
    book.ok("os.environ['OWN'] = 'of the notebook'")
    cell = dedent("""\
        %%distributed
        import os
        os.environ['OWN']""")
    assert "of the notebook" in book.ok(cell).result


def test_modules_that_are_imported_again_are_set_up_again(book: Notebook, tmp_path: Path) -> None:
    book.ok(SETUP.format(name="points"))
    book.ok(
        dedent("""\
            %%distributed_setup other
            import os
            print('not again')""")
    )
    book.ok(reads("pass"))

    (tmp_path / "config.py").write_text("LR, OTHER = 1, 2\n")

    again = book.ok(reads("config.LR, config.OTHER, sorted(registry.ALL)"))
    assert again.result == "ranks 0-1: (3, 2, ['Point', 'build'])"
    assert "not again" not in again.view


def test_an_exported_script_begins_with_it(book: Notebook, tmp_path: Path) -> None:
    book.ok(SETUP.format(name="points"))
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out seen
            print('exported', config.LR, registry.ALL['Point'] is Point)
            rank""")
    )

    book.ok("%distributed_export seen exported.py")

    env = {**os.environ, "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "exported.py"], capture_output=True, text=True, check=False, cwd=tmp_path, env=env
    )
    assert "exported 3 True" in done.stdout, done.stderr


def test_what_cannot_be_sent_is_the_ranks_own(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed_setup
            import threading, torch
            class Locked:
                lock = threading.Lock()
            lock = threading.Lock()
            @torch.library.custom_op('own::double', mutates_args=())
            def double(x: torch.Tensor) -> torch.Tensor:
                return x * 2""")
    )
    book.ok(
        dedent("""\
            def use(x):
                with lock: return double(x)
            thing = Locked()""")
    )

    there = book.ok(
        "%%distributed --ranks 2\nuse(torch.ones(1)).item(), double(torch.ones(2)).sum().item(), type(thing) is Locked"
    )
    assert there.result == "ranks 0-1: (2.0, 4.0, True)"
    book.ok("lock = (i for i in ())")
    assert "cannot be sent" in book.fails("%%distributed --ranks 2\n[*lock]").evalue


def test_one_of_two_hosts_whose_set_up_fails_ends_the_run_at_once(book: Notebook, tmp_path: Path) -> None:
    for host in "ab":
        (tmp_path / f"up-{host}").touch()
    of_hosts = pool(tmp_path, "a:1,b:1").removeprefix("--pool command ")
    book.ok(f"%distributed_pool add lab --kind command {of_hosts} --ranks 2\n%distributed_pool use lab")
    setup_cases.check(book, ranks=2)
    book.ok("%distributed_pool stop lab")


def test_one_of_two_ranks_whose_set_up_fails_ends_the_run_at_once(book: Notebook) -> None:
    book.ok("%distributed_pool add two --kind local --ranks 2\n%distributed_pool use two")
    setup_cases.check(book, ranks=2)
