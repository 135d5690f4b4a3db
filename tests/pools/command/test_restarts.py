"""`--max-restarts` over hosts: a rank, and a host, that is lost. Real kernels; the hosts are this machine behind pipes."""

from __future__ import annotations

import re
import sys

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

POOL = f"--pool command --hosts a,b --start 'env HOST={{host}} {{python}}' --python {sys.executable} --interface lo --nodes 2"
FIRST = "import os, signal\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
SUM = (
    "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\n"
    "(int(ones), os.environ['TORCHELASTIC_RESTART_COUNT'])"
)


def lines(strategy: str = "ddp", restarts: int = 2) -> str:
    return f"%%distributed {POOL} --ranks 2 --strategy {strategy} --max-restarts {restarts}\n{FIRST}"


def test_g10_a_rank_of_another_host_is_replaced(shared_notebook: Notebook) -> None:
    shared_notebook.ok("import torch\nlarge = torch.arange(3_000_000)")
    ended = shared_notebook.ok(
        f"{lines()}assert int(large[-1]) == 2_999_999\n"
        f"if first and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n{SUM}"
    )

    assert ended.result == "ranks 0-1: (2, '1')"
    assert "attempt 2 of 3, since rank 1 was lost (killed by SIGKILL)" in ended.text


def test_g10_a_host_that_is_lost_is_replaced(shared_notebook: Notebook) -> None:
    shared_notebook.ok(f"%%distributed {POOL} --ranks 2 --keep held\nheld = rank")
    agent = "int(os.environ['JUPYTER_DISTRIB_AGENT'].partition('.')[0])"
    ended = shared_notebook.ok(f"{lines()}if first and rank == 1:\n    os.kill({agent}, signal.SIGKILL)\n{SUM}")

    assert ended.result == "ranks 0-1: (2, '1')"
    # The end of the rank's process may be told before that of its node.
    reason = r"(node [ab] was lost: its agent has ended|its process is gone)"
    assert re.search(rf"attempt 2 of 3, since rank [01] was lost \({reason}\)", ended.text)
    lost = shared_notebook.fails(f"%%distributed {POOL} --ranks 2\nheld").text
    assert re.search(r"`held` of ranks? (0-1|1) is gone with the process", lost), lost
    assert shared_notebook.ok(f"%%distributed {POOL} --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


def test_g10_a_stop_ends_a_run_that_was_started_again(shared_notebook: Notebook) -> None:
    shared_notebook.start(
        f"{lines()}if first and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nimport time\n"
        "if not first:\n    print('again')\ntime.sleep(60)"
    )
    shared_notebook.until("again")
    shared_notebook.interrupt()

    assert shared_notebook.finish().ename == "KeyboardInterrupt"
