"""What a user sees when a rank raises, leaves or dies: the right rank, the right words, soon; the next cell is good.

The table, (where it happens) x (how it happens) -> what the cell says, is in `crash_cases.py`. Real kernels throughout.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until_gone
from tests.product import crash_cases

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

RANKS = 3
SOON_S = 10.0
"""Against hanging, on a machine that may be busy; how fast it is, the benchmarks say."""

GOOD = f"""%%distributed --ranks {RANKS} --strategy ddp
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
int(t)"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    """The module's kernel, with its ranks up."""
    assert_good(shared_notebook)
    return shared_notebook


def assert_good(book: Notebook) -> None:
    """An ordinary DDP cell works."""
    outcome = book.cell(GOOD)
    assert outcome.result == f"ranks 0-{RANKS - 1}: {RANKS}", outcome.text


def pids_of(book: Notebook) -> list[int]:
    outcome = book.cell(
        dedent(f"""\
            %%distributed --ranks {RANKS}
            import os
            print('pid', os.getpid(), flush=True)""")
    )
    return [int(pid) for _, pid in sorted(re.findall(r"\[(\d+)\] pid (\d+)", outcome.view))]


def ddp(body: str) -> str:
    return f"%%distributed --ranks {RANKS} --strategy ddp\n{body}"


# ------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("where", "how"),
    [pytest.param(where, how, id=f"{how} {where}") for where, how in crash_cases.CASES],
)
def test_the_cell_names_the_rank_and_what_became_of_it_and_the_next_cell_is_good(
    book: Notebook, where: str, how: str
) -> None:
    outcome = crash_cases.run(book, where, how, 1, line=ddp("").strip())

    assert outcome.wall_s < SOON_S
    assert_good(book)


def test_a_rank_that_leaves_with_sys_exit_0_is_done_and_the_others_go_on(book: Notebook) -> None:
    cell = dedent("""\
        import sys
        if rank == 1:
            sys.exit(0)
        rank""")
    outcome = book.cell(ddp(cell))

    assert outcome.status == "ok"
    assert outcome.result == "rank 0: 0\nrank 1: None\nrank 2: 2"
    assert "rank 1: left the cell early with sys.exit()" in outcome.view
    assert_good(book)


@pytest.mark.parametrize("call", ["sys.exit()", "sys.exit(0)", "raise SystemExit"])
@pytest.mark.parametrize("leaver", [0, 1])
def test_ranks_that_wait_for_one_that_has_left_are_stopped_and_told(book: Notebook, call: str, leaver: int) -> None:
    cell = dedent(f"""\
        import sys, torch, torch.distributed as dist
        if rank == {leaver}:
            {call}
        dist.all_reduce(torch.ones(1))""")
    outcome = book.cell(ddp(cell))

    assert outcome.status == "error"
    assert f"Rank {leaver} had left" in outcome.traceback
    assert outcome.wall_s < SOON_S
    assert_good(book)


def test_an_input_that_raises_on_arrival_is_named(book: Notebook) -> None:
    book.cell(crash_cases.bomb("raise", 1))

    outcome = book.cell(ddp(crash_cases.cell("while unpickling an input", "raise", 1)))

    assert "`bomb` cannot be rebuilt on the rank: RuntimeError: boom" in outcome.traceback
    assert outcome.wall_s < SOON_S
    assert_good(book)


def test_a_value_that_cannot_be_pickled_is_replaced_on_its_rank_alone(book: Notebook) -> None:
    outcome = book.cell(ddp(crash_cases.cell("while pickling the result", "raise", 1)))

    assert outcome.status == "ok"
    assert "<not returned:" in outcome.result
    assert "boom" in outcome.result
    assert "ranks 0, 2: 0" in outcome.result
    assert_good(book)


@pytest.mark.parametrize("how", ["raise", "sys.exit(0)", "sys.exit(3)"])
def test_a_thread_that_raises_does_not_end_its_rank(book: Notebook, how: str) -> None:
    outcome = book.cell(ddp(crash_cases.cell("in a thread", how, 1)))

    assert outcome.result == "ranks 0-2: 'went on'"
    assert ("RuntimeError: boom" in outcome.view) == (how == "raise")
    assert_good(book)


@pytest.mark.parametrize("signal", [9, 11, 15])
@pytest.mark.versions
def test_a_rank_that_dies_between_cells_is_replaced_unnoticed(book: Notebook, signal: int) -> None:
    pids = pids_of(book)

    os.kill(pids[1], signal)
    wait_until_gone([pids[1]])

    assert_good(book)
    assert [now == before for now, before in zip(pids_of(book), pids, strict=True)] == [True, False, True]


def test_an_exit_handler_that_hangs_or_crashes_does_not_hold_up_anything(book: Notebook) -> None:
    handlers = "import atexit, time, os\natexit.register(time.sleep, 60) if rank == 0 else atexit.register(os._exit, 7)"
    assert book.cell(ddp(handlers)).status == "ok"

    outcome = book.cell(GOOD.replace("ddp", "ddp --fresh", 1))

    assert outcome.result == "ranks 0-2: 3"
    assert outcome.wall_s < SOON_S


def test_failures_in_a_row_do_not_add_up(book: Notebook) -> None:
    """Ranks that come anew meet ranks whose last attempt at a group was cut off half way."""
    rng = random.Random(0)
    for turn in range(40):
        how = rng.choice(list(crash_cases.SAYS))
        outcome = book.cell(ddp(crash_cases.cell("while the others are in a collective", how, 1)), timeout_s=30)
        assert crash_cases.SAYS[how].format(rank=1) in outcome.traceback, (turn, outcome.text)
    assert_good(book)


# ------------------------------------------------------------------------------- F1: who is the cause

RANDOM_FAILURE = """import torch, torch.distributed as dist
for step in range(100):
    if rank == {rank} and step == {step}:
        raise ValueError(f'rank {{rank}} failed at step {{step}}')
    dist.all_reduce(torch.ones(8))"""


@pytest.mark.versions
def test_the_rank_that_raised_is_named_40_times_of_40(book: Notebook) -> None:
    rng = random.Random(0)
    waits = []
    for _ in range(40):
        rank, step = rng.randrange(RANKS), rng.randrange(30)
        outcome = book.cell(ddp(RANDOM_FAILURE.format(rank=rank, step=step)))
        assert outcome.evalue == f"rank {rank} failed at step {step}", outcome.text
        assert f"(rank {rank} of {RANKS})" in outcome.traceback
        waits.append(outcome.wall_s)
    assert_good(book)
    assert sorted(waits)[37] < SOON_S


def test_values_of_ranks_that_had_finished_are_on_the_exception(book: Notebook) -> None:
    book.cell(
        "try:\n"
        "    get_ipython().run_cell_magic('distributed', '--ranks 3', 'import time\\n"
        "if rank == 2:\\n    time.sleep(0.2)\\n    1 / 0\\nrank * 5')\n"
        "except ZeroDivisionError as error:\n    caught = error"
    )

    assert book.cell("dict(caught.results.items()), caught.rank").result == "({0: 0, 1: 5}, 2)"


# ------------------------------------------------------------------------------- F2, F3: what is shown


def test_the_same_exception_on_8_ranks_is_one_short_traceback(notebook: Notebook) -> None:
    outcome = notebook.cell("%%distributed --ranks 8\n1 / 0")

    assert outcome.ename == "ZeroDivisionError"
    assert outcome.traceback.count("----> 2 1 / 0") == 1
    assert "(ranks 0-7 of 8)" in outcome.traceback
    assert len(outcome.traceback) < 4000


EXCEPTIONS_OF_THE_NOTEBOOK = """
import threading
class WithInit(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f'{code}: {reason}')
        self.code, self.reason = code, reason
class WithLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = (i for i in ())
class WithBadStr(Exception):
    def __str__(self):
        raise RuntimeError('no text today')
class WithTwo(KeyError):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b
from dataclasses import dataclass
@dataclass(frozen=True)
class Frozen(Exception):
    code: int
"""
RAISES = {
    "WithInit": ("WithInit(7, reason='late')", "caught.code == 7 and caught.reason == 'late'", "7: late"),
    "WithLock": ("WithLock('held')", "True", "held"),
    "WithBadStr": ("WithBadStr()", "True", "WithBadStr"),
    "Frozen": ("Frozen(3)", "caught.code == 3", "3"),
    "WithTwo": ("WithTwo('key', 2)", "caught.b == 2", "key"),
}


@pytest.mark.parametrize("name", RAISES)
def test_an_exception_class_of_the_notebook_is_raised_as_that_very_class(shared_notebook: Notebook, name: str) -> None:
    raised, holds, says = RAISES[name]
    shared_notebook.cell(EXCEPTIONS_OF_THE_NOTEBOOK)
    cell = f"%%distributed --ranks 2\nif rank == 1:\n    raise {raised}"

    shown = shared_notebook.cell(cell)
    line, _, body = cell.partition("\n")
    caught = shared_notebook.cell(
        f"try:\n    get_ipython().run_cell_magic('distributed', {line[13:]!r}, {body!r})\n"
        f"except {name} as error:\n    caught = error\ntype(caught) is {name}, {holds}, caught.rank"
    )

    assert says in shown.text
    assert name in {shown.ename, "WithBadStr"}  # of which IPython itself shows the RuntimeError
    assert caught.result == "(True, True, 1)", caught.text


def test_an_exception_that_cannot_come_back_still_has_its_name_and_text(shared_notebook: Notebook) -> None:
    outcome = shared_notebook.cell(
        dedent("""\
            %%distributed --ranks 2
            class Local(Exception):
                def __reduce__(self):
                    raise TypeError('never')
            if rank == 1:
                raise Local('the real message')""")
    )

    assert "Local: the real message" in outcome.traceback
    assert "Cell In[" in outcome.traceback
    assert "line 6" in outcome.traceback


def test_a_system_error_of_python_does_not_end_the_kernel(shared_notebook: Notebook) -> None:
    for name in (
        "GeneratorExit",
        "BaseException",
        "asyncio.CancelledError",
        "ExceptionGroup('several', [ValueError(1)])",
    ):
        outcome = shared_notebook.cell(
            dedent(f"""\
                %%distributed --ranks 2
                import asyncio
                raise {name}""")
        )
        assert outcome.status == "error", name
        assert name.split("(")[0].rpartition(".")[2] in outcome.traceback
        assert "line 3" in outcome.traceback
    assert shared_notebook.cell("1 + 1").result == "2"


# ------------------------------------------------------------------------------- where it was


def number(book: Notebook) -> int:
    """The number of the next cell."""
    shown = re.search(r"Cell In\[(\d+)\], line 1", book.cell("1 / 0").traceback)
    assert shown is not None
    return int(shown[1]) + 1


@pytest.mark.versions
def test_lines_are_numbered_as_the_front_end_shows_them(shared_notebook: Notebook) -> None:
    n = number(shared_notebook)
    outcome = shared_notebook.cell(
        dedent("""\
            %%distributed --ranks 2

            x = 1

            y = x / 0
            z = 2""")
    )

    assert f"Cell In[{n}], line 5" in outcome.traceback
    assert "----> 5 y = x / 0" in outcome.traceback
    assert "      3 x = 1" in outcome.traceback


@pytest.mark.versions
def test_a_function_of_another_cell_is_named_by_that_cell(shared_notebook: Notebook) -> None:
    n = number(shared_notebook)
    shared_notebook.cell(
        dedent("""\
            def divide(x):
                y = 1
                return y / x""")
    )
    outcome = shared_notebook.cell("%%distributed --ranks 2\ndivide(0)")

    assert f"Cell In[{n}], line 3, in divide(...)" in outcome.traceback
    assert "----> 3     return y / x" in outcome.traceback
    assert f"Cell In[{n + 1}], line 2" in outcome.traceback
    assert "ipykernel_" not in outcome.text


def test_where_the_others_were_is_named_by_their_cell_too(shared_notebook: Notebook) -> None:
    n = number(shared_notebook)
    shared_notebook.cell(
        dedent("""\
            def wait():
                import time
                time.sleep(50)""")
    )
    outcome = shared_notebook.cell(
        dedent("""\
            %%distributed --ranks 2
            if rank == 1:
                1 / 0
            wait()""")
    )

    assert f"Rank 0 stopped because of it at Cell In[{n}], line 3, in wait: time.sleep(50)" in outcome.traceback


def test_a_crash_in_a_function_of_another_cell_is_named_by_that_cell(shared_notebook: Notebook) -> None:
    n = number(shared_notebook)
    shared_notebook.cell(
        dedent("""\
            import ctypes
            def crash():
                ctypes.string_at(0)""")
    )
    outcome = shared_notebook.cell("%%distributed --ranks 2\ncrash()")

    assert f"Cell In[{n}], line 3, in crash(...)" in outcome.traceback
    assert "ipykernel_" not in outcome.traceback


def test_the_line_of_a_crash_deep_in_the_users_code_is_found(shared_notebook: Notebook) -> None:
    shared_notebook.cell(
        dedent("""\
            import ctypes
            def dig(depth):
                if depth:
                    dig(depth - 1)
                else:
                    ctypes.string_at(0)""")
    )
    outcome = shared_notebook.cell("%%distributed --ranks 2\ndig(80)")

    assert "line 6, in dig(...)" in outcome.traceback
    assert "more frames" in outcome.traceback
    assert "Extension modules" not in outcome.traceback


def test_a_cell_that_was_run_again_is_named_by_its_last_number(shared_notebook: Notebook) -> None:
    shared_notebook.cell("def again(x):\n    return 1 / x")
    n = number(shared_notebook)
    shared_notebook.cell("def again(x):\n    return 1 / x")

    assert f"Cell In[{n}], line 2, in again(...)" in shared_notebook.cell("%%distributed --ranks 2\nagain(0)").traceback


def test_the_cause_of_an_exception_is_shown_before_it(shared_notebook: Notebook) -> None:
    outcome = shared_notebook.cell(
        dedent("""\
            %%distributed --ranks 2
            try:
                {}['missing']
            except KeyError as error:
                raise RuntimeError('no config') from error""")
    )

    assert outcome.traceback.index("KeyError: 'missing'") < outcome.traceback.index("RuntimeError: no config")


@pytest.mark.parametrize(
    ("how", "holds"),
    [
        ("from error", "(RuntimeError('b'), KeyError('a'), KeyError('a'), True)"),
        ("", "(RuntimeError('b'), None, KeyError('a'), False)"),
        ("from None", "(RuntimeError('b'), None, None, False)"),
    ],
)
def test_an_exception_has_its_cause_in_the_notebook(shared_notebook: Notebook, how: str, holds: str) -> None:
    body = dedent(f"""\
        try:
            raise KeyError('a')
        except KeyError as error:
            raise RuntimeError('b') {how}""")
    outcome = shared_notebook.cell(
        dedent(f"""\
            try:
                get_ipython().run_cell_magic('distributed', '--ranks 2', {body!r})
            except RuntimeError as error:
                caught = error
            caught, caught.__cause__, caught.__context__, caught.__suppress_context__""")
    )
    assert outcome.result == holds, outcome.text


def test_the_line_of_a_module_that_cannot_be_compiled_is_shown(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "misspelt.py").write_text("x = 1\ndef load(:\n    pass\n")
    shown = notebook.fails("%%distributed --ranks 2\nimport misspelt").traceback
    assert "SyntaxError: invalid syntax (misspelt.py, line 2)\n  File " in shown
    assert "    def load(:\n             ^\n" in shown


GROUP = """
from jupyter_distrib import distributed
@distributed(ranks=2)
def fail():
    raise ExceptionGroup('several', [ValueError('a'), TypeError(i for i in 'b')])
"""


def test_code_of_the_notebook_catches_the_exceptions_of_a_group(shared_notebook: Notebook) -> None:
    shared_notebook.ok(GROUP)
    body = "raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])"
    for call in ("fail.distributed()", f"get_ipython().run_cell_magic('distributed', '--ranks 2', {body!r})"):
        outcome = shared_notebook.cell(
            dedent(f"""\
                caught = []
                try:
                    {call}
                except* ValueError as error:
                    caught += error.exceptions + (error,)
                except* TypeError as error:
                    caught += [len(error.exceptions)]
                repr(caught), 'line ' in caught[1].__notes__[0]""")
        )
        assert outcome.result.startswith("(\"[ValueError('a'), ExceptionGroup('several', [ValueError('a')]), 1]"), (
            outcome.text
        )
        assert outcome.result.endswith("True)")
    cell = dedent("""\
        try:
            fail.distributed()
        except ExceptionGroup as error:
            n = error.rank in (0, 1)
        n""")
    assert shared_notebook.cell(cell).result == "True"


@pytest.mark.versions
def test_a_group_that_no_code_can_catch_is_shown_with_ranks_and_lines(shared_notebook: Notebook) -> None:
    shared_notebook.ok(GROUP)
    shared_notebook.ok(
        dedent("""\
            def calls():
                try: pass
                except ValueError: pass
                fail.distributed()""")
    )
    awaited = "async def waits(): fail.distributed()\nawait waits()"
    for call in ("fail.distributed()", "calls()", "[fail.distributed() for _ in range(1)]", awaited):
        shown = shared_notebook.fails(call).traceback
        assert "line 4, in fail(...)" in shown
        assert "  1. ValueError: a" in shown


@pytest.mark.versions
def test_a_traceback_that_passes_through_a_library_shows_the_users_line_and_the_librarys(
    shared_notebook: Notebook,
) -> None:
    outcome = shared_notebook.cell(
        dedent("""\
            %%distributed --ranks 2
            import json
            json.loads('{')""")
    )

    assert outcome.ename == "JSONDecodeError"
    assert "----> 3 json.loads('{')" in outcome.traceback
    assert "jupyter_distrib/" not in outcome.traceback


def test_what_a_dead_rank_wrote_last_is_shown(book: Notebook) -> None:
    cell = dedent("""\
        import os, sys
        if rank == 1:
            print('last words', file=sys.stderr)
            print('unflushed', end='')
            sys.stdout.flush()
            os._exit(7)""")
    outcome = book.cell(ddp(cell))

    assert "    last words" in outcome.traceback
    assert "unflushed" in outcome.view
