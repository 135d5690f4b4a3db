"""Cells that damage the process of their own rank: each ends with its value or with a clear sentence, the next cell works,
and Stop ends what does not."""

from __future__ import annotations

import os
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

GOOD = """%%distributed --ranks 2 --strategy ddp
import sys, torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
print("to stdout é", rank)
print("to stderr", rank, file=sys.stderr)
int(t)"""
OUTPUT = ("[0] to stdout é 0", "[1] to stdout é 1", "[0!] to stderr 0", "[1!] to stderr 1")
NULL = "os.open(os.devnull, os.O_RDWR)"
STREAMS = {
    "closes 0": "os.close(0)",
    "closes 1": "os.close(1)",
    "closes 2": "os.close(2)",
    "closes all": "os.closerange(0, 3)",
    "redirects 1": f"os.dup2({NULL}, 1)",
    "redirects 2": f"os.dup2({NULL}, 2)",
    "opens another file as 1": f"os.close(1); kept = {NULL}",
    "closes sys.stdout": "sys.stdout.close()",
    "closes sys.stderr": "sys.stderr.close()",
    "detaches sys.stdout": "sys.stdout.detach()",
    "reconfigures sys.stdout": "sys.stdout.reconfigure(encoding='ascii', errors='strict', line_buffering=False)",
    "takes sys.stdout away": "sys.stdout = None",
    "takes all streams away": "sys.stdin = sys.__stdin__ = sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = None",
}


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


def assert_next_is_good(book: Notebook) -> None:
    outcome = book.ok(GOOD)
    assert outcome.result == "ranks 0-1: 2"
    assert [line for line in OUTPUT if line not in outcome.view] == []


@pytest.mark.parametrize("how", STREAMS)
def test_a_cell_after_one_that_damaged_the_standard_streams_has_its_own(book: Notebook, how: str) -> None:
    cell = dedent("""\
        %%distributed --ranks 2
        import os
        os.getpid()""")
    before = book.ok(cell).result

    cell = dedent(f"""\
        %%distributed --ranks 2
        import os, sys
        {STREAMS[how]}
        1""")
    assert book.ok(cell).result == "ranks 0-1: 1"

    assert_next_is_good(book)
    read = dedent("""\
        %%distributed --ranks 2
        import os, sys
        assert os.read(0, 1) == b'' and not sys.stdin.isatty()
        os.getpid()""")
    assert book.ok(read).result == before


def test_what_a_cell_has_printed_to_a_stream_that_it_closed_is_shown(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""\
            %%distributed --ranks 2
            import os
            os.close(1)
            print('late')""")
    )

    assert outcome.ename == "OSError"
    assert "[0-1] late" in outcome.view
    assert_next_is_good(book)


def test_a_rank_whose_standard_output_has_become_a_connection_is_replaced(book: Notebook) -> None:
    """To give it a new one would close the connection under whoever uses it."""
    cell = dedent("""\
        %%distributed --ranks 2
        import os, socket
        os.close(1)
        kept = socket.socketpair()
        1""")

    outcome = book.fails(cell)

    assert "closed its standard output (file descriptor 1)" in outcome.evalue
    assert_next_is_good(book)


def test_a_rank_whose_connection_a_cell_closes_says_so_and_is_replaced(book: Notebook) -> None:
    # Fresh ranks: gloo's thread would abort the process as soon as it finds its own descriptors closed.
    outcome = book.fails(
        dedent("""\
            %%distributed --ranks 2 --fresh
            import os
            os.closerange(3, 256)
            1""")
    )

    assert outcome.ename == "RankLost"
    assert "was replaced, because the cell closed files that it had not opened" in outcome.evalue
    assert "jupyter_distrib/" not in outcome.text
    assert_next_is_good(book)


@pytest.mark.parametrize(
    "how",
    [
        "import json\njson.JSONEncoder.encode = None",
        "import threading\nthreading.enumerate = lambda: 1 / 0",
        "import time\ntime.monotonic = lambda: 1 / 0",
    ],
)
def test_a_rank_in_which_a_cell_broke_what_ranks_need_says_so_and_is_replaced(book: Notebook, how: str) -> None:
    outcome = book.fails(f"%%distributed --ranks 2\n{how}\n1")

    assert outcome.ename == "RankLost"
    assert "was raised outside of the cell's own code" in outcome.evalue
    assert_next_is_good(book)


BROKEN = {
    "builtins.print": "import builtins; builtins.print = None",
    "builtins.len": "import builtins; del builtins.len",
    "builtins.open": "import builtins; builtins.open = builtins.isinstance = None",
    "__import__": "import builtins; builtins.__import__ = None",
    "json": "import json; json.dumps = json.loads = None",
    "pickle": "import pickle; pickle.dumps = pickle.loads = pickle.Pickler = pickle.Unpickler = None",
    "threading": "import threading; threading.Thread = threading.current_thread = threading.enumerate = None",
    "time": "import time; time.sleep = time.monotonic = time.time = None",
    "socket": "import socket; socket.socket = None",
    "os": "import os; os.close = os.getpid = os.fstat = None; del os.dup2",
    "excepthook": "import sys; sys.excepthook = sys.unraisablehook = None",
    "all modules": "import sys; sys.modules.clear()",
    "torch": "import sys, torch; del sys.modules['torch']",
    "torch and its modules": "import sys, torch\nfor n in [n for n in sys.modules if n.startswith('torch')]: del sys.modules[n]",
    "this package": "import sys\nfor n in [n for n in sys.modules if n.startswith('jupyter')]: del sys.modules[n]",
    "open files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    "memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))",
    "size of files": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))",
    "processes": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))",
    "signals": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])",
    "alarm": "import signal; signal.alarm(1)",
    "running loop": "import asyncio; asyncio._set_running_loop(asyncio.new_event_loop())",
    "trace": dedent("""\
        import sys, threading
        def t(*a): return t
        threading.settrace(t); sys.settrace(t)"""),
    "profile": dedent("""\
        import sys, threading
        def t(*a): return t
        threading.setprofile(t); sys.setprofile(t)"""),
    "blocking": "import os; os.set_blocking(1, False); os.set_blocking(2, False)",
    "recursion": "import sys; sys.setrecursionlimit(60)",
    "faulthandler": "import faulthandler; faulthandler.disable(); faulthandler.dump_traceback_later(0.2, exit=True)",
}
WHOLE = """%%distributed --ranks 2
import asyncio, builtins, faulthandler, json, os, pickle, resource, signal, socket, sys, threading, time, torch
assert len(json.dumps([1])) == 3 and pickle.loads(pickle.dumps(1)) == 1 and callable(sys.excepthook)
assert 'jupyter_distrib' in sys.modules and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert faulthandler.is_enabled() and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert sys.gettrace() is threading.gettrace() is sys.getprofile() is threading.getprofile() is None
assert os.get_blocking(1) and os.get_blocking(2)
async def f(): return 1
assert asyncio.run(f()) == 1
limits = [resource.getrlimit(each)[0] for each in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_AS)]
time.sleep(0.3)
thread = threading.Thread(target=socket.socket)
thread.start(); thread.join()
print(os.getpid(), torch.ones(1).item())
os.getpid(), limits"""


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_cell_has_broken_in_its_process_is_whole_in_the_next(book: Notebook, what: str) -> None:
    before = book.ok(WHOLE).result

    assert book.ok(f"%%distributed --ranks 2\n{BROKEN[what]}\n1").result == "ranks 0-1: 1"

    assert book.ok(WHOLE).result == before
    assert_next_is_good(book)


def test_a_function_that_a_cell_has_replaced_by_its_own_stays(book: Notebook) -> None:
    """A cell's own changes to a module stay on its rank."""
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import time
            time.sleep = lambda seconds: seconds;""")
    )

    cell = dedent("""\
        %%distributed --ranks 2
        import time
        time.sleep(1000)""")
    assert book.ok(cell).result == "ranks 0-1: 1000"
    cell = dedent("""\
        %%distributed --ranks 2 --fresh
        import time
        time.sleep(0) is None""")
    assert book.ok(cell).result == "ranks 0-1: True"


@pytest.mark.parametrize(("limit", "value"), [("NOFILE", 5), ("AS", 1 << 20)])
def test_a_rank_whose_limit_a_cell_has_lowered_for_good_is_replaced(book: Notebook, limit: str, value: int) -> None:
    """Without the right to raise the upper limit again, which root has."""
    unable = DROP if os.geteuid() == 0 else ""
    lower = dedent(f"""\
        import resource
        resource.setrlimit(resource.RLIMIT_{limit}, ({value}, {value}))
        1""")

    outcome = book.fails(f"%%distributed --ranks 2\n{unable}\n{lower}")

    assert f"for good, to {value} (RLIMIT_{limit})" in outcome.evalue
    assert_next_is_good(book)


def test_a_limit_that_leaves_enough_may_be_lowered_for_good(book: Notebook) -> None:
    """A cell that keeps itself from taking all memory of its machine."""
    unable = DROP if os.geteuid() == 0 else ""
    lower = dedent("""\
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 45, 1 << 45))
        1""")

    assert book.ok(f"%%distributed --ranks 2\n{unable}\n{lower}").result == "ranks 0-1: 1"

    assert_next_is_good(book)


DROP = """import ctypes
assert ctypes.CDLL(None).prctl(24, 24, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE
class Head(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
data = (ctypes.c_uint32 * 6)()
head = Head(0x20080522, 0)
assert ctypes.CDLL(None).capget(ctypes.byref(head), data) == 0
data[0] &= ~(1 << 24)
assert ctypes.CDLL(None).capset(ctypes.byref(head), data) == 0"""
