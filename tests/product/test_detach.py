"""Runs that go on without a cell, and without the kernel that started them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook
from tests.processes import wait_until, wait_until_gone

SLOWLY = """\
import time
for i in range({n}):
    print('step', i, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def shared(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The module's kernel, for what neither restarts it nor unloads the extension; without ranks before and after."""
    yield shared_notebook
    shared_notebook.ok("%distributed_pool stop")


def _wait_done(book: Notebook) -> None:
    """In the kernel: until the run `job` has ended, whatever became of it."""
    assert book.cell("job.wait_ended(30)").result == "True"


def test_a_detached_run_is_returned_at_once_and_gives_its_values_later(shared: Notebook) -> None:
    outcome = shared.cell("%%distributed --ranks 2 --detach --out job\n" + SLOWLY.format(n=10) + "rank + 1")

    assert outcome.result.startswith("Run ")
    assert shared.cell("job.done()").result == "False"
    assert shared.cell("job.result(timeout_s=30)").result == "rank 0: 1\nrank 1: 2"
    assert shared.cell("job.done()").result == "True"
    assert "step 9" in shared.cell("print(job.logs(1))").stdout


def test_a_run_that_is_pickled_says_what_to_pickle(shared: Notebook) -> None:
    shared.cell("%%distributed --ranks 2 --detach --out job\nrank")
    pickled = shared.cell("import pickle\npickle.dumps(job)")
    assert (pickled.ename, "pickle run.result()" in pickled.evalue) == ("TypeError", True)
    sent = shared.cell("%%distributed --ranks 2\njob")
    assert sent.evalue.startswith("`job` (used on line 2) is a ")
    assert shared.cell("pickle.loads(pickle.dumps(job.result(timeout_s=30)))").result == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_waiting_too_short_says_that_the_run_goes_on(shared: Notebook) -> None:
    shared.cell("%%distributed --ranks 2 --detach --out job\n" + SLOWLY.format(n=20) + "rank")
    outcome = shared.cell("job.result(timeout_s=0.01)")

    assert outcome.ename == "TimeoutError"
    assert "goes on" in outcome.evalue
    assert shared.cell("job.result(timeout_s=30)").status == "ok"


@pytest.mark.slow
def test_a_detached_run_can_be_cancelled(shared: Notebook) -> None:
    shared.cell(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            time.sleep(60)""")
    )
    shared.cell("job.cancel()")
    _wait_done(shared)

    assert shared.cell("job.result()").ename == "KeyboardInterrupt"


@pytest.mark.slow
def test_another_cell_runs_meanwhile_on_other_ranks(shared: Notebook) -> None:
    shared.cell(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time, os
            time.sleep(60)""")
    )
    other = shared.cell("%%distributed --ranks 2\nrank")
    shared.cell("job.cancel()")
    _wait_done(shared)  # else the next test's run is queued behind it

    assert other.result == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "restart", "resize 3"])
def test_a_detached_run_whose_ranks_are_stopped_ends_and_says_so(shared: Notebook, action: str) -> None:
    shared.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            time.sleep(600)""")
    )
    told = shared.ok(f"print(job.id)\n%distributed_pool {action}").stdout
    _wait_done(shared)

    assert re.fullmatch(r"(.+)\nRun \1 of Cell In\[\d+\] was ended with its ranks\.\n", told), told
    ended = shared.fails("job.result()")
    assert ended.ename == "RankLost"
    assert "because its ranks were stopped from this notebook" in ended.evalue
    assert shared.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_a_run_that_goes_on_is_known_however_many_cells_come_after_it(notebook: Notebook) -> None:
    notebook.cell(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            time.sleep(60)""")
    )
    notebook.cell("for _ in range(30): get_ipython().run_cell_magic('distributed', '--ranks 1', 'rank')")
    known = "from jupyter_distrib.kernel.session import session; here = session.current()\n"

    assert notebook.cell(f"{known}here.find_run(job.id) is job").result == "True"
    assert notebook.cell("[run.id for run in here.history if not run.done()] == [job.id]").result == "True"
    assert notebook.cell("len(here.history)").result == "20"
    assert "running" in notebook.cell("%distributed_status").result
    notebook.cell("job.cancel()")
    _wait_done(notebook)


@pytest.mark.slow
def test_fresh_ranks_are_others_than_those_of_a_detached_run(shared: Notebook) -> None:
    shared.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import os, time
            while not os.path.exists('go'):
                time.sleep(0.01)
            rank * 10""")
    )
    assert shared.ok("%%distributed --ranks 2 --fresh\nrank").result == "rank 0: 0\nrank 1: 1"
    assert shared.ok("%%distributed --ranks 2 --fresh\nrank").result == "rank 0: 0\nrank 1: 1"
    assert shared.ok("job.done()").result == "False"
    shared.ok("open('go', 'w').close()")

    assert shared.ok("job.result(timeout_s=30)").result == "rank 0: 0\nrank 1: 10"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["%unload_ext jupyter_distrib", "%reload_ext jupyter_distrib"])
def test_a_detached_run_can_be_waited_for_when_the_extension_is_gone(notebook: Notebook, line: str) -> None:
    notebook.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import os, time
            while not os.path.exists('go'):
                time.sleep(0.01)
            os.getpid()""")
    )
    other = int(notebook.ok("%%distributed --ranks 1\nimport os\nos.getpid()").result.split()[-1])
    notebook.ok(line)

    assert wait_until_gone([other], 2.0) == []
    assert notebook.ok("job.done()").result == "False"
    notebook.ok("open('go', 'w').close()")
    pids = [int(pid) for pid in notebook.ok("print(*job.result(timeout_s=30))").stdout.split()]
    assert len(pids) == 2
    assert wait_until_gone(pids, 5.0) == []


def test_a_failed_detached_run_raises_the_users_exception_from_result(shared: Notebook) -> None:
    shared.cell("%%distributed --ranks 2 --detach --out job\nraise LookupError('nothing there')")
    outcome = shared.cell("job.result(timeout_s=30)")

    assert outcome.ename == "LookupError"
    assert "Cell In" in outcome.traceback


@pytest.mark.slow
def test_a_restarted_kernel_attaches_the_run_and_gets_all_of_it(notebook: Notebook) -> None:
    notebook.cell("class Point:\n    def __init__(self, x): self.x = x")
    notebook.cell(
        "%%distributed --ranks 2 --detach --out job\nimport os\n" + SLOWLY.format(n=40) + "Point(rank * 7), os.getpid()"
    )
    notebook.restart()
    notebook.cell("%load_ext jupyter_distrib")
    attached = notebook.cell("job = get_ipython().run_line_magic('distributed_attach', '')\njob")

    assert "Cell In" in attached.result
    values = notebook.cell("values = job.result(timeout_s=30)\n[p.x for p, _ in values], type(values[0][0]).__name__")
    assert values.result == "([0, 7], 'Point')"
    log = notebook.cell("print(job.logs(0))").stdout
    assert [line for line in log.splitlines() if line.startswith("step")] == [f"step {i}" for i in range(40)]
    pids = [int(pid) for pid in notebook.cell("print(*[pid for _, pid in values])").stdout.split()]
    assert wait_until_gone(pids, 5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("", "import os\nos.environ['OMP_NUM_THREADS'] = '3'"),
        (f"--python {sys.executable}", "pass"),
    ],
    ids=["another environment", "options of the cell"],
)
def test_a_run_of_any_agent_of_the_user_is_reported_and_attached(notebook: Notebook, option: str, change: str) -> None:
    """The kernel that looks for it would start an agent of its own: with other threads, under another interpreter."""
    notebook.ok(
        dedent(f"""\
            %%distributed --ranks 2 --detach {option}
            import os, time
            while not os.path.exists('go'):
                time.sleep(0.01)
            rank * 7, os.getpid()""")
    )
    notebook.restart()
    notebook.ok(change)
    notebook.ok("%load_ext jupyter_distrib")
    [row] = [line for line in notebook.ok("%distributed_status").result.splitlines() if " running " in line]
    run, cell, *_ = re.split(r" {2,}", row)
    assert cell.startswith("Cell In[")
    attached = notebook.ok("job = get_ipython().run_line_magic('distributed_attach', '')\njob")
    assert attached.result.startswith(f"Run {run} of {cell}: ")
    notebook.ok("open('go', 'w').close()")
    values = notebook.ok("values = job.result(timeout_s=30)\n[x for x, _ in values]")
    assert values.result == "[0, 7]"
    assert run not in notebook.ok("%distributed_status").result.partition("detached run")[2]
    pids = [int(pid) for pid in notebook.ok("print(*[pid for _, pid in values])").stdout.split()]
    assert wait_until_gone(pids, 5.0) == []


@pytest.mark.slow
def test_an_attached_run_shows_what_was_and_goes_on_live(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import os, time
            for i in jupyter_distrib.progress(range(9), label='epoch'):
                jupyter_distrib.report(loss=1 / (i + 1))
                if i == 3:
                    print('before', flush=True)
                    while not os.path.exists('go'):
                        time.sleep(0.01)
                    print('after', flush=True)
                    while not os.path.exists('end'):
                        time.sleep(0.01)
        """)
    )
    assert wait_until(lambda: "before" in notebook.ok("print(job.logs(1))").stdout)
    notebook.restart()
    notebook.ok("%load_ext jupyter_distrib")
    notebook.start("job = get_ipython().run_line_magic('distributed_attach', '')\njob.result(timeout_s=60)")
    for what in ("before", "loss 0.25", "epoch 3/9"):
        assert "after" not in notebook.until(what).view
    (tmp_path / "go").touch()
    notebook.until("after")
    (tmp_path / "end").touch()

    assert notebook.finish().status == "ok"
    told = notebook.ok("rank = job.record.ranks[1]\nrank.metrics, rank.progress[-1].step, len(rank.history)").result
    assert told == "({'loss': 0.1111111111111111}, 9, 9)"


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["jupyter", "vscode"])
def test_a_notebook_attaches_its_own_run_though_another_has_a_newer_one(tmp_path: Path, front_end: str) -> None:
    """As far as its front end tells its path, in the environment or by a name."""

    def load(book: Notebook, path: str) -> None:
        name = f"import os\nos.environ['JPY_SESSION_NAME'] = {path!r}"
        book.ok(name if front_end == "jupyter" else f"__vsc_ipynb_file__ = {path!r}")
        book.ok("%load_ext jupyter_distrib")

    with Notebook(tmp_path) as one, Notebook(tmp_path) as other:
        runs = []
        for book, path in ((one, "/home/me/one.ipynb"), (other, "/home/me/other.ipynb")):
            load(book, path)
            book.ok("%%distributed --ranks 1 --detach --out job\nrank")
            runs.append(book.ok("print(job.id)").stdout.strip())
        assert other.ok(
            "from jupyter_distrib.kernel.session import session\nsession.current().identity.label"
        ).result.startswith("'other.ipynb (")
        one.restart()
        load(one, "/home/me/one.ipynb")
        attached = one.ok("get_ipython().run_line_magic('distributed_attach', '').id")
        assert attached.result == repr(runs[0]) != repr(runs[1])


@pytest.mark.slow
def test_attaching_without_a_detached_run_says_so(shared: Notebook) -> None:
    outcome = shared.cell("%distributed_attach nowhere")

    assert outcome.ename == "PoolError"
    assert "no detached run" in outcome.evalue


@pytest.mark.slow
def test_an_attached_run_can_be_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.cell("%load_ext jupyter_distrib")
        session = book.cell(
            "from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)"
        ).stdout.strip()
        book.cell(
            dedent("""\
                %%distributed --ranks 2 --detach
                import subprocess
                subprocess.Popen(['sleep', '600'])
                import time
                time.sleep(600)""")
        )
        book.restart()
        book.cell("%load_ext jupyter_distrib")
        book.cell(f"job = get_ipython().run_line_magic('distributed_attach', '{session}-1')\njob.cancel()")
        _wait_done(book)
        leftovers_after(session, 5.0)
