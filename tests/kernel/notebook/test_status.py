"""The line magics: what they show, and what they do to the pool. Real kernel, real ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook, ask
from tests.processes import is_alive

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

ON_TWO = "%%distributed --ranks 2\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without ranks and without the names of other tests."""
    yield shared_notebook
    shared_notebook.ok(
        dedent("""\
            %distributed_pool stop
            from jupyter_distrib.kernel.session import session as _s
            _s.current().choices.sizes.clear()""")
    )
    shared_notebook.forget()


def pids(book: Notebook) -> list[int]:
    return [
        int(pid)
        for pid in book.ok(
            "print(*[r.pid for r in get_ipython().run_line_magic('distributed_status', '').ranks])"
        ).stdout.split()
    ]


# ---------------------------------------------------------------------------------------------------- status


def test_the_status_shows_ranks_kept_values_and_runs_as_text(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep model\nmodel = 1")
    book.fails(ON_TWO + "1 / 0")

    text = book.ok("%distributed_status").result

    assert text.startswith("pool local, strategy none; agent ")
    assert re.search(r"^model: int on ranks 0-1 \(local pool, kept since Cell In\[\d+\]\)$", text, re.MULTILINE)
    assert re.search(r"^rank +state +device +pid +memory +load +pool$", text, re.MULTILINE)
    assert re.search(r"^ *1 +idle +cpu +\d+ +\d+\.\d MB +local$", text, re.MULTILINE)
    assert re.search(r"^\w+-\d+ +Cell In\[\d+\] +failed +\d", text, re.MULTILINE)
    assert text.index("failed") < text.index("done")


def test_the_status_shows_what_a_run_uses_and_has_used(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            held = bytearray(60_000_000)
            while True: pass""")
    )
    seen = "import time\nwhile not job.record.peak_rss_bytes: time.sleep(0.05)"
    text = book.ok(f"{seen}\nget_ipython().run_line_magic('distributed_status', '')").result
    assert re.search(r"^ *1 +running +cpu +\d+ +\d+\.\d MB +\d+ % cpu +local$", text, re.MULTILINE)
    book.ok("job.cancel()\nwhile not job.done(): time.sleep(0.05)")
    text = book.ok("%distributed_status").result
    assert re.search(r" interrupted +[\d.]+ s +2 +\d+\.\d MB$", text, re.MULTILINE)


def test_a_run_that_was_refused_is_not_done(book: Notebook) -> None:
    book.fails("%%distributed --pool inline --strategy ddp\n1")
    (row,) = re.findall(r"^\S+ +Cell In\S+ +(\S+)", book.ok("%distributed_status").result, re.MULTILINE)[:1]
    assert row == "refused"
    assert ask(book, op="overview")["overview"]["runs"][0]["state"] == "refused"
    book.ok("%distributed_pool stop inline")


def test_the_status_shows_itself_as_html(book: Notebook) -> None:
    book.ok(ON_TWO + "1;")

    html = book.ok("%distributed_status").result_html

    assert "<b>rank</b></td>" in html
    assert ">idle</td>" in html


def test_the_status_is_a_value(book: Notebook) -> None:
    book.ok(ON_TWO + "import os\nos.getpid();")
    book.ok("status = get_ipython().run_line_magic('distributed_status', '')")

    assert book.ok("[r.rank for r in status.ranks], status.pool, status.runs[-1].state").result == (
        "([0, 1], 'local', 'done')"
    )
    assert all(map(is_alive, pids(book)))


def test_the_status_without_ranks_says_what_starts_them(book: Notebook) -> None:
    book.ok("%distributed_pool stop")

    assert "No ranks are up; the next %%distributed cell starts them." in book.ok("%distributed_status").result


def test_the_status_shows_a_detached_run_that_goes_on(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            print('up', flush=True)
            while True: time.sleep(0.01)""")
    )

    text = book.ok("%distributed_status").result

    assert re.search(r"^\w+-\d+ +Cell In\[\d+\] +running ", text, re.MULTILINE)
    assert re.search(r"^ *0 +running +cpu ", text, re.MULTILINE)
    book.fails("job.cancel()\njob.result(timeout_s=20)")


def test_the_status_shows_the_ranks_of_another_notebook(book: Notebook, tmp_path: Path) -> None:
    with Notebook(tmp_path) as other:
        other.ok("%load_ext jupyter_distrib")
        other.ok("%%distributed --ranks 3 --keep theirs\ntheirs = 1")

        text = book.ok("%distributed_status").result

    assert re.search(rf"^kernel {other.pid} +3 +idle +theirs$", text, re.MULTILINE), text


# ---------------------------------------------------------------------------------------------------- the pool


def test_the_pools_are_listed_with_what_is_up(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep model\nmodel = 1")

    outcome = book.ok("%distributed_pool")

    head, *rows = [re.split(r" {2,}", line) for line in outcome.result.splitlines()]
    assert head == ["pool", "kind", "in use", "ranks", "keeps", "from"]
    assert ["local", "local", "yes", "2 CPU", "model", "built in"] in rows
    assert ">local</td>" in outcome.result_html
    assert book.ok("%distributed_pool list").result == outcome.result


def test_ranks_can_be_started_before_a_cell_asks(book: Notebook) -> None:
    assert "3 CPU" in book.ok("%distributed_pool start --ranks 3").result
    before = pids(book)

    assert book.ok("%%distributed\nworld_size").result == "ranks 0-2: 3"
    assert pids(book) == before


def test_stopped_ranks_are_gone(book: Notebook) -> None:
    book.ok(ON_TWO + "1;")
    before = pids(book)
    assert len(before) == 2

    assert "none up" in book.ok("%distributed_pool stop").result

    assert pids(book) == []
    book.ok(ON_TWO + "1;")
    assert not set(before) & set(pids(book))


def test_restarted_ranks_are_new_processes_of_the_same_number(book: Notebook) -> None:
    book.ok("%distributed_pool start --ranks 3")
    before = pids(book)

    assert "3 CPU" in book.ok("%distributed_pool restart").result

    assert len(pids(book)) == 3
    assert not set(before) & set(pids(book))


def test_a_restart_keeps_the_number_that_a_cell_asked_for(book: Notebook) -> None:
    book.ok("%%distributed --ranks 3\n1;")

    assert "3 CPU" in book.ok("%distributed_pool restart").result


def test_the_pool_is_resized(book: Notebook) -> None:
    book.ok(ON_TWO + "1;")

    assert "4 CPU" in book.ok("%distributed_pool resize 4").result
    assert book.ok("%%distributed\nworld_size").result == "ranks 0-3: 4"
    assert "2 CPU" in book.ok("%distributed_pool resize --ranks 2").result
    assert book.ok("%%distributed\nworld_size").result == "ranks 0-1: 2"


@pytest.mark.parametrize("line", ["start --ranks 5000", "resize 5000"])
def test_a_size_that_is_refused_is_not_asked_for_again(book: Notebook, line: str) -> None:
    book.ok("%distributed_pool resize --ranks 2")

    assert "5000" in book.fails(f"%distributed_pool {line}").evalue
    assert book.ok("%%distributed\nworld_size").result == "ranks 0-1: 2"


def test_another_pool_can_be_used(book: Notebook) -> None:
    try:
        assert re.search(r"^inline +inline +yes", book.ok("%distributed_pool use inline").result, re.MULTILINE)
        assert book.ok("import os\nmine = os.getpid()").status == "ok"
        cell = dedent("""\
            %%distributed --ranks 2
            import os
            os.getpid() == mine""")
        assert book.ok(cell).result == "ranks 0-1: True"
    finally:
        book.ok("%distributed_pool stop inline")
        book.ok("%distributed_pool use local")
    assert book.ok(ON_TWO + "import os\nos.getpid() == mine").result == "ranks 0-1: False"


def test_fresh_takes_new_processes(book: Notebook) -> None:
    book.ok(ON_TWO + "1;")
    before = pids(book)

    book.ok("%%distributed --ranks 2 --fresh\n1;")

    assert not set(before) & set(pids(book))


# ---------------------------------------------------------------------------------------------------- logs


def test_the_log_of_the_last_run_is_complete(book: Notebook) -> None:
    book.ok(ON_TWO + "for i in range(1000): print('line', i, 'of', rank)")

    lines = book.ok("%distributed_logs").stdout.splitlines()

    assert lines[:2] == ["--- rank 0", "line 0 of 0"]
    assert len(lines) == 2002
    assert lines[-1] == "line 999 of 1"


def test_the_log_of_one_rank_of_an_earlier_run(book: Notebook) -> None:
    book.ok(ON_TWO + "print('first of', rank)")
    run = book.ok("get_ipython().run_line_magic('distributed_status', '').runs[-1].run").result.strip("'")
    book.ok(ON_TWO + "print('second')")

    assert book.ok(f"%distributed_logs {run} --rank 1").stdout == "first of 1\n"
    assert book.ok(f"%distributed_logs {run.partition('-')[2]} --rank 0").stdout == "first of 0\n"
    assert book.ok("%distributed_logs --rank 0").stdout == "second\n"


def test_the_log_of_the_run_that_a_name_holds(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out values
            print('of values')
            rank""")
    )
    book.ok("%%distributed --ranks 2 --detach --out job\nprint('of job')")
    book.ok("job.result()")
    book.ok(f"{ON_TWO}print('last')")

    assert book.ok("%distributed_logs values --rank 1").stdout == "of values\n"
    assert book.ok("%distributed_logs job --rank 1").stdout == "of job\n"
    assert re.search(r"run \S+ has ended", book.fails("%distributed_stack job").evalue)


def test_a_rank_without_a_log_is_an_error_that_names_those_there_are(book: Notebook) -> None:
    book.ok(ON_TWO + "print('here')")

    outcome = book.fails("%distributed_logs --rank 7")

    assert outcome.ename == "PoolError"
    assert "ranks 0-1" in outcome.traceback


def test_logs_say_why_they_are_empty(book: Notebook) -> None:
    book.ok(f"{ON_TWO}if rank == 0: print('here')")
    assert re.fullmatch(r"Rank 1 of run \S+ has printed nothing\.\n", book.ok("%distributed_logs --rank 1").stdout)
    book.ok(
        dedent("""\
            import jupyter_distrib
            file = jupyter_distrib.runs()[-1].log_file(0)
            open(file, 'w').close()""")
    )
    told = r"Rank 0 of run \S+ printed more, but the log is empty or gone: \S+rank0\.log\n"
    assert re.fullmatch(told, book.ok("%distributed_logs").stdout)
    book.ok(f"{ON_TWO}pass")
    assert re.fullmatch(r"Run \S+ has printed nothing\.\n", book.ok("%distributed_logs").stdout)


def test_there_is_no_log_before_the_first_run(tmp_path: Path) -> None:
    with Notebook(tmp_path) as other:
        other.ok("%load_ext jupyter_distrib")
        assert other.fails("%distributed_logs").traceback == "PoolError: nothing has run yet."


def test_the_log_of_a_run_that_goes_on_can_be_read(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 1 --detach --out job
            import time
            print('so far')
            while True: time.sleep(0.01)""")
    )
    wait = "import time\nwhile 'so far' not in job.logs(0): time.sleep(0.005)"
    book.ok(wait)

    assert book.ok("%distributed_logs").stdout == "--- rank 0\nso far\n"
    book.fails("job.cancel()\njob.result(timeout_s=20)")


def test_a_detached_run_can_be_attached_again(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            print('shown again')
            rank + 1""")
    )
    book.ok("job.result(timeout_s=20)")

    outcome = book.ok(
        "again = get_ipython().run_line_magic('distributed_attach', job.id)\nlist(again.result(timeout_s=20))"
    )

    assert outcome.result == "[1, 2]"


def test_pools_that_nothing_can_be_had_from_are_not_listed(book: Notebook) -> None:
    listed = {line.split()[0] for line in book.ok("%distributed_pool").result.splitlines()[1:]}
    assert {"local", "inline"} <= listed
    assert not {"ssh", "command"} & listed
    book.ok("%distributed_pool add box --kind ssh --hosts nowhere")
    assert "box" in book.ok("%distributed_pool").result
    book.ok("%distributed_pool remove box")
