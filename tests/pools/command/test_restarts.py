"""`--max-restarts` over hosts: a rank, and a host, that is lost. Real kernels; the hosts are this machine behind pipes."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

POOL = f"--pool command --hosts a,b --start 'env HOST={{host}} {{python}}' --python {sys.executable} --interface lo --nodes 2"
FIRST = "import os, signal\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
SUM = """\
import torch, torch.distributed as dist
ones = torch.ones(1)
dist.all_reduce(ones)
(int(ones), os.environ['TORCHELASTIC_RESTART_COUNT'])"""


def lines(strategy: str = "ddp", restarts: int = 2) -> str:
    return f"%%distributed {POOL} --ranks 2 --strategy {strategy} --max-restarts {restarts}\n{FIRST}"


def test_a_detached_run_is_the_first_that_reaches_the_hosts(shared_notebook: Notebook) -> None:
    line = lines().partition("\n")[0]

    assert shared_notebook.ok(f"{line} --detach\nrank").status == "ok"
    assert shared_notebook.ok("_.result()").result == "rank 0: 0\nrank 1: 1"


def test_a_rank_of_another_host_is_replaced(shared_notebook: Notebook) -> None:
    shared_notebook.ok("import torch\nlarge = torch.arange(3_000_000)")
    ended = shared_notebook.ok(
        f"{lines()}assert int(large[-1]) == 2_999_999\n"
        f"if first and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n{SUM}"
    )

    assert ended.result == "ranks 0-1: (2, '1')"
    assert "attempt 2 of 3, since rank 1 was lost (killed by SIGKILL)" in ended.text


def test_a_host_that_is_lost_is_replaced(shared_notebook: Notebook) -> None:
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


TRAIN = """
import jupyter_distrib, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
plain = jupyter_distrib.resume("fewer", model=model, optimizer=optimizer, loader=loader)
steps = 0
for x, y in loader:
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    jupyter_distrib.save("fewer", model=model, optimizer=optimizer, loader=loader)
    if first and rank == 1 and steps == 3:
        with open(f"{folder}/gone-{os.environ['HOST']}", "w") as file:
            file.write(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"])
        os.kill(int(open(f"{folder}/pid-{os.environ['HOST']}").read()), signal.SIGKILL)
        os.kill(int(os.environ["JUPYTER_DISTRIB_AGENT"].partition(".")[0]), signal.SIGKILL)
world_size, steps, sum(p.numel() for p in model.parameters())
"""


def test_a_run_goes_on_without_a_host_that_is_gone_and_its_checkpoint_is_divided_anew(
    shared_notebook: Notebook,
) -> None:
    cell = dedent("""\
        import os
        folder = os.getcwd()
        print(folder)""")
    folder = shared_notebook.ok(cell).stdout.strip()
    start = f"--start 'env -S sh {folder}/start.sh {{host}} {{python}}'"
    Path(folder, "start.sh").write_text(
        'test -e "$(dirname "$0")/gone-$1" && exit 1\necho $$ > "$(dirname "$0")/pid-$1"\nHOST=$1\nexport HOST\nshift\nexec "$@"\n'
    )
    pool = POOL.replace("a,b", "a:1,b:1").replace("--start 'env HOST={host} {python}'", start)
    line = f"%%distributed {pool} --ranks 2 --strategy fsdp --max-restarts 2"
    ended = shared_notebook.cell(f"{line} --min-ranks 1\n{FIRST}{TRAIN}", timeout_s=110)
    (gone,) = Path(folder).glob("gone-*")
    shutil.rmtree(gone.read_text(), ignore_errors=True)  # of a host that is gone, if nobody there still could

    assert ended.result == "rank 0: (1, 10, 5)"  # 64 samples, 24 of them before, 4 in a step
    assert "goes on with 1 of 2 ranks on 1 node: " in ended.text
    assert "the global batch is 1/2 of what it was" in ended.text


def test_a_stop_ends_a_run_that_was_started_again(shared_notebook: Notebook) -> None:
    shared_notebook.start(
        f"{lines()}if first and rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nimport time\n"
        "if not first:\n    print('again')\ntime.sleep(60)"
    )
    shared_notebook.until("again")
    shared_notebook.interrupt()

    assert shared_notebook.finish().ename == "KeyboardInterrupt"
