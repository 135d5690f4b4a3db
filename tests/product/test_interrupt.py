"""The interrupt button: the cell comes back with a KeyboardInterrupt, ranks and what they keep live on, the next works.

A gloo collective does not end by a signal; the agent cuts its sockets. Real kernels throughout.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook, Outcome
from tests.processes import agents, wait_until_gone

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

SOON_S = 10.0
"""Against hanging, on a machine that may be busy; how fast it is, the benchmarks say."""
KILL_S = 4.0
"""When the user's code does not let go: the ranks are killed after 2 s."""

GOOD = """%%distributed --ranks 2 --strategy ddp
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
int(t)"""
KEEP = """\
%%distributed --ranks 2 --keep kept
import os
kept = [rank * 11]
print('pid', os.getpid(), flush=True)"""
READ = """\
%%distributed --ranks 2 --strategy ddp
import os, torch, torch.distributed as dist
dist.barrier()
print('pid', os.getpid(), flush=True)
kept"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


def pids_in(outcome: Outcome) -> list[int]:
    return [int(pid) for _, pid in sorted(re.findall(r"\[(\d+)\] pid (\d+)", outcome.view))]


def stop(book: Notebook, cell: str, *, presses: int = 1) -> Outcome:
    """Start a cell, press the button once its ranks are at it; the time is that from the button to the end."""
    book.start(cell)
    book.until("[0] ready 0")
    book.until("[1] ready 1")
    pressed_s = time.monotonic()
    book.interrupt()
    more = [press_later(book, 0.05 * press) for press in range(1, presses)]
    outcome = book.finish()
    outcome.wall_s = time.monotonic() - pressed_s
    for thread in more:  # none may meet the next cell
        thread.join()
    return outcome


def press_later(book: Notebook, seconds: float) -> threading.Thread:
    """From a thread, while the test waits for the cell."""
    timer = threading.Timer(seconds, os.kill, (book.pid, signal.SIGINT))
    timer.start()
    return timer


def begin(book: Notebook, line: str, body: str) -> None:
    """Start a cell and return when the kernel is at it."""
    book.start(f"print('begun', flush=True)\nget_ipython().run_cell_magic('distributed', {line!r}, {body!r})")
    book.until("begun")


def assert_stopped(outcome: Outcome, limit_s: float = SOON_S) -> None:
    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert outcome.traceback.count("KeyboardInterrupt") == 1, outcome.traceback
    assert outcome.wall_s < limit_s


# ------------------------------------------------------------------------------- what can be stopped

DDP = "--strategy ddp"
SAY = "print('ready', __import__('os').environ.get('RANK'), flush=True)"
"""With the rank, since equal lines are shown as one."""
HEAD = f"import time, torch, torch.distributed as dist\n{SAY}\n"
WORK = {
    "a Python loop": ("", "while True:\n    pass"),
    "a numpy loop": (
        "",
        dedent("""\
            import numpy
            a = numpy.ones((300, 300))
            while True:
                a @ a"""),
    ),
    "a torch loop": (
        "",
        dedent("""\
            a = torch.ones(300, 300)
            while True:
                a @ a"""),
    ),
    "sleep": ("", "time.sleep(100)"),
    "a lock": (
        "",
        dedent("""\
            import threading
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()"""),
    ),
    "a child process": ("", "import subprocess\nsubprocess.run(['sleep', '100'])"),
    "a shell command": ("", "!sleep 100"),
    "asyncio": ("", "import asyncio\nawait asyncio.sleep(100)"),
    "a data loader with workers": (
        "",
        dedent("""\
            from torch.utils.data import DataLoader, Dataset
            class Slow(Dataset):
                def __len__(self):
                    return 100
                def __getitem__(self, i):
                    time.sleep(1)
                    return i
            for batch in DataLoader(Slow(), batch_size=50, num_workers=1):
                pass"""),
    ),
    "all_reduce": (
        DDP,
        dedent("""\
            if rank == 1:
                time.sleep(100)
            dist.all_reduce(torch.ones(1))"""),
    ),
    "all_reduce, the first rank missing": (
        DDP,
        dedent("""\
            if rank == 0:
                time.sleep(100)
            dist.all_reduce(torch.ones(1))"""),
    ),
    "all_reduce, the missing rank in a loop": (
        DDP,
        dedent("""\
            while rank == 1:
                pass
            dist.all_reduce(torch.ones(1))"""),
    ),
    "barrier": (
        DDP,
        dedent("""\
            if rank == 1:
                time.sleep(100)
            dist.barrier()"""),
    ),
    "recv": (
        DDP,
        dedent("""\
            if rank == 1:
                time.sleep(100)
            dist.recv(torch.ones(1), 1)"""),
    ),
    "recv on both ranks": (DDP, "dist.recv(torch.ones(1), 1 - rank)"),
    "all_gather_object": (
        DDP,
        dedent("""\
            if rank == 1:
                time.sleep(100)
            dist.all_gather_object([None, None], rank)"""),
    ),
    "broadcast_object_list": (
        DDP,
        dedent("""\
            if rank == 0:
                time.sleep(100)
            dist.broadcast_object_list([rank], src=0)"""),
    ),
    "a loop of collectives": (DDP, "while True:\n    dist.all_reduce(torch.ones(1000))"),
    "an asynchronous collective": (
        DDP,
        dedent("""\
            if rank == 1:
                time.sleep(100)
            dist.all_reduce(torch.ones(1), async_op=True).wait()"""),
    ),
    "monitored_barrier": (
        DDP,
        dedent("""\
            from datetime import timedelta
            if rank == 1:
                time.sleep(100)
            dist.monitored_barrier(timeout=timedelta(seconds=100))"""),
    ),
    "a subgroup": (
        DDP,
        dedent("""\
            group = dist.new_group([0, 1])
            if rank == 1:
                time.sleep(100)
            dist.all_reduce(torch.ones(1), group=group)"""),
    ),
    "a group of the user's own": (
        "--strategy none",
        dedent("""\
            dist.init_process_group('gloo')
            if rank == 1:
                time.sleep(100)
            dist.all_reduce(torch.ones(1))"""),
    ),
    "init_process_group without the other rank": (
        "--strategy none",
        dedent("""\
            if rank == 1:
                time.sleep(100)
            dist.init_process_group('gloo')
            dist.barrier()"""),
    ),
    "init_process_group without the first rank": (
        "--strategy none",
        dedent("""\
            if rank == 0:
                time.sleep(100)
            dist.init_process_group('gloo')"""),
    ),
    "DDP training": (
        DDP,
        dedent("""\
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
            while True:
                model(torch.ones(8, 64)).sum().backward()"""),
    ),
    "DDP backward without the other rank": (
        DDP,
        dedent("""\
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
            loss = model(torch.ones(8, 64)).sum()
            if rank == 1:
                time.sleep(100)
            loss.backward()"""),
    ),
    "prepare()d training": (
        DDP,
        dedent("""\
            import jupyter_distrib
            model = torch.nn.Linear(64, 64)
            opt = torch.optim.SGD(model.parameters(), 0.1)
            model, opt = jupyter_distrib.prepare(model, opt)
            while True:
                model(torch.ones(8, 64)).sum().backward()
                opt.step()"""),
    ),
    "FSDP training": (
        DDP,
        dedent("""\
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.device_mesh import init_device_mesh
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
            fully_shard(model, mesh=init_device_mesh('cpu', (2,)))
            while True:
                model(torch.ones(8, 64)).sum().backward()"""),
    ),
}


@pytest.mark.parametrize("what", WORK)
def test_it_stops_and_ranks_and_kept_values_live_on(book: Notebook, what: str) -> None:
    flags, body = WORK[what]
    before = pids_in(book.cell(KEEP))
    assert len(before) == 2

    outcome = stop(book, f"%%distributed --ranks 2 {flags}\n{HEAD}{body}")

    assert_stopped(outcome)
    assert re.search(r"Rank(s)? 0.*Cell In\[\d+\], line \d+", outcome.traceback), outcome.traceback
    if not what.startswith("init_process_group"):  # there torch itself asks the store
        assert "frame #" not in outcome.view, "a stack of torch's C++"
    after = book.cell(READ)
    assert after.result == "rank 0: [0]\nrank 1: [11]", after.text
    assert pids_in(after) == before


def test_ranks_that_wait_for_the_first_one_in_their_very_first_group_live_on(notebook: Notebook) -> None:
    """It holds the store that they meet in, and has not been asked for one."""
    notebook.ok("%load_ext jupyter_distrib")
    before = pids_in(notebook.cell(f"%%distributed --fresh {KEEP.removeprefix('%%distributed ')}"))
    assert len(before) == 2
    outcome = stop(notebook, f"%%distributed --ranks 2\n{HEAD}{WORK['init_process_group without the first rank'][1]}")
    assert_stopped(outcome)
    after = notebook.cell(READ)
    assert after.result == "rank 0: [0]\nrank 1: [11]", after.text
    assert pids_in(after) == before


@pytest.mark.versions
def test_a_collective_is_interrupted_20_times_of_20(book: Notebook) -> None:
    before = pids_in(book.cell(KEEP))
    for turn in range(20):
        what = ("all_reduce", "recv on both ranks", "DDP backward without the other rank", "a loop of collectives")[
            turn % 4
        ]
        outcome = stop(book, f"%%distributed --ranks 2 --strategy ddp\n{HEAD}{WORK[what][1]}")
        assert_stopped(outcome)
        after = book.cell(READ)
        assert after.result == "rank 0: [0]\nrank 1: [11]", after.text
        assert pids_in(after) == before


def test_an_import_that_was_stopped_works_the_next_time(notebook: Notebook, tmp_path: Path) -> None:
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "part.py").write_text("x = 1")
    (package / "__init__.py").write_text(
        dedent(f"""\
            import os, time, slow_package.part
            if 'SLOW' in os.environ:
                {SAY}
                time.sleep(100)
            y = slow_package.part.x""")
    )

    assert_stopped(stop(notebook, "%%distributed --ranks 2 --env SLOW=1\nimport slow_package"))

    outcome = notebook.cell(
        dedent("""\
            %%distributed --ranks 2
            import slow_package
            slow_package.y""")
    )
    assert outcome.result == "ranks 0-1: 1", outcome.text


def test_the_line_each_rank_was_on_is_named(book: Notebook) -> None:
    outcome = stop(
        book,
        (
            f"%%distributed --ranks 2 --strategy ddp\n{HEAD}if rank == 1:\n"
            f"    time.sleep(100)\ndist.all_reduce(torch.ones(1))"
        ),
    )

    assert re.search(r"Rank 0.*line 6: dist.all_reduce\(torch.ones\(1\)\)", outcome.traceback)
    assert re.search(r"Rank 1.*line 5: time.sleep\(100\)", outcome.traceback)
    assert "Stopped by you after" in outcome.traceback


def test_code_that_ends_the_program_when_interrupted_tells_the_line_that_was_interrupted(book: Notebook) -> None:
    outcome = stop(
        book,
        (
            f"%%distributed --ranks 2\n{HEAD}def work():\n    time.sleep(100)\n"
            f"def run():\n    try:\n        work()\n    except KeyboardInterrupt:\n        raise SystemExit(1)\nrun()"
        ),
    )

    assert_stopped(outcome)
    assert "line 5, in work: time.sleep(100)" in outcome.traceback


def test_code_that_ends_the_program_before_the_rank_is_told_why_it_was_interrupted_was_stopped(book: Notebook) -> None:
    """The signal may overtake what explains it; here it surely does."""
    outcome = stop(
        book,
        (
            f"%%distributed --ranks 2\n{HEAD}import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n"
            f"except KeyboardInterrupt:\n    raise SystemExit(1)"
        ),
    )

    assert_stopped(outcome)
    assert "line 6: signal.raise_signal(signal.SIGINT)" in outcome.traceback
    assert "sys.exit" not in outcome.traceback


# ------------------------------------------------------------------------------- what a stopped cell leaves


def test_a_timer_that_a_cell_leaves_running_does_not_reach_the_next(book: Notebook) -> None:
    """Its handler has gone with its cell, so the signal would kill the rank."""
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import signal
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(1000);""")
    )
    cell = dedent("""\
        %%distributed --ranks 2
        import signal
        signal.getitimer(signal.ITIMER_REAL)""")
    timers = book.ok(cell).result
    assert timers == "ranks 0-1: (0.0, 0.0)"


def test_signal_handlers_that_a_cell_leaves_do_not_keep_the_next_from_being_stopped(book: Notebook) -> None:
    """A trainer that ignores SIGINT while it shuts down, and leaves it ignored."""
    before = pids_in(book.cell(KEEP))
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import signal
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: None);""")
    )

    assert_stopped(stop(book, f"%%distributed --ranks 2\n{HEAD}while True:\n    pass"))

    assert pids_in(book.cell(READ)) == before
    handlers = "signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    cell = dedent(f"""\
        %%distributed --ranks 2
        import signal
        {handlers}""")
    assert book.ok(cell).result == "ranks 0-1: ('on_interrupt', True)"


# ------------------------------------------------------------------------------- code that does not let go

STUBBORN = {
    "swallows KeyboardInterrupt": (
        dedent("""\
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass""")
    ),
    "ignores SIGINT": dedent("""\
        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(100)"""),
    "holds the GIL": dedent("""\
        import ctypes
        libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_lock(lock)"""),
}


@pytest.mark.parametrize("how", STUBBORN)
def test_code_that_does_not_let_go_is_killed_and_the_next_cell_is_good(book: Notebook, how: str) -> None:
    outcome = stop(book, f"%%distributed --ranks 2\n{HEAD}{STUBBORN[how]}")

    assert_stopped(outcome, KILL_S)
    assert "did not stop and had to be replaced" in outcome.traceback
    assert book.cell(GOOD).result == "ranks 0-1: 2"


def test_a_second_press_kills_at_once(book: Notebook) -> None:
    assert_stopped(stop(book, f"%%distributed --ranks 2\n{HEAD}{STUBBORN['swallows KeyboardInterrupt']}", presses=2))
    assert book.cell(GOOD).result == "ranks 0-1: 2"


@pytest.mark.parametrize("presses", [2, 5])
def test_many_presses_leave_a_kernel_and_ranks_that_work(book: Notebook, presses: int) -> None:
    outcome = stop(book, f"%%distributed --ranks 2 --strategy ddp\n{HEAD}{WORK['all_reduce'][1]}", presses=presses)

    assert_stopped(outcome)
    assert book.cell(GOOD).result == "ranks 0-1: 2"
    assert book.cell("import signal\nsignal.getsignal(signal.SIGINT) is signal.default_int_handler").result == "True"
    assert stop_plain(book) == "KeyboardInterrupt"


def test_an_agent_that_is_frozen_is_given_up_by_another_press_and_the_next_cell_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "1")
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.start(
            dedent("""\
                %%distributed --ranks 2
                import os
                print('pid', os.getpid(), flush=True)
                while True: pass""")
        )
        book.until("[1] pid")
        (agent,) = agents(runtime)
        ranks = pids_in(book.until("[0] pid"))
        os.kill(agent, signal.SIGSTOP)
        try:
            presses = [press_later(book, after_s) for after_s in (0.0, 0.3, 1.8)]
            stopped = book.finish()
            [thread.join() for thread in presses]
            again = book.ok(GOOD)
            fresh = agents(runtime)
        finally:
            os.kill(agent, signal.SIGCONT)

        assert "gone, because the process that looks" in stopped.text
        assert stopped.ename == "KeyboardInterrupt"
        assert wait_until_gone(ranks, 10) == []
        assert again.result == "ranks 0-1: 2"
        assert wait_until_gone([agent], 60) == []  # it has found that nobody needs it
        assert book.ok(GOOD).result == "ranks 0-1: 2"
        assert agents(runtime) == [pid for pid in fresh if pid != agent]
    for pid in agents(runtime):
        os.kill(pid, signal.SIGTERM)


def test_the_rest_of_a_cell_that_goes_on_after_its_run_was_stopped_can_be_stopped(book: Notebook) -> None:
    body = f"{HEAD}time.sleep(100)"
    book.start(
        dedent(f"""\
            import time
            try:
                get_ipython().run_cell_magic('distributed', '--ranks 2', {body!r})
            except KeyboardInterrupt:
                time.sleep(1.1)
                print('goes on')
                time.sleep(100)""")
    )
    book.until("[0] ready 0")
    book.interrupt()
    book.until("goes on")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"


def stop_plain(book: Notebook) -> str:
    """An ordinary cell can still be stopped. (An interrupt inside ipykernel's `flush` may end in its RuntimeError.)"""
    book.start(
        dedent("""\
            print('ready')
            import time
            time.sleep(100)""")
    )
    book.until("ready")
    book.interrupt()
    return book.finish().ename


def test_a_cell_that_catches_the_interrupt_and_goes_on_to_its_end_returns(book: Notebook) -> None:
    outcome = stop(
        book,
        (
            f"%%distributed --ranks 2\n{HEAD}try:\n    time.sleep(100)\n"
            f"except KeyboardInterrupt:\n    print('saved')\nrank"
        ),
    )

    assert_stopped(outcome)
    assert "[0-1] saved" in outcome.view


# ------------------------------------------------------------------------------- other phases


def test_the_start_of_the_ranks_can_be_stopped(notebook: Notebook) -> None:
    for _ in range(3):
        begin(notebook, "--ranks 8 --fresh", "import time\ntime.sleep(100)")
        notebook.interrupt()
        outcome = notebook.finish()
        assert outcome.ename == "KeyboardInterrupt", outcome
    assert notebook.cell(GOOD).result == "ranks 0-1: 2"


LIBRARY = """
import pathlib, sysconfig
library = pathlib.Path(sysconfig.get_path("purelib")) / "{name}.py"
library.write_text('''
import os, sys, time
assert not hasattr(sys, "{name}"), "registered twice"
sys.{name} = "registered"
print("ready", os.environ.get("RANK"), flush=True)
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    pass
''')
"""
"""A module that a process can import once, as those of torch that register operators."""


def test_a_stop_in_the_midst_of_the_import_of_a_library_leaves_it_whole(book: Notebook) -> None:
    before = pids_in(book.cell(KEEP))
    book.ok(LIBRARY.format(name="import_once", seconds=4))
    try:
        cell = dedent("""\
            %%distributed --ranks 2
            import time, import_once
            time.sleep(100)""")
        assert_stopped(stop(book, cell))
        book.ok("%%distributed --ranks 2\nimport import_once")
    finally:
        book.ok("library.unlink()")
    assert pids_in(book.cell(READ)) == before


def test_a_library_whose_import_does_not_end_is_stopped(book: Notebook) -> None:
    book.ok(LIBRARY.format(name="import_endless", seconds=1000))
    try:
        assert_stopped(stop(book, "%%distributed --ranks 2\nimport import_endless"), limit_s=20)
    finally:
        book.ok("library.unlink()")
    assert book.cell(GOOD).result == "ranks 0-1: 2"


LEFT = """
from jupyter_distrib.kernel.session import session
current = session.current()
group = current.pools._choose(current.settings.options("--ranks 8"))
"""
"""Ranks that were asked for by a cell which an interrupt then ended."""


def test_ranks_that_are_still_starting_are_not_taken_for_another_number(book: Notebook) -> None:
    book.ok(LEFT)

    assert book.cell(GOOD).result == "ranks 0-1: 2"
    book.ok("session.current().pools.close_group(group)")


def test_an_interrupt_while_the_cell_is_sent_stops_its_ranks(book: Notebook) -> None:
    before = pids_in(book.cell(KEEP))
    book.ok(
        dedent("""\
            import signal
            from jupyter_distrib.pools.server_link import LocalNode
            from jupyter_distrib.wire.messages import Execute
            send = LocalNode.send
            def pressed(self, command, *descriptors):
                send(self, command, *descriptors)
                if isinstance(command, Execute):
                    LocalNode.send = send
                    signal.raise_signal(signal.SIGINT)
            LocalNode.send = pressed""")
    )

    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2
            import time
            time.sleep(100)""")
    )

    assert_stopped(outcome)
    assert "Stopped by you after" in outcome.traceback
    assert pids_in(book.cell(READ)) == before


def test_the_packing_of_a_big_value_can_be_stopped(book: Notebook) -> None:
    slow = dedent(f"""\
        class Slow:
            def __reduce__(self):
                {SAY}
                time.sleep(100)
                return int, ()
        Slow()""")
    before = pids_in(book.cell(KEEP))

    assert_stopped(stop(book, f"%%distributed --ranks 2\nimport time\n{slow}"))

    assert pids_in(book.cell(READ)) == before


def test_the_packing_of_the_inputs_can_be_stopped(book: Notebook) -> None:
    book.cell(
        dedent("""\
            import time
            class Slow:
                def __reduce__(self):
                    print('ready')
                    time.sleep(100)
            slow = Slow()""")
    )

    book.start("%%distributed --ranks 2\nslow")
    book.until("ready")
    book.interrupt()

    outcome = book.finish()
    assert outcome.ename == "KeyboardInterrupt"
    assert re.search(r"had begun\.\nIn Cell In\[\d+\], line 5, in __reduce__$", outcome.traceback), outcome.traceback
    assert book.cell(GOOD).result == "ranks 0-1: 2"


UNPLACED = """
import threading
import jupyter_distrib.kernel.{module} as patched
def stopped(*args, **kwargs):
    if threading.current_thread() is not threading.main_thread():  # the news for the sidebar
        return kept(*args, **kwargs)
    patched.{name} = kept
    raise KeyboardInterrupt
stopped.__code__ = stopped.__code__.replace(co_linetable=b'')
kept, patched.{name} = patched.{name}, stopped
"""
"""An interrupt in a place that has no line, as Python 3.11 raises it where a generator begins."""


@pytest.mark.parametrize(
    ("call", "module", "name"),
    [
        ("%%distributed --ranks 2\n1", "settings.find_files", "state"),
        ("%%distributed --ranks 2\n1", "capture.inputs", "pack"),
        ("import jupyter_distrib as d\nd.distributed(ranks=2)(print).distributed()", "capture.inputs", "pack"),
    ],
)
def test_an_interrupt_that_meets_the_kernel_anywhere_is_shown(
    book: Notebook, call: str, module: str, name: str
) -> None:
    book.ok(UNPLACED.format(module=module, name=name))

    outcome = book.cell(call)

    assert outcome.ename == "KeyboardInterrupt", outcome.text
    assert outcome.traceback == "KeyboardInterrupt: Stopped by you before the ranks had begun."
    assert book.cell(GOOD).result == "ranks 0-1: 2"


OTHER_HANDLER = """
import signal
def theirs(number, frame):
    raise KeyboardInterrupt("theirs")
signal.signal(signal.SIGINT, theirs)
body = "import time\\nprint('ready', rank, flush=True)\\ntime.sleep(100)"
try:
    get_ipython().run_cell_magic("distributed", "--ranks 2", body)
except KeyboardInterrupt as error:
    stopped = str(error)
print("put back", signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
"""
"""A cell that gives SIGINT to a library, as the start of a Spark session does, and then runs on ranks."""


def test_a_handler_of_a_library_does_not_keep_stop_from_the_ranks(book: Notebook) -> None:
    outcome = stop(book, OTHER_HANDLER)
    assert outcome.status == "ok", outcome.text
    assert "put back True" in outcome.stdout
    assert book.ok("print(stopped)").stdout.startswith("Stopped by you after")
    assert book.cell(GOOD).result == "ranks 0-1: 2"


PRESS = """
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
"""
"""Presses Stop when this module is looked for."""


@pytest.mark.parametrize("module", ["torch._tensor", "torch.nn.modules.linear", "torch.distributed", "torch.fx"])
def test_a_stop_while_the_kernel_imports_torch_for_a_value_leaves_both_whole(tmp_path: Path, module: str) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(PRESS.format(module=module))
        outcome = book.cell(
            dedent("""\
                %%distributed --ranks 1
                import torch
                torch.ones(2)""")
        )
        assert outcome.ename == "KeyboardInterrupt", outcome.text
        assert outcome.traceback.startswith("KeyboardInterrupt: Stopped by you after")
        assert book.ok("import torch; torch.ones(2).sum().item()").result == "2.0"
        assert book.ok("%%distributed --ranks 1\ntorch.ones(2)").result == "rank 0: tensor([1., 1.])"


def test_the_arrival_of_an_input_can_be_stopped(book: Notebook) -> None:
    book.cell(
        dedent(f"""\
            import time
            class Slow:
                def __setstate__(self, state):
                    {SAY}
                    time.sleep(100)
            slow = Slow()
            slow.x = 1""")
    )

    assert_stopped(stop(book, "%%distributed --ranks 2\nslow"))

    assert book.cell(GOOD).result == "ranks 0-1: 2"


def test_a_stop_at_any_moment_leaves_a_kernel_and_ranks_that_work(book: Notebook) -> None:
    rng = random.Random(50)
    for turn in range(24):
        flags = "--fresh" if turn % 3 == 0 else ""
        begin(
            book,
            f"--ranks 2 --strategy ddp {flags}",
            dedent("""\
                import torch, torch.distributed as dist
                while True:
                    dist.all_reduce(torch.ones(1))"""),
        )
        press_later(book, rng.uniform(0, 0.3))
        assert book.finish(10).ename == "KeyboardInterrupt", turn
        good = book.cell(GOOD)
        assert good.result == "ranks 0-1: 2", (turn, good.text)


def test_a_stop_while_a_thread_waits_for_a_run_leaves_both_alone(notebook: Notebook) -> None:
    notebook.ok(
        dedent("""\
            import threading
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def work():
                import os, time
                while not os.path.exists('go'):
                    time.sleep(0.01)
                return 7
            returned = []
            thread = threading.Thread(target=lambda: returned.append(work.distributed()))""")
    )
    notebook.ok("%%distributed --ranks 1 --keep kept\nkept = 1")
    notebook.start(
        dedent("""\
            thread.start()
            import time
            time.sleep(0.3)
            print('begun', flush=True)
            thread.join()""")
    )
    notebook.until("begun")
    notebook.interrupt()
    assert notebook.finish().ename == "KeyboardInterrupt"
    assert "is still running" in notebook.fails("%%distributed --ranks 1\n1").traceback
    notebook.ok("open('go', 'w').close()\nwhile not returned: time.sleep(0.01)")
    assert notebook.ok("returned[0][0]").result == "7"
    assert notebook.ok("%%distributed --ranks 1\nkept").result == "rank 0: 1"


def test_a_run_past_its_timeout_is_stopped_and_ranks_live_on(book: Notebook) -> None:
    before = pids_in(book.cell(KEEP))

    outcome = book.cell(
        "%%distributed --ranks 2 --strategy ddp --timeout 0.3\nimport time, torch, torch.distributed as dist\n"
        + WORK["all_reduce"][1]
    )

    assert outcome.ename == "RunTimeout"
    assert "line 4: time.sleep(100)" in outcome.traceback
    assert outcome.wall_s < SOON_S
    assert pids_in(book.cell(READ)) == before


STOPPED_LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.zeros(4000, 4)), 4, num_workers=2, persistent_workers=True)
for epoch in range(1000):
    for i, _ in enumerate(loader):
        if i == 20:
            break
    print("epoch", epoch, flush=True)"""


@pytest.mark.slow
def test_a_stop_while_workers_of_loaders_hand_over_batches_shows_none_of_their_tracebacks(book: Notebook) -> None:
    for _ in range(4):
        book.start(f"%%distributed --ranks 2{STOPPED_LOADER}")
        book.until("epoch 3")
        book.interrupt()
        outcome = book.finish()
        assert outcome.ename == "KeyboardInterrupt"
        assert "resource_sharer" not in outcome.text
