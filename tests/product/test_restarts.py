"""`--max-restarts`: a rank that is killed costs the steps since the last checkpoint, and nothing else. Real kernels."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

LINE = "%%distributed --ranks 2 --strategy ddp --max-restarts {}\n"
DIE = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
TRAIN = """
import os, time, torch, jupyter_distrib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits

def train(folder, pause_s=0.0, kills=0):
    digits = load_digits()
    x, y = torch.tensor(digits.data[:640], dtype=torch.float32) / 16, torch.tensor(digits.target[:640])
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plain = jupyter_distrib.resume(folder, model=model, optimizer=optimizer, loader=loader)
    for epoch in range(plain.get("epoch", 0), 4):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(pause_s)
            jupyter_distrib.save(
                folder, every_s=0.02, keep=2, model=model, optimizer=optimizer, loader=loader, epoch=epoch)
    while int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < kills:
        time.sleep(0.01)
    jupyter_distrib.save(folder, keep=2, model=model, optimizer=optimizer, loader=loader, epoch=4)
"""

KILL = """
import random, signal

def kill(run, times, seed):
    chance = random.Random(seed)
    for number in range(times):
        time.sleep(chance.uniform(0.2, 0.8))
        while len(run.record.restarts) < number or any(
                rank.state != "running" for rank in run.record.ranks.values()):
            assert not run.done(), "it has ended before it was killed"
            time.sleep(0.01)
        os.kill(run.record.ranks[chance.randrange(2)].pid, signal.SIGKILL)
        while len(run.record.restarts) == number and not run.done():
            time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(TRAIN)
    return shared_notebook


def test_a_rank_that_is_lost_once_is_started_again_and_knows_it(book: Notebook) -> None:
    ended = book.ok(
        f"{LINE.format(3)}import os\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        f"if count == '0' and rank == 1:\n    print('dies')\n    {DIE.replace(chr(10), chr(10) + '    ')}\n"
        "import torch.distributed as dist\ndist.barrier()\n"
        "(int(count), int(os.environ['TORCHELASTIC_MAX_RESTARTS']))"
    )

    assert ended.result == "ranks 0-1: (1, 3)"
    assert "attempt 2 of 4, since rank 1 was lost (killed by SIGKILL)" in ended.text
    assert "dies" in ended.text


def test_kept_values_that_a_restart_loses_are_named_in_the_head(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep weights\nweights = [rank]")
    ended = book.ok(
        f"{LINE.format(1)}import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and rank == 1:\n"
        f"    {DIE.replace(chr(10), chr(10) + '    ')}\nimport torch.distributed as dist\ndist.barrier()\nrank"
    )

    assert "rank 1 kept `weights`, which were lost with the process that was replaced" in ended.view
    assert ended.result == "rank 0: 0\nrank 1: 1"
    book.ok("del weights")


def test_results_are_those_of_the_last_attempt(book: Notebook) -> None:
    ended = book.ok(
        "%%distributed --ranks 2 --max-restarts 1\nimport os, time\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        f"if first and rank == 1:\n    time.sleep(0.3)\n    {DIE.replace(chr(10), chr(10) + '    ')}\n"
        "'stale' if first else rank"
    )

    assert ended.result == "rank 0: 0\nrank 1: 1"


def test_an_exception_is_no_reason_unless_asked(book: Notebook) -> None:
    body = dedent("""\
        import os
        count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
        if not count: 1 / 0
        count""")

    failed = book.fails(f"{LINE.format(2)}{body}")
    again = book.ok(f"{LINE.format('2 --restart-on error')}{body}")

    assert failed.ename == "ZeroDivisionError"
    assert "attempt" not in failed.text
    assert again.result == "ranks 0-1: 1"
    assert "attempt 2 of 3, since rank" in again.text


def test_a_crash_loop_ends_and_says_so(book: Notebook) -> None:
    failed = book.fails(
        f"{LINE.format(9)}import ctypes\nif rank == 0:\n    ctypes.string_at(0)\nimport time\ntime.sleep(60)"
    )

    assert "RankLost" in failed.ename
    assert "at the same place" in failed.text
    assert "attempt 3" not in failed.text
    assert book.ok(f"{LINE.format(1)}rank").result == "rank 0: 0\nrank 1: 1"


def test_restarts_that_are_used_up_are_said(book: Notebook) -> None:
    failed = book.fails(
        f"{LINE.format(1)}import time\nif rank == 1:\n    {DIE.replace(chr(10), chr(10) + '    ')}\ntime.sleep(60)"
    )

    assert "--max-restarts 1 is used" in failed.text


def test_stop_is_no_reason(book: Notebook) -> None:
    book.start(f"{LINE.format(5)}import time\nprint('sleeps')\ntime.sleep(60)")
    book.until("sleeps")
    book.interrupt()
    ended = book.finish()

    assert ended.ename == "KeyboardInterrupt"
    assert "attempt" not in ended.text


def test_steps_that_are_computed_again_are_marked(book: Notebook) -> None:
    book.ok(
        "%%distributed --ranks 1 --max-restarts 1 --detach\nimport os, time, jupyter_distrib\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "for step in range(10 if first else 13, 20):\n"
        "    jupyter_distrib.report(loss=100. / (step + 1), step=step)\n    time.sleep(0.02)\n"
        f"    if first and step == 14:\n        time.sleep(0.5)\n        {DIE.replace(chr(10), chr(10) + '        ')}"
    )

    book.ok("run = _\nrun.result()")

    lost = book.ok("[sample.step for sample in run.record.ranks[0].history if sample.lost]")
    assert lost.result == "[13, 14]"
    assert book.ok("[each.cause for each in run.record.restarts]").result == "['rank 0 was lost (killed by SIGKILL)']"
    assert (
        book.ok(
            "from jupyter_distrib.kernel.views.chart import chart_of\n"
            "any(getattr(mark, 'dashed', False) for mark in chart_of(run.record).marks)"
        ).result
        == "True"
    )


def test_a_detached_run_is_started_again_without_its_kernel(book: Notebook) -> None:
    folder = Path(book.ok("os.getcwd()").result.strip("'"))
    with Notebook(folder) as other:
        other.ok("%load_ext jupyter_distrib")
        other.ok(
            "%%distributed --ranks 2 --max-restarts 1 --detach\nimport os, time\n"
            "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
            "while not os.path.exists('go'):\n    time.sleep(0.05)\n"
            f"if first and rank == 1:\n    {DIE.replace(chr(10), chr(10) + '    ')}\nif first: time.sleep(60)\nrank + 10"
        )
        name = other.ok("_.id").result.strip("'")
    (folder / "go").touch()

    ended = book.ok(f"job = get_ipython().run_line_magic('distributed_attach', '{name}')\njob.result(timeout_s=60)")
    assert book.ok("job.record.restarts[0].cause").result == "'rank 1 was lost (killed by SIGKILL)'"
    assert ended.result == "rank 0: 10\nrank 1: 11"


BREAKS = """
import os
if os.path.exists(COUNT := os.path.join(os.path.dirname(__file__), "count")) and "jupyter_distrib" in "".join(
        open("/proc/self/cmdline").read()):
    with open(COUNT, "r+") as file:
        left = int(file.read())
        file.seek(0)
        file.write(str(left - 1))
    if left > 0:
        os._exit(3)
"""


def test_a_run_goes_on_with_fewer_ranks_where_a_lost_one_cannot_be_replaced(book: Notebook) -> None:
    folder = Path(book.ok("os.getcwd()").result.strip("'")) / "breaks"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BREAKS)
    body = (
        "import os, signal, torch, torch.distributed as dist\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        f"if first and rank == 1:\n    open('{folder}/count', 'w').write('3')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "ones = torch.ones(1)\ndist.all_reduce(ones)\nrank, world_size, int(ones)"
    )
    line = f"%%distributed --ranks 3 --strategy ddp --max-restarts 1 --env PYTHONPATH={folder}"
    ended = book.ok(f"{line} --min-ranks 2\n{body}")

    assert ended.result == "rank 0: (0, 2, 2)\nrank 1: (1, 2, 2)"
    assert "goes on with 2 of 3 ranks: rank 1 cannot be replaced, rank 1 ended with exit status" in ended.text
    assert "With the same batch size on each rank, the global batch is 2/3 of what it was" in ended.text
    (folder / "count").unlink()
    failed = book.fails(f"{line} --min-ranks 3\n{body}")
    assert "before it was ready" in failed.text
    (folder / "count").unlink()
    assert book.ok("%%distributed --ranks 3\nrank").result == "rank 0: 0\nrank 1: 1\nrank 2: 2"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_killed_at_three_random_moments_ends_with_the_weights_of_an_undisturbed_one(
    book: Notebook, strategy: str
) -> None:
    seed = int.from_bytes(os.urandom(3))
    line = f"%%distributed --ranks 2 --strategy {strategy} --max-restarts 9"
    book.ok(f"{line}\ntrain('calm-{strategy}')")
    book.ok(f"{line} --detach\ntrain('wild-{strategy}', 0.03, kills=3)")
    killed = book.ok(f"run = _\n{KILL}\nkill(run, 3, {seed})\nrun.result()\nlen(run.record.restarts)")

    assert killed.result == "3", seed
    same = book.ok(
        f"calm, wild = (jupyter_distrib.load(name)['model'] for name in ('calm-{strategy}', 'wild-{strategy}'))\n"
        "all(torch.equal(calm[name], wild[name]) for name in calm)"
    )
    assert same.result == "True", seed


def test_an_exception_beside_max_restarts_names_what_restarts_it(shared_notebook: Notebook) -> None:
    line = "%%distributed --ranks 1 --max-restarts 2{}\n1 / 0"
    view = shared_notebook.fails(line.format("")).view
    assert (
        "rank 0 raised ZeroDivisionError, line 2; not started again, since --max-restarts alone is for lost ranks"
        in view
    )
    assert "add --restart-on error" in view
    assert "--restart-on" not in shared_notebook.fails(line.format(" --restart-on error")).view


@pytest.mark.slow
def test_a_rank_that_waits_for_a_lost_one_shows_one_line_of_c10d(shared_notebook: Notebook) -> None:
    ended = shared_notebook.ok(
        dedent("""\
            %%distributed --ranks 2 --max-restarts 1 --out got
            import os, threading, torch.distributed as dist
            first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'
            if first and rank == 0:
                threading.Event().wait(1); os.kill(os.getpid(), 9)
            dist.init_process_group('gloo')
            dist.barrier()
            rank""")
    )
    assert "frame #" not in ended.view
    assert "Exception raised from" not in ended.view
    assert "attempt 2 of 2" in ended.view
    shared_notebook.forget()
