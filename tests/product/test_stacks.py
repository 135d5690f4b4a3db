"""Where the ranks are in their Python code, when somebody asks: real kernels, agents and ranks."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Iterator
from textwrap import dedent
from typing import TypeVar

import pytest

from jupyter_distrib.agent.ranks import usage
from jupyter_distrib.pools.inline.pool import InlinePool
from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook, ask
from tests.processes import wait_until

pytestmark = pytest.mark.slow  # each needs ranks, some a kernel

E = TypeVar("E")
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def client() -> Iterator[PoolClient]:
    client = PoolClient(LocalPool())
    yield client
    client.close()


def until(client: PoolClient, run: str, kind: type[E]) -> E:
    """Wait for an event of this kind."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            event = client.seen.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no {kind} of {run}") from None
        if isinstance(event, kind) and event.run == run:
            return event


def seen_of(client: PoolClient, source: str, *, ranks: int = 1, stop: bool = False) -> dict[int, m.StackSeen]:
    """Start a cell, ask for the stacks when each rank has printed something, and end the cell."""
    group = client.group(ranks)
    run = client.start(group, source)
    for _ in range(ranks):
        until(client, run, m.Wrote)
    pids = [worker.pid for worker in group.workers]
    if stop:
        os.kill(pids[0], signal.SIGSTOP)
        assert wait_until(lambda: (used := usage.read(pids[0])) is None or used.stopped)
    client.send(m.AskStacks(run=run))
    try:
        stacks = [until(client, run, m.StackSeen) for _ in range(ranks)]
    finally:
        if stop:
            os.kill(pids[0], signal.SIGCONT)
    client.send(m.Stop(run=run, force=True))
    until(client, run, m.Ended)
    client.close_group(group)
    return {stack.rank: stack for stack in stacks}


WAITS = """\
import json, threading
def inner(text):
    print("there", flush=True)
    return json.loads(text, object_hook=wait)
def wait(found):
    threading.Event().wait()
inner('{}')"""


def test_a_stack_has_the_frames_of_the_cell_and_of_libraries_and_none_of_the_rank(client: PoolClient) -> None:
    stack = seen_of(client, WAITS)[0]

    functions = [frame.function for frame in stack.frames]
    assert functions[:2] == ["<module>", "inner"], functions
    assert functions[functions.index("wait") - 1] == "raw_decode", functions
    assert [frame.line for frame in stack.frames if frame.function in ("<module>", "inner")] == [7, 4]
    assert not any("jupyter_distrib" in frame.filename for frame in stack.frames)
    assert stack.trouble == ""


def test_a_rank_in_c_code_that_holds_the_lock_is_looked_at_from_outside(client: PoolClient) -> None:
    stack = seen_of(client, "def count():\n    return sum(range(10**11))\nprint('there', flush=True)\ncount()")[0]

    assert stack.trouble == "does not answer: C code holds Python's lock"
    assert [(frame.function, frame.line) for frame in stack.frames] == [("<module>", 4), ("count", 2)]


def test_a_stopped_rank_is_reported_as_such_beside_the_stacks_of_the_others(client: PoolClient) -> None:
    stacks = seen_of(
        client,
        dedent("""\
            import time
            print('there', flush=True)
            while True: time.sleep(0.01)"""),
        ranks=2,
        stop=True,
    )

    assert (stacks[0].trouble, stacks[0].frames) == ("is stopped (SIGSTOP)", ())
    assert (stacks[1].trouble, stacks[1].frames[0].line) == ("", 3)


def test_nobody_answers_for_a_run_that_is_over(client: PoolClient) -> None:
    group = client.group(1)
    run = client.start(group, "1")
    until(client, run, m.Ended)
    client.send(m.AskStacks(run=run))

    client.start(group, "1")
    kinds: set[type] = set()
    while m.Ended not in kinds:
        kinds.add(type(client.seen.get(timeout=LIMIT_S)))
    client.close_group(group)
    assert m.StackSeen not in kinds


def test_the_inline_pool_shows_the_rank_that_executes_the_cell() -> None:
    client = PoolClient(InlinePool())
    group = client.group(2)
    source = dedent("""\
        import time
        for _ in range(10**4):
            print('there')
            time.sleep(0.001)""")

    def look(run: str) -> None:
        client.send(m.AskStacks(run=run))
        client.send(m.Stop(run=run))

    thread = client.when(m.Wrote, look)
    run = client.start(group, source)
    stack = until(client, run, m.StackSeen)
    thread.join(LIMIT_S)
    client.close()

    assert stack.rank == 0
    assert stack.frames[0].line in (3, 4), stack


# ---------------------------------------------------------------------------------------------------- the magic

TWO_PLACES = """\
%%distributed --ranks 3 --detach --out job
import time
def load():
    print("there")
    while True: time.sleep(0.01)
def compute():
    print("there")
    while True: time.sleep(0.01)
if rank == 1:
    load()
else:
    compute()"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.fails("job.cancel(force=True)\njob.result(timeout_s=20)")
    shared_notebook.ok("%distributed_pool stop")


def test_the_magic_shows_ranks_at_one_place_together(book: Notebook) -> None:
    book.ok(TWO_PLACES)
    book.ok("import time\nwhile job.record.line_count < 3: time.sleep(0.005)")
    shown = book.ok("%distributed_stack").stdout

    assert shown.count("rank") == 2, shown
    together, alone = shown.split("rank 1\n")
    assert re.fullmatch(r"ranks 0, 2\n.* line 12\n +compute\(\)\n.* line 8, in compute\n +while .*\n", together), shown
    assert re.fullmatch(r".* line 10\n +load\(\)\n.* line 5, in load\n +while True: time.sleep\(0.01\)\n", alone), shown


def test_a_page_that_asks_has_the_stacks_in_the_state_of_the_run(book: Notebook) -> None:
    book.ok(TWO_PLACES)
    book.ok("import time\nwhile job.record.line_count < 3: time.sleep(0.005)")
    run = book.ok("print(job.id)").stdout.strip()

    assert ask(book, op="stacks", run=run)["ok"]
    book.ok("while any(r.stack is None for r in job.record.ranks.values()): time.sleep(0.005)")
    lines = book.ok(
        "from jupyter_distrib.kernel.views.state import state_of\nprint(*state_of(job.record)['ranks'][1]['stack']['lines'])"
    ).stdout
    assert "in load" in lines


def test_a_run_that_has_ended_has_no_stack(shared_notebook: Notebook) -> None:
    shared_notebook.ok("%%distributed --ranks 1\n1")
    assert "has ended: only ranks that execute a cell have a stack" in shared_notebook.fails("%distributed_stack").text
    assert "is one word too many" in shared_notebook.fails("%distributed_stack a b").text
