"""Runs beside the notebook: submitted, queued, awaited, swept; through a real kernel."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

FOUR = "%distributed_pool add four --kind local --ranks 4\n%distributed_pool use four"
WORK = """
import os, time
from jupyter_distrib import distributed, runs
@distributed(ranks=1)
def work(number, until=""):
    if number == "fail":
        raise LookupError("nothing there")
    while until and not os.path.exists(until):
        time.sleep(0.005)
    return number
"""


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    with Notebook(tmp_path) as notebook:
        notebook.ok("%load_ext jupyter_distrib")
        notebook.ok(FOUR)
        notebook.ok(WORK)
        yield notebook


def test_eight_calls_over_four_slots_keep_their_order_in_one_view(book: Notebook) -> None:
    book.ok("sweep = [work.submit(number, 'go') for number in range(8)]")
    assert book.ok("sweep[7].state, sweep[7].place").result == "('queued', 4)"
    assert "is queued: only ranks that execute a cell have a stack" in book.fails("%distributed_stack").evalue
    assert book.ok("len(runs(active=True)), runs(active=False)").result == "(8, [])"
    book.ok("open('go', 'w').close()")

    assert book.ok("[run.result()[0] for run in sweep]").result == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert book.ok("(await sweep[3])[0], len(runs())").result == "(3, 8)"


def test_submitting_takes_less_than_20_ms_on_a_busy_pool(book: Notebook) -> None:
    book.ok("busy = [work.submit(0, 'go') for _ in range(4)]")
    book.ok("%%distributed --ranks 1 --timeout 60\n1")
    took = book.ok(
        dedent("""\
            took = []
            for _ in range(20):
                began = time.perf_counter()
                work.submit(1)
                took.append(time.perf_counter() - began)
            sorted(took)[10]""")
    )
    book.ok("open('go', 'w').close()")

    assert float(took.result) < 0.02


def test_the_sidebar_moves_a_queued_run_up_and_knows_the_cell_of_a_submitted_one(book: Notebook) -> None:
    book.cell("sweep = [work.submit(number, 'go') for number in range(7)]", cell_id="cell-7")
    ask = "from jupyter_distrib.kernel.sidebar import bridge\nbridge.handle({'op': 'move_up', 'run': sweep[6].id})"
    assert book.ok(f"{ask}['ok'], [run.place for run in sweep[4:]]").result == "(True, [1, 3, 2])"
    assert "is not queued" in book.ok(f"{ask.replace('sweep[6]', 'sweep[0]')}['error']").result
    cells = "{run['cell'] for run in bridge.handle({'op': 'overview'})['overview']['runs'] if run['elapsed_s'] is None}"
    assert book.ok(cells).result == "{'cell-7'}"
    book.ok("open('go', 'w').close()")

    assert book.ok("[run.result()[0] for run in sweep]").result == "[0, 1, 2, 3, 4, 5, 6]"


def test_one_view_shows_what_becomes_of_each_run(book: Notebook) -> None:
    book.start("sweep = [work.submit(number, 'go') for number in range(6)]\nsweep[5].wait_ended(20)")
    book.until("queued, place 2")
    book.interrupt()
    outcome = book.finish()

    assert len(outcome.displays) == 1
    lines = outcome.view.splitlines()
    assert lines[0].split() == ["number", "state", "time"], "what is the same in all of them is not shown"
    assert [line.split()[0] for line in lines[1:]] == [str(n) for n in range(6)]
    book.ok("for run in sweep: run.cancel()")


def test_submitted_runs_are_shown_like_a_sweep(book: Notebook) -> None:
    book.ok(
        dedent("""\
            @distributed(ranks=1)
            def train(lr, epochs=3):
                import jupyter_distrib
                for step in range(epochs): jupyter_distrib.report(loss=lr * 10 - step)""")
    )
    outcome = book.ok(
        dedent("""\
            swept = [train.submit(lr) for lr in (0.3, 0.1)]
            import threading
            for each in threading.enumerate():
                if each.name == 'jupyter_distrib-submitted': each.join()""")
    )

    table = [line.split()[:3] for line in outcome.view.splitlines()]
    assert table == [["lr", "loss", "state"], ["0.1", "-1", "done"], ["0.3", "1", "done"]]
    (html,) = outcome.displays_html.values()
    assert 'alt="loss, lr=0.1 fell' in html
    assert 'the best is lr=0.1"' in html


def test_a_failure_in_the_middle_stops_nothing_else(book: Notebook) -> None:
    book.ok("sweep = [work.submit(number) for number in (1, 'fail', 3)]")

    assert book.ok("sweep[0].result()[0], sweep[2].result()[0]").result == "(1, 3)"
    assert book.fails("sweep[1].result()").ename == "LookupError"


def test_stopping_ends_running_and_queued_runs(book: Notebook) -> None:
    book.ok("sweep = [work.submit(number, 'never') for number in range(6)]")
    book.ok("for run in reversed(sweep): run.cancel()")

    assert book.ok("[run.wait_ended(20) for run in sweep]").result == str([True] * 6)
    assert book.ok("{run.state for run in sweep}").result == "{'interrupted'}"
    assert book.ok("list(work.distributed(5))").result == "[5]"


def test_a_stop_that_comes_before_the_ranks_have_the_cell_is_not_lost(book: Notebook) -> None:
    book.ok("from jupyter_distrib.kernel.session import new_runs\nplace = new_runs.on_group")
    book.ok(
        dedent("""\
            def stopped(group, order, queued, run_id):
                if order.request.label.startswith('work(1'): queued.cancel()
                run = place(group, order, queued, run_id=run_id)
                if order.request.label.startswith('work(2'): run.cancel()
                return run
            new_runs.on_group = stopped""")
    )
    book.ok("work.submit(0).result()\nruns = [work.submit(number, 'never') for number in (1, 2)]")

    assert book.ok("[run.wait_ended(20) for run in runs], {run.state for run in runs}").result == (
        "([True, True], {'interrupted'})"
    )


def test_an_event_loop_may_be_closed_before_the_run_ends_for_which_it_waited(book: Notebook) -> None:
    book.ok("%%distributed --ranks 1 --keep here\nhere = 5")
    book.ok(
        dedent("""\
            import asyncio, threading
            job = work.submit(3, 'go')
            async def wait():
                try: await asyncio.wait_for(job, 0.1)
                except TimeoutError: print('too late')
            thread = threading.Thread(target=asyncio.run, args=(wait(),))
            thread.start()
            thread.join()""")
    )
    ended = book.ok("open('go', 'w').close()\njob.result(timeout=20)")
    assert (ended.result, "Traceback" in ended.text) == ("rank 0: 3", False), ended.text
    later = book.ok("time.sleep(0.2)\nprint(here[0])")
    assert (later.stdout, later.stderr) == ("5\n", "")


def test_a_run_whose_ranks_are_stopped_while_they_start_says_so(book: Notebook) -> None:
    book.ok("%distributed_pool stop")
    told = book.ok(
        dedent("""\
            from jupyter_distrib.kernel.session import session
            job = work.submit(3)
            while not session.current().pools.groups('four'): pass
            print(job.id)
            %distributed_pool stop""")
    )
    assert re.search(r"(\S+)\nRun \1 of work\(3\) was ended with its ranks\.\n", told.stdout), told.text
    ended = book.fails("job.result()")
    assert ended.evalue == "the ranks were stopped from this notebook while they were starting."


def test_what_the_notebook_changes_after_submitting_does_not_reach_a_queued_run(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            data = torch.zeros(100_000)
            busy = [work.submit(0, 'go') for _ in range(4)]""")
    )
    book.ok("@distributed(ranks=1)\ndef total(x): return float(x.sum()), os.environ['MINE'], os.getcwd()")
    book.ok(
        dedent("""\
            os.environ['MINE'] = 'before'
            here = os.getcwd()
            run = total.submit(data)""")
    )
    assert book.ok("run.state").result == "'queued'"
    book.ok(
        dedent("""\
            data += 1
            os.environ['MINE'] = 'after'
            os.chdir('/')
            open(here + '/go', 'w').close()""")
    )

    assert book.ok("run.result()[0] == (0.0, 'before', here)").result == "True"


def test_a_foreground_cell_runs_beside_submitted_ones(book: Notebook) -> None:
    book.ok("busy = [work.submit(0, 'go') for _ in range(6)]")

    assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"
    assert book.ok("sum(run.done() for run in busy)").result == "0"
    book.ok("open('go', 'w').close()")
    assert book.ok("[run.result()[0] for run in busy]").result == str([0] * 6)


def test_detached_cells_share_the_queue(book: Notebook) -> None:
    book.ok("busy = [work.submit(0, 'go') for _ in range(4)]")
    outcome = book.ok("%%distributed --ranks 1 --detach --out job\nrank + 5")
    assert "queued" in outcome.result
    assert "queued, place 1 of 1" in outcome.view
    book.ok("open('go', 'w').close()")

    assert book.ok("job.result()").result == "rank 0: 5"


def test_a_sweep_gives_a_sorted_table_and_the_values_in_order(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --sweep "lr=[0.3,0.1,0.2]" --ranks 1 --out swept
            import jupyter_distrib
            for step in range(3): jupyter_distrib.report(loss=lr * 10 - step)
            lr * 2""")
    )

    table = [line.split()[:3] for line in next(iter(outcome.displays.values())).splitlines()]
    assert table == [["lr", "loss", "state"], ["0.1", "-1", "done"], ["0.2", "0", "done"], ["0.3", "1", "done"]]
    assert outcome.result == "lr=0.3: 0.6\nlr=0.1: 0.2\nlr=0.2: 0.4"
    assert "image/png" in outcome.kinds
    assert book.ok("list(swept), swept[-1], swept.configurations[0]").result == "([0.6, 0.2, 0.4], 0.4, {'lr': 0.3})"


def test_a_sweep_without_values_is_reported_in_one_line(book: Notebook) -> None:
    outcome = book.ok("%%distributed --sweep lr=range(3) --ranks 1\ntwice = lr * 2")

    assert outcome.result == "3 runs without a value; to_pandas() gives their numbers"


def test_two_names_give_all_combinations_and_may_be_read_from_the_notebook(book: Notebook) -> None:
    book.ok("rates = [1, 2]\ndef scaled(): return lr * 10")
    outcome = book.ok("%%distributed --sweep lr=rates --sweep 'w=range(2)' --ranks 1\nscaled() + w")

    assert outcome.result == "lr=1, w=0: 10\nlr=1, w=1: 11\nlr=2, w=0: 20\nlr=2, w=1: 21"


@pytest.mark.parametrize(
    ("body", "is_read"),
    [
        ("width", True), ("get_width()", True), ("Net().width()", True), ("eval('width + 1')", True), ("by_text()", True),
        ("[width for _ in range(2)]", True), ("f'{width}'", True), ("with_default()", False), ("settings.width", False),
        ("widht = 3\nwidht", False),
        ("globals()['wid' + 'th']", True), ("import __main__\ngetattr(__main__, 'wid' + 'th')", True),
        ("by_parts()", True), ("evaluates()", False),
    ],
)  # fmt: skip
def test_a_name_of_a_sweep_that_nothing_reads_is_told(book: Notebook, body: str, is_read: bool) -> None:
    book.ok("""
import types
width = 5
settings = types.SimpleNamespace(width=width, eval=int)
def get_width():
    return inner()
def inner():
    return width
class Net:
    def width(self):
        return width
def by_text():
    return eval("width * 2")
def by_parts():
    return vars()["wid" + "th"] if "wid" + "th" in vars() else eval("wid" + "th")
def evaluates():
    return settings.eval()
def with_default(width=width):
    return width
""")
    outcome = book.ok(f'%%distributed --sweep "width=[1, 2]" --ranks 1\n{body}')

    assert ("`width` of --sweep is read neither by the cell nor by a function" in outcome.stderr) != is_read


def test_a_failed_configuration_has_its_exception_in_place_of_its_value(book: Notebook) -> None:
    outcome = book.ok("%%distributed --sweep lr=[0,1] --ranks 1\n1 / lr")

    assert outcome.result == "lr=0: ZeroDivisionError('division by zero')\nlr=1: 1.0"
    assert " 0  failed" in outcome.view
    assert book.fails("%%distributed --sweep lr=[0] --ranks 1\n1 / lr").ename == "ZeroDivisionError"


def test_a_sweep_has_its_chart_while_it_runs_and_as_a_picture_at_its_end(book: Notebook, tmp_path: Path) -> None:
    cell = dedent("""\
        %%distributed --sweep "lr=[0.3,0.1]" --ranks 1 --out charted
        import jupyter_distrib, os, time
        for step in range(5): jupyter_distrib.report(loss=lr / (step + 1))
        while not os.path.exists('go on'): time.sleep(0.01)""")
    book.start(cell)
    alt = "loss, lr=0.1 fell from 0.1 to 0.02 in 4 steps"
    assert book.shows_html(f'alt="{alt}. loss by lr: the best is lr=0.1"')
    (tmp_path / "go on").touch()
    outcome = book.finish()
    assert "image/png" in outcome.kinds
    assert f"{alt}. loss by lr: the best is lr=0.1" in outcome.displays.values()
    assert not any("<img" in html for html in outcome.displays_html.values()), "which exports would show as text"
    if importlib.util.find_spec("pandas") is None:
        assert "pip install pandas" in book.fails("charted.to_pandas()").evalue
        return
    frame = book.ok("charted.to_pandas()[['lr', 'loss', 'state']].values.tolist()").result
    assert frame == "[[0.3, 0.06, 'done'], [0.1, 0.02, 'done']]"


def test_a_sweep_can_be_told_to_stop_at_the_first_failure(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""\
            %%distributed --sweep lr=[0,1,2,3,4,5] --ranks 1 --halt-on-failure
            import time
            while lr: time.sleep(0.01)
            1 / lr""")
    )

    assert outcome.ename == "ZeroDivisionError"
    assert book.ok("{run.state for run in runs()} == {'failed', 'interrupted'}").result == "True"


def test_an_interrupt_stops_a_whole_sweep(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --sweep lr=range(6) --ranks 1
            import time
            while True: time.sleep(0.01)""")
    )
    book.until("queued, place 2")
    book.until("running")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert book.ok("runs(active=True)").result == "[]"
    assert book.ok("%%distributed --ranks 1\n7").result == "rank 0: 7"


@pytest.mark.parametrize(
    ("line", "body", "message"),
    [
        ("--sweep lr", "lr", "--sweep must be NAME=VALUES, such as lr=[1e-3,1e-2]; got 'lr'"),
        ("--sweep lr=[1", "lr", "--sweep must have a list after lr=, such as [1e-3,1e-2]; got '[1'"),
        (
            "--sweep lr=iter(int,1)",
            "lr",
            "--sweep gives more than 10,000 runs: choose fewer values",
        ),
        ("--sweep lr=[]", "lr", "--sweep lr=[] gives no values"),
        ("--sweep \"lr='abc'\"", "lr", "--sweep lr='abc' gives a single str, and each of its parts would be a value"),
        ("--sweep \"lr={'a':1}\"", "lr", "gives a single dict, and each of its parts would be a value: write a list"),
        ("--sweep lr=nope", "lr", "cannot be evaluated (NameError: name 'nope' is not defined)"),
        ("--sweep lr=[1]", "lr = 2", "--sweep gives `lr` its values, and so does the cell: remove its line there."),
        ("--sweep lr=[1] --keep m", "m = lr", "--sweep and --keep exclude each other"),
        ("--halt-on-failure", "1", "--halt-on-failure only applies to a sweep: add --sweep, or leave it out"),
        ("--sweep lr=range(20_000)", "lr", "--sweep gives more than 10,000 runs"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_starts(book: Notebook, line: str, body: str, message: str) -> None:
    assert message in book.fails(f"%%distributed {line}\n{body}").evalue
    assert book.ok("runs()").result == "[]"


def test_a_pool_that_refuses_has_another_to_fall_back_to(tmp_path: Path) -> None:
    settings = tmp_path / "pools.toml"
    settings.write_text(
        'pool = "reserved"\n[pools.reserved]\nkind = "local"\nranks = 1\npython = "/nowhere/python"\n'
        'fallback = "shared"\n[pools.shared]\nkind = "local"\nranks = 2\n'
    )
    with Notebook(tmp_path, {"JUPYTER_DISTRIB_CONFIG": str(settings)}) as book:
        book.ok("%load_ext jupyter_distrib")
        outcome = book.ok(
            dedent("""\
                %%distributed
                print('hello')
                rank""")
        )
        assert outcome.result == "rank 0: 0\nrank 1: 1"
        assert "· on the pool shared, since reserved refused: " in outcome.view
        book.ok("from jupyter_distrib.kernel.session import session")
        numbers = "[run.id.rpartition('-')[2] for run in session.current().history]"
        assert book.ok(numbers).result == "['1']", "a start that was refused is no run"
        book.ok(
            dedent("""\
                from jupyter_distrib import distributed
                @distributed()
                def work(): return 1""")
        )
        assert book.ok("run = work.submit()\nrun.result(), run.pool").result == "(ranks 0-1: 1, 'shared')"
        assert "/nowhere/python" in book.fails("%%distributed --on 0\n1").evalue


def test_a_run_that_falls_back_has_the_variables_for_the_machine_where_it_runs(tmp_path: Path) -> None:
    settings = tmp_path / "pools.toml"
    settings.write_text(
        'pool = "far"\n[pools.far]\nkind = "command"\nhosts = "away"\nstart = "false {host} {python}"\nfallback = "here"\n'
        '[pools.here]\nkind = "local"\nranks = 1\n'
    )
    environment = {"JUPYTER_DISTRIB_CONFIG": str(settings), "GIVEN_AT_START": "1"}
    with Notebook(tmp_path, environment) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                from jupyter_distrib import distributed
                import os""")
        )
        book.ok("os.environ['SET_LATER'] = '2'")
        book.ok(
            "@distributed()\ndef given(): return [os.environ.get(each) for each in ('GIVEN_AT_START', 'SET_LATER')]"
        )
        run = "run = given.submit()\nrun.result()[0], run.pool"
        assert book.ok(run).result == "(['1', '2'], 'here')"


def test_a_restarted_kernel_has_no_queue_and_detached_runs_go_on(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 4 --detach --out job
            import os, time
            while not os.path.exists('go'): time.sleep(0.01)""")
    )
    book.ok("while job.state != 'running': time.sleep(0.005)\nqueued = work.submit(1)")
    assert book.ok("queued.state").result == "'queued'"
    book.ok("%unload_ext jupyter_distrib")

    assert "still queued when" in book.fails("queued.result()").evalue
    assert book.ok("job.done()").result == "False"
    book.ok("open('go', 'w').close()\njob.wait_ended(20)")


def test_a_stop_ends_a_cell_that_awaits_a_run_which_goes_on(book: Notebook) -> None:
    book.start(
        dedent("""\
            run = work.submit(1, 'go')
            print('begun', flush=True)
            await run""")
    )
    book.until("begun")
    book.interrupt()
    assert book.finish(timeout_s=20).ename == "CancelledError"
    assert book.ok("run.done()").result == "False"
    book.ok("open('go', 'w').close()")
    assert book.ok("(await run)[0]").result == "1"
