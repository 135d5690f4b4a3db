"""Every pool keeps the contract of `jupyter_distrib.testing`; what only one pool promises is below."""

from __future__ import annotations

import builtins
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from jupyter_distrib import testing
from jupyter_distrib.errors import PoolError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.pools.inline.cell_interrupts import CellInterrupts
from jupyter_distrib.pools.inline.pool import InlinePool
from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.serialization import payload
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.notebook import ROOT, Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these


@pytest.mark.parametrize("check", testing.checks(detached=True), ids=lambda check: check.__name__)
def test_local(check: testing.Check) -> None:
    check(LocalPool)


@pytest.mark.parametrize("check", testing.checks(), ids=lambda check: check.__name__)
def test_inline(check: testing.Check) -> None:
    check(InlinePool)


# ---------------------------------------------------------------------------------------------------- inline alone


@pytest.fixture
def client() -> Iterator[PoolClient]:
    one = PoolClient(InlinePool())
    yield one
    one.close()


def test_a_cell_leaves_the_process_as_it_was(client: PoolClient, tmp_path: Path) -> None:
    source = f"""
import os, sys
os.environ["RANK"] = "99"; os.environ["NEW"] = "1"; os.environ.pop("PATH")
sys.argv.append("x"); sys.path.insert(0, "/nowhere"); os.chdir({str(tmp_path)!r})
sys.stdout = sys.stderr = None
sys.modules["__main__"].marker = 1
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)
os.rmdir({str(tmp_path)!r}) if rank else None
1 / 0
"""

    def state() -> list[object]:
        streams = [sys.stdin, sys.stdout, sys.stderr, sys.modules["__main__"]]
        places = [dict(os.environ), list(sys.argv), list(sys.path), os.getcwd(), signal.getsignal(signal.SIGINT)]
        return [*streams, *places, identity.is_rank(), identity.cell, dict(payload.kept_values)]

    before = state()
    outcome = client.run(client.group(2), source)
    assert outcome.failure(0).type_name == "ZeroDivisionError"
    assert state() == before


def test_what_is_printed_appears_at_once_and_is_recorded(
    client: PoolClient, capsys: pytest.CaptureFixture[str]
) -> None:
    source = dedent("""\
        import sys
        print('out', rank)
        print('err', rank, file=sys.stderr)
        seen()
        print('after')""")
    seen: list[str] = []
    builtins.seen = lambda: seen.append(sys.stdout._stream.getvalue()[-6:])  # type: ignore[attr-defined]
    try:
        outcome = client.run(client.group(2), source)
    finally:
        del builtins.seen  # type: ignore[attr-defined]
    assert seen == ["out 0\n", "out 1\n"]
    assert capsys.readouterr() == ("out 0\nafter\nout 1\nafter\n", "err 0\nerr 1\n")
    assert (outcome.text(1), outcome.text(1, "stderr")) == ("out 1\nafter\n", "err 1\n")


def test_a_handler_that_keeps_the_stream_goes_on_writing(
    client: PoolClient, capsys: pytest.CaptureFixture[str]
) -> None:
    source = dedent("""\
        import logging, sys
        logging.getLogger('jd').addHandler(logging.StreamHandler(sys.stderr))
        sys.stdout.close()""")
    client.run(client.group(1), source)
    logger = logging.getLogger("jd")
    logger.warning("later")
    assert capsys.readouterr().err == "later\n"
    logger.handlers.clear()
    print("still open")
    assert capsys.readouterr().out == "still open\n"


def test_somebody_can_be_asked(
    client: PoolClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ada\nGrace\n"))
    assert client.run(client.group(2), "input('name? ')").values == {0: "Ada", 1: "Grace"}
    assert capsys.readouterr().out == "name? name? "


def test_the_debugger_works() -> None:
    program = """
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.pools.inline.pool import InlinePool
client = PoolClient(InlinePool())
print(client.run(client.group(1), "secret = 21\\nbreakpoint()\\nsecret").values)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        input="p secret * 2\nw\nc\n",
        env={name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "42" in done.stdout
    stops_at = 2 if sys.version_info >= (3, 13) else 3  # the call itself, or the line after it
    assert f"Cell In[1]({stops_at})<module>()" in done.stdout
    assert "{0: 21}" in done.stdout


def test_an_interrupt_stops_this_rank_and_starts_no_other(client: PoolClient) -> None:
    group = client.group(3)
    stop = dedent("""\
        import os, signal, time
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        rank""")
    outcome = client.run(group, stop)
    assert list(outcome.values) == [0]
    assert [event.rank for event in outcome.of(m.Started)] == [0, 1]
    stopped = outcome.of(m.Interrupted)
    assert [event.rank for event in stopped] == [1, 2]
    assert stopped[0].frames[-1].line in (3, 4)
    assert stopped[1].frames == ()
    assert client.run(group, "rank").values == {0: 0, 1: 1, 2: 2}


def test_it_runs_in_any_thread(client: PoolClient) -> None:
    """Where an interrupt is an exception that arrives at the next line."""
    group, got = client.group(2), []
    source = dedent("""\
        import threading
        mine = threading.get_ident()
        while True:
            pass""")

    def work() -> None:
        client.when(m.Started, lambda run: client.send(m.Stop(run=run)))
        got.append(client.run(group, source))
        got.append(client.run(group, "__import__('threading').get_ident()"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert len(got[0].of(m.Interrupted)) == 2
    assert set(got[1].values.values()) == {thread.ident}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "ddp"}, "--strategy ddp needs ranks that run at the same time"),
        ({"detached": True}, "leave out --detach"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_runs(client: PoolClient, change: dict[str, Any], words: str) -> None:
    group = client.group(2)
    with pytest.raises(PoolError, match=words):
        client.start(group, "print('never')", **change)
    assert isinstance(client.wait(m.Started, m.Ended), m.Ended)
    refused = client.open(1, load_env={"PYTHONHASHSEED": "1"})
    assert isinstance(refused, m.WorkerGroupRefused)
    assert "PYTHONHASHSEED" in refused.reason
    assert client.run(group, "rank").values == {0: 0, 1: 1}


def test_one_cell_at_a_time(client: PoolClient) -> None:
    builtins.nested = lambda: client.start(group, "1")  # type: ignore[attr-defined]
    group = client.group(1)
    try:
        failure = client.finish(client.start(group, "nested()"), (0,)).failure(0)
    finally:
        del builtins.nested  # type: ignore[attr-defined]
    assert (failure.type_name, "one cell at a time" in failure.message) == ("jupyter_distrib.errors.PoolError", True)


def test_it_needs_no_torch() -> None:
    program = dedent("""\
        import sys
        from jupyter_distrib.testing import PoolClient
        from jupyter_distrib.pools.inline.pool import InlinePool
        c = PoolClient(InlinePool())
        print(c.run(c.group(2), '(rank, device)').values, 'torch' in sys.modules)""")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "{0: (0, 'cpu'), 1: (1, 'cpu')} False\n"


def test_options_without_a_meaning_inline_are_named_and_change_nothing(notebook: Notebook) -> None:
    outcome = notebook.ok("%%distributed --pool inline --hang-timeout 5 --check --wait 3\nrank")

    for said in (
        "--hang-timeout has no meaning on the inline pool: its ranks run one after another, so none waits for another",
        "--check has no meaning on the inline pool: its ranks run one after another, so there are no collectives",
        "--wait has no meaning on the inline pool: its ranks are never busy with something else",
    ):
        assert f"{said}\n" in outcome.stdout
    assert outcome.result == "rank 0: 0\nrank 1: 1"
    assert "no meaning" not in notebook.ok("%%distributed --pool inline --timeout 50\nrank").text


def test_in_a_notebook(notebook: Notebook) -> None:
    cell = dedent("""\
        class Net:
            pass
        net, x = Net(), [1]""")
    assert notebook.cell(cell).status == "ok"
    outcome = notebook.cell(
        dedent("""\
            %%distributed --pool inline --ranks 2
            x.append(rank)
            print('hi', rank)
            (x, net)""")
    )
    assert outcome.stdout == "hi 0\nhi 1\n"
    assert outcome.view == "", "what was printed is not drawn again"
    assert outcome.result.startswith("rank 0: ([1, 0], <__main__.Net")
    assert notebook.cell("(x, type(_[1][1]) is Net, __name__)").result == "([1], True, '__main__')"
    cell = dedent("""\
        %%distributed --pool inline
        import asyncio
        await asyncio.sleep(0)
        rank""")
    assert notebook.cell(cell).result == "rank 0: 0\nrank 1: 1"
    cell = dedent("""\
        import asyncio
        await asyncio.sleep(0)
        5""")
    assert notebook.cell(cell).result == "5"
    assert notebook.cell("%%distributed --pool inline --strategy ddp\n1").ename == "PoolError"
    assert notebook.cell("%%distributed --pool inline --keep m\nm = [rank]").status == "ok"
    assert notebook.cell("%%distributed --pool inline\nm").result == "rank 0: [0]\nrank 1: [1]"
    assert notebook.cell("m[1]").result == "[1]"
    notebook.start(
        dedent("""\
        %%distributed --pool inline
        import time
        print('going')
        while True:
            time.sleep(0.01)""")
    )
    notebook.until("going")
    notebook.interrupt()
    outcome = notebook.finish()
    assert outcome.ename == "KeyboardInterrupt"
    assert "line 5" in outcome.traceback
    assert notebook.cell("%%distributed --pool inline\nrank").result == "rank 0: 0\nrank 1: 1"


# ------------------------------------------------------------------------------- interrupts that are not asked for


@pytest.fixture
def ignored() -> Iterator[None]:
    """SIGINT as in a script that a shell has started with `&`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


ENDLESS = """\
import time
while True:
    time.sleep(0.01)"""
ALARM = """\
import signal
def ring(*_):
    raise ERROR('the alarm')
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.05)
"""


@pytest.mark.parametrize("error", ["TimeoutError", "KeyboardInterrupt"])
def test_an_alarm_is_not_an_interrupt(client: PoolClient, error: str) -> None:
    before = signal.getsignal(signal.SIGALRM)
    outcome = client.run(client.group(1), ALARM.replace("ERROR", error) + ENDLESS)
    signal.signal(signal.SIGALRM, before)
    assert outcome.failure(0).type_name == error
    assert not outcome.of(m.Interrupted)


def test_an_alarm_after_a_stop_that_the_cell_has_caught_is_not_an_interrupt(
    client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begun = signal.getsignal(signal.SIGALRM), threading.Event()
    monkeypatch.setattr(builtins, "begun", begun, raising=False)
    thread = client.when(m.Started, lambda run: (begun.wait(30), client.send(m.Stop(run=run))))
    endless = ENDLESS.replace("\n", "\n    ")
    caught = f"try:\n    begun.set()\n    {endless}\nexcept KeyboardInterrupt:\n    pass\n{ALARM}{ENDLESS}"
    outcome = client.run(client.group(1), caught.replace("ERROR", "TimeoutError"))
    thread.join()
    signal.signal(signal.SIGALRM, before)
    assert outcome.failure(0).type_name == "TimeoutError"


def test_an_error_that_an_interrupt_has_become_is_an_interrupt(client: PoolClient) -> None:
    thread = client.when(m.Started, lambda run: client.send(m.Stop(run=run)))
    source = f"try:\n    {ENDLESS.replace(chr(10), chr(10) + '    ')}\nexcept KeyboardInterrupt:\n    raise ValueError from None"
    outcome = client.run(client.group(2), source)
    thread.join()
    assert [event.rank for event in outcome.of(m.Interrupted)] == [0, 1]


def test_a_keyboard_interrupt_of_the_cells_own_is_an_error(client: PoolClient) -> None:
    assert client.run(client.group(1), "raise KeyboardInterrupt").failure(0).type_name == "KeyboardInterrupt"


@pytest.mark.usefixtures("ignored")
@pytest.mark.parametrize("timeout_s", [None, 0.1])
def test_a_run_is_stopped_where_interrupts_are_ignored(client: PoolClient, timeout_s: float | None) -> None:
    thread = None if timeout_s else client.when(m.Started, lambda run: client.send(m.Stop(run=run)))
    outcome = client.run(client.group(2), ENDLESS, timeout_s=timeout_s)
    if thread is not None:
        thread.join()
    assert [event.rank for event in outcome.of(m.Interrupted)] == [0, 1]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.usefixtures("ignored")
def test_an_interrupt_that_is_ignored_stays_ignored(client: PoolClient) -> None:
    source = dedent("""\
        import os, signal
        for _ in range(3): os.kill(os.getpid(), signal.SIGINT)
        rank""")
    assert client.run(client.group(2), source).values == {0: 0, 1: 1}


@pytest.mark.usefixtures("ignored")
def test_an_interrupt_that_is_ignored_between_two_ranks_stops_no_run() -> None:
    guard = CellInterrupts()
    with guard.taken():
        signal.raise_signal(signal.SIGINT)
    assert not guard.asked


def test_an_interrupt_between_two_ranks_stops_the_run_and_one_in_a_cell_keeps_nothing_of_it_alive() -> None:
    guard = CellInterrupts()
    found: list[weakref.ref[object]] = []

    def cell() -> None:
        large = threading.Event()
        found.append(weakref.ref(large))
        signal.raise_signal(signal.SIGINT)

    with guard.taken():
        with pytest.raises(KeyboardInterrupt) as raised, guard.allowed():
            cell()
        assert guard.caused(raised.value)
        del raised
        gc.collect()
        assert found[0]() is None
    other = CellInterrupts()
    with other.taken():
        signal.raise_signal(signal.SIGINT)
    assert other.asked


def test_a_run_is_stopped_where_interrupts_are_blocked(client: PoolClient) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    thread = client.when(m.Started, lambda run: client.send(m.Stop(run=run)))
    outcome = client.run(client.group(2), ENDLESS)
    thread.join()
    assert signal.SIGINT not in signal.sigpending()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert [event.rank for event in outcome.of(m.Interrupted)] == [0, 1]
