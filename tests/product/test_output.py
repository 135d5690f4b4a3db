"""What ranks write: all of it in the log, a part of it under the cell, none of it under another cell."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these


BROKEN = """
from jupyter_distrib.kernel.notebook.live_view import LiveView
from jupyter_distrib.kernel.record.record import RunRecord
write, draw = RunRecord._write, LiveView.draw
def fail(*_, **__): raise ValueError("as it is")
RunRecord._write = fail
"""
"""Makes what ranks print impossible to record."""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


def _log(book: Notebook, rank: int) -> bytes:
    """The log of the last run, as it lies on disk."""
    folder = book.cell(
        "from jupyter_distrib.kernel.session import session as _s; print(_s.current().history[-1].record.log_directory)"
    ).stdout.strip()
    return (Path(folder) / f"rank{rank}.log").read_bytes()


def _run(book: Notebook) -> str:
    """Id of the last run."""
    return book.ok(
        "from jupyter_distrib.kernel.session import session as _s; print(_s.current().history[-1].id)"
    ).stdout.strip()


def test_lines_are_labelled_and_in_order(book: Notebook) -> None:
    outcome = book.cell("%%distributed --ranks 2\nfor i in range(5): print('line', i, 'of', rank)")

    for rank in range(2):
        own = [line for line in outcome.view.splitlines() if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] line {i} of {rank}" for i in range(5)]


def test_equal_lines_of_all_ranks_are_one_line(book: Notebook) -> None:
    outcome = book.cell("%%distributed --ranks 2\nprint('the same')")

    assert "[0-1] the same" in outcome.view


def test_output_comes_live(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --ranks 2
            import time
            print('early', flush=True)
            time.sleep(600)""")
    )
    book.until("early")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "write",
    [
        "print('unfinished', end='')",
        "import sys; sys.stdout.buffer.write(b'unfinished')",
        "import sys; sys.stderr.write('unfinished')",
        "import ctypes; ctypes.CDLL(None).printf(b'unfinished')",
    ],
)
def test_a_line_without_its_end_comes_live(book: Notebook, write: str) -> None:
    book.start(
        dedent(f"""\
            %%distributed --ranks 1
            import time
            {write}
            time.sleep(600)""")
    )
    try:
        book.until("unfinished", timeout_s=10)
    finally:
        book.interrupt()
        outcome = book.finish()

    assert outcome.ename == "KeyboardInterrupt"
    assert outcome.view.count("unfinished") == 1


def test_c_code_and_child_processes_are_heard(book: Notebook) -> None:
    outcome = book.cell(
        "%%distributed --ranks 1\nimport ctypes, os, subprocess, sys\nlibc = ctypes.CDLL(None)\n"
        "libc.printf(b'from C\\n')\nsubprocess.run(['echo', 'from a child'])\nos.write(1, b'from os.write\\n')\n"
        "os.write(2, b'to stderr\\n')\nprint('also stderr', file=sys.stderr)"
    )

    for text in ("from C", "from a child", "from os.write", "to stderr", "also stderr"):
        assert text in outcome.view


@pytest.mark.parametrize("lines", [20_000, 200_000])
def test_a_flood_is_complete_in_the_log_and_short_under_the_cell(book: Notebook, lines: int) -> None:
    began_s = time.monotonic()
    outcome = book.cell(f"%%distributed --ranks 2\nfor i in range({lines}): print('line', i, rank)")
    took_s = time.monotonic() - began_s
    wanted = hashlib.sha256()
    for i in range(lines):
        wanted.update(f"line {i} 1\n".encode())

    assert hashlib.sha256(_log(book, 1)).digest() == wanted.digest()
    assert outcome.messages <= 30 + 10 * took_s  # ten in a second, however many lines there are
    assert len(outcome.view.splitlines()) < 200
    assert "not shown here" in outcome.view


def test_a_hundred_megabytes_through_the_descriptor_do_not_block(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 1
            import os
            for _ in range(100): os.write(1, b'x' * 2**20)
            'done'""")
    )

    assert outcome.result == "rank 0: 'done'"
    assert len(_log(book, 0)) == 100 * 2**20
    assert outcome.size_bytes < 2**20


def test_endless_output_can_be_stopped(book: Notebook) -> None:
    book.start("%%distributed --ranks 4\nwhile True: print('and on and on')")
    book.until("and on")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert book.cell("%%distributed --ranks 4\nrank").status == "ok"


def test_broken_bytes_arrive_exactly_in_the_log_and_harmlessly_under_the_cell(book: Notebook) -> None:
    data = b"\xff\xfe broken \x00 nul \x1b[31mred\x1b[0m <script>alert(1)</script>\n"
    outcome = book.cell(
        dedent(f"""\
            %%distributed --ranks 1
            import os
            os.write(1, {data!r})
            None""")
    )

    assert _log(book, 0) == data
    assert "\x1b" not in outcome.view
    assert "\x00" not in outcome.view
    assert "red" in outcome.view


def test_a_bar_is_one_state_and_not_many_lines(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2
            from tqdm import tqdm
            for i in tqdm(range(50), desc='epoch'): pass
            print('end')""")
    )

    assert "epoch 50/50" in outcome.view
    assert not re.search(r"^\[.*\] epoch", outcome.view, re.MULTILINE)


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("name", ["tqdm", "trange", "tqdm_notebook", "tnrange"])
def test_a_bar_of_tqdms_notebook_module_is_progress_too(book: Notebook, name: str, earlier: bool) -> None:
    load = f"from tqdm.notebook import {name}"
    if earlier:
        book.ok(load)
        load = ""
    steps = "50" if "range" in name else "range(50)"
    book.start(
        dedent(f"""\
            %%distributed --ranks 2
            {load}
            import time
            for i in {name}({steps}, desc='epoch', ncols='100%', display=True, mininterval=0):
                if i == 25:
                    time.sleep(600)""")
    )
    try:
        book.until("epoch 25/50", timeout_s=30)
    finally:
        book.interrupt()
        outcome = book.finish()

    assert outcome.ename == "KeyboardInterrupt"
    assert not re.search(r"^\[.*\] epoch", outcome.view, re.MULTILINE)


def test_pieces_of_lines_never_mix(book: Notebook) -> None:
    outcome = book.cell(
        "%%distributed --ranks 4\nimport os\nfor i in range(20):\n    for c in f'{rank}' * 30 + '\\n': os.write(1, c.encode())"
    )

    shown = [line.partition("] ")[2] for line in outcome.view.splitlines() if line.startswith("[")]
    assert shown
    assert all(len(set(line)) == 1 and len(line) == 30 for line in shown)


def test_a_thread_that_goes_on_prints_into_its_own_runs_log(book: Notebook) -> None:
    book.cell(
        dedent("""\
            %%distributed --ranks 1
            import threading, time
            def late():
                while not stop.is_set():
                    print('from the late thread', flush=True)
                    time.sleep(0.01)
            stop = threading.Event()
            threading.Thread(target=late, daemon=True).start()
            time.sleep(0.05)""")
    )
    run = _run(book)
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 1
            import time
            print('mine')
            time.sleep(0.5)
            print('mine too')""")
    )

    assert "late thread" not in outcome.view
    assert "mine too" in outcome.view
    assert b"late thread" not in _log(book, 0)
    assert book.cell(f"%distributed_logs {run}").stdout.count("late thread") > 20
    book.cell("%distributed_pool stop")


STRAY = """%%distributed --ranks 2
import ctypes, threading, time
def late(began_s=time.monotonic()):
    write = ctypes.CDLL(None).write
    while rank == 0:
        if time.monotonic() > began_s + 2.5:
            write(1, b"very late\\n", 10)
        time.sleep(0.02)
print("begun")
threading.Thread(target=late, daemon=True).start()
"""


def test_c_code_that_goes_on_writing_is_said_to_be_mixed_with_the_next_cells_output(book: Notebook) -> None:
    book.ok(STRAY)
    assert wait_until(lambda: b"very late" in _log(book, 0))

    first, second = (book.ok("%%distributed --ranks 2\nprint('mine')").view for _ in range(2))
    assert "rank 0: C code or a thread of an earlier cell is still writing to this rank's standard output" in first
    assert "rank 1: C code" not in first
    assert "C code or a thread" not in second  # they follow one another at once
    book.cell("%distributed_pool stop")


def test_a_log_handler_of_an_earlier_cell_writes_live_into_the_cell_that_logs(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 1
            import logging
            logging.basicConfig(level=logging.INFO, force=True)""")
    )
    book.start(
        dedent("""\
            %%distributed --ranks 1
            import logging, time
            logging.info('of the second cell')
            time.sleep(600)""")
    )
    try:
        book.until("INFO:root:of the second cell", timeout_s=10)
    finally:
        book.interrupt()
        book.finish()

    assert _log(book, 0) == b"INFO:root:of the second cell\n"
    book.ok("%distributed_pool stop")


def test_a_late_thread_logs_into_its_own_runs_log(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 1
            import logging, threading
            logging.basicConfig(level=logging.INFO, force=True)
            go, done = threading.Event(), threading.Event()
            def late():
                go.wait()
                logging.info('from the late thread')
                done.set()
            threading.Thread(target=late, daemon=True).start()
            logging.go, logging.done = go, done""")
    )
    run = _run(book)
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 1
            import logging
            logging.go.set()
            logging.done.wait()
            logging.info('mine')""")
    )

    assert outcome.view.count("INFO:root:") == 1
    assert "INFO:root:mine" in outcome.view
    assert "INFO:root:from the late thread" in book.ok(f"%distributed_logs {run}").stdout
    book.ok("%distributed_pool stop")


@pytest.mark.parametrize(
    "start",
    [
        "import subprocess\nsubprocess.Popen(['sh', 'wait.sh'])",
        "import os\nif os.fork() == 0: os.execlp('sh', 'sh', 'wait.sh')",
        "!sh wait.sh &",
        "!setsid sh wait.sh &",
    ],
)
def test_a_child_process_that_goes_on_writes_into_its_own_runs_log(book: Notebook, tmp_path: Path, start: str) -> None:
    book.ok(f"import os; os.chdir({str(tmp_path)!r})")
    (tmp_path / "wait.sh").write_text(
        "echo begun; while [ ! -e go ]; do sleep 0.01; done\necho from the child; echo to stderr >&2; : > done; cat fifo"
    )
    os.mkfifo(tmp_path / "fifo")
    book.ok("%%distributed --ranks 1\nprint('first')\n" + start)
    run = _run(book)
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 1
            import os, pathlib, subprocess, time
            pathlib.Path('go').touch()
            while not os.path.exists('done'): time.sleep(0.01)
            print('mine')
            subprocess.run(['echo', 'my own child'])""")
    )

    assert _log(book, 0) == b"mine\nmy own child\n"
    assert "from the child" not in outcome.view
    book.ok(f"while 'to stderr' not in (log := _s.current().find_run({run!r}).logs()): pass\nprint(log)")
    assert "from the child" in book.ok("print(log)").stdout
    book.ok("%distributed_pool stop")


def test_what_a_killed_rank_wrote_is_not_lost(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 1
            import os
            print('last words')
            os.kill(os.getpid(), 9)""")
    )

    assert outcome.ename == "RankLost"
    assert "last words" in outcome.view


def test_logs_of_one_rank_or_of_all(book: Notebook) -> None:
    book.cell("%%distributed --ranks 2\nprint('I am', rank)")

    assert book.cell("%distributed_logs --rank 1").stdout == "I am 1\n"
    everything = book.cell("%distributed_logs").stdout
    assert "I am 0" in everything
    assert "I am 1" in everything


def test_the_kernel_does_not_grow_with_what_ranks_print(book: Notebook) -> None:
    rss = "print(int(open('/proc/self/statm').read().split()[1]) * 4096)"
    book.cell("%%distributed --ranks 2\nfor i in range(1000): print(i)")
    before = int(book.cell(rss).stdout)
    book.cell("%%distributed --ranks 2\nfor i in range(100_000): print('a line that is some fifty characters long', i)")

    assert int(book.cell(rss).stdout) - before < 50 * 2**20


def test_output_that_cannot_be_recorded_or_drawn_costs_the_ranks_nothing(book: Notebook) -> None:
    book.ok(BROKEN)
    try:
        outcome = book.ok(
            dedent("""\
                %%distributed --ranks 2
                print('hello'); print('again', flush=True)
                rank""")
        )
        unrecorded = outcome.text
        assert outcome.result == "rank 0: 0\nrank 1: 1"
        book.ok("RunRecord._write = write; LiveView.draw = fail")
        outcome = book.ok("%%distributed --ranks 2\nrank + 1")
    finally:
        book.ok("RunRecord._write, LiveView.draw = write, draw")
    assert "some of its output cannot be shown (ValueError: as it is)" in unrecorded
    assert outcome.result == "rank 0: 1\nrank 1: 2"
    assert "ends here, and the cell goes on: ValueError: as it is" in outcome.stderr
    assert "hello" in book.ok("%%distributed --ranks 2\nprint('hello')").text
