"""The crash table: where a rank fails, how it does, and what the cell says of it, whatever pool the rank is in."""

from __future__ import annotations

import re
from textwrap import dedent

from tests.notebook import Notebook, Outcome

HOW = {
    "raise": "raise RuntimeError('boom')",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "sys.exit(3)": "import sys; sys.exit(3)",
    "os._exit(0)": "import os; os._exit(0)",
    "os._exit(7)": "import os; os._exit(7)",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "SIGABRT": "import os; os.abort()",
}
SAYS = {
    "raise": "RuntimeError: boom",
    "sys.exit(3)": "RankLost: Rank {rank} called sys.exit(3).",
    "os._exit(0)": "RankLost: Rank {rank} left the process (os._exit or a C exit, status 0) before it finished.",
    "os._exit(7)": "RankLost: Rank {rank} left the process (os._exit or a C exit, status 7) before it finished.",
    "SIGKILL": "RankLost: Rank {rank} was killed by SIGKILL.",
    "SIGSEGV": "RankLost: Rank {rank} crashed with SIGSEGV (segmentation fault).",
    "SIGABRT": "RankLost: Rank {rank} crashed with SIGABRT (aborted).",
}
WHERE = {
    "in compute": dedent("""\
        import time
        if rank == {rank}:
            {how}
        time.sleep(50)"""),
    "while the others are in a collective": dedent("""\
        import torch, torch.distributed as dist
        if rank == {rank}:
            {how}
        dist.all_reduce(torch.ones(1))"""),
    "in the middle of a loop of collectives": dedent("""\
        import torch, torch.distributed as dist
        for step in range(10**6):
            if rank == {rank} and step == 50:
                {how}
            dist.all_reduce(torch.ones(1))"""),
    "while unpickling an input": dedent("""\
        bomb
        import torch, torch.distributed as dist
        dist.all_reduce(torch.ones(1))"""),
    "while pickling the result": dedent("""\
        class Bomb:
            def __reduce__(self):
                {how}
        Bomb() if rank == {rank} else 0"""),
    "in a thread": dedent("""\
        import threading, time
        def work():
            {how}
        thread = threading.Thread(target=work)
        if rank == {rank}:
            thread.start()
            thread.join()
        else:
            time.sleep(0.2)
        'went on'"""),
}
_BOMB = """\
class Bomb:
    def __setstate__(self, state):
        if __import__('os').environ.get('RANK') == '{rank}':
            {how}
bomb = Bomb()
bomb.x = 1"""
EXCEPTIONS = {
    ("in compute", "sys.exit(0)"),  # this rank has finished, and the others are not waiting for it
    ("while the others are in a collective", "sys.exit(0)"),
    ("in the middle of a loop of collectives", "sys.exit(0)"),
    ("while unpickling an input", "raise"),
    ("while unpickling an input", "sys.exit(0)"),
    ("while pickling the result", "raise"),
    ("while pickling the result", "sys.exit(0)"),
    ("in a thread", "raise"),
    ("in a thread", "sys.exit(0)"),
    ("in a thread", "sys.exit(3)"),
}
"""Tested one by one: there the rank does not fail, or not with these words."""
CASES = [(where, how) for where in WHERE for how in HOW if (where, how) not in EXCEPTIONS]
_OTHERS = [case for case in CASES if case[0] in list(WHERE)[1:]]
FEW = list(
    dict.fromkeys(
        [
            *{how: (where, how) for where, how in _OTHERS}.values(),  # the last place of each cause
            *{where: (where, how) for where, how in _OTHERS}.values(),  # the last cause of each place
        ]
    )
)
"""Each place and each cause, for pools over a connection or an engine that another one has all pairs of."""


def cell(where: str, how: str, rank: int) -> str:
    """The code of the cell in which this rank fails so."""
    return WHERE[where].format(how=HOW[how], rank=rank)


def bomb(how: str, rank: int) -> str:
    """A cell of the notebook that makes the input `bomb`, which this rank cannot unpickle."""
    return _BOMB.format(how=HOW[how], rank=rank)


def run(book: Notebook, where: str, how: str, rank: int, *, line: str) -> Outcome:
    """Have it happen, and check what the cell says; `line` is the magic's."""
    says = SAYS[how].format(rank=rank)
    at_load = where == "while unpickling an input"
    if at_load:
        book.ok(bomb(how, rank))
    outcome = book.fails(f"{line}\n{cell(where, how, rank)}")
    if at_load and how != "sys.exit(3)":  # its process is gone
        says = f"{says.removesuffix('.').removesuffix(',')} while it was loading `bomb`."
    assert says in outcome.traceback, outcome.traceback
    assert outcome.ename == says.partition(":")[0]
    if how in ("SIGSEGV", "SIGABRT"):
        assert re.search(r"It was here:\n(?s:.*)Cell In\[\d+\]", outcome.traceback), outcome.traceback
    return outcome
