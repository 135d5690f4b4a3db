"""`%%distributed_setup` on ranks of other machines: one story for all pools."""

from __future__ import annotations

from tests.notebook import Notebook

COUNTED = """\
%%distributed_setup counted
import sys
sys.times_set_up = getattr(sys, 'times_set_up', 0) + 1"""
READ = "import os, sys\ngetattr(sys, 'times_set_up', 0)"
LOSE = "import os, signal\nif rank == {last} and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), signal.SIGKILL)"
BAD = """\
%%distributed_setup bad
import os

if 'RANK' in os.environ:
    {}['nothing']"""
BAD_ON_ONE = """\
%%distributed_setup bad
import os
if os.environ.get('RANK') == '1':
    raise ValueError('no licence')"""
LEAVES_ON_ONE = """\
%%distributed_setup bad
import os, sys
if os.environ.get('RANK') == '1':
    sys.exit(3)"""
REDUCE = "import torch\ntorch.distributed.all_reduce(torch.ones(1))"


def check(book: Notebook, ranks: int) -> None:
    """Check that a set-up runs once on each rank, also on replaced, resized and new ones; that one that fails shows its
    own traceback; and that an undone one is not run any more.

    Args:
        book: A notebook with an extension that is loaded, whose default pool is the one to check.
        ranks: Number of its ranks, 2 or more.
    """
    last = ranks - 1

    def read(line: str, first: str = "") -> str:
        outcome = book.cell(f"%%distributed {line}\n{first}\n{READ}", timeout_s=100)
        assert outcome.status == "ok", outcome.text
        return outcome.result

    everyone = f"ranks 0-{last}: "
    book.ok(COUNTED)
    assert read(f"--ranks {ranks}") == f"{everyone}1"
    assert read("") == f"{everyone}1"
    assert read("--max-restarts 1", LOSE.format(last=last)) == f"{everyone}1"
    assert read(f"--ranks {last}") in ("rank 0: 1", f"ranks 0-{last - 1}: 1")
    assert read(f"--ranks {ranks} --fresh") == f"{everyone}1"

    book.ok(BAD)
    failed = book.cell("%%distributed\nprint('begun')", timeout_s=100)
    assert failed.ename == "KeyError", failed.text
    assert "{}['nothing']" in failed.traceback
    assert "line 5" in failed.traceback
    assert "in the set-up bad" in failed.traceback
    assert f"Ranks 0-{last} raised the same" in failed.text
    assert "begun" not in failed.text

    book.ok(BAD_ON_ONE)
    failed = book.cell(f"%%distributed --ranks {ranks} --fresh --strategy ddp\n{REDUCE}", timeout_s=100)
    assert failed.ename == "ValueError", failed.text
    assert f"Traceback (rank 1 of {ranks})" in failed.traceback
    assert "no licence" in failed.traceback
    assert "in the set-up bad" in failed.traceback
    assert "stopped because of it" in failed.traceback, "and did not wait for it until a time-out"
    book.ok(LEAVES_ON_ONE)
    left = book.cell(f"%%distributed --fresh --strategy ddp\n{REDUCE}", timeout_s=100)
    assert "The set-up bad called sys.exit(3)" in left.traceback, left.text
    assert "/jupyter_distrib/" not in left.traceback, left.traceback

    assert "bad" in book.ok("%distributed_setup --undo bad").stdout
    assert read("") == f"{everyone}1"
    book.ok("%distributed_setup --undo counted")
    assert read("--fresh") == f"{everyone}0"
