"""`--ranks 2:4`: a training that grows ends with the weights of the same sizes by hand. Real kernels; the hosts are this
machine behind pipes, and come and go with a file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.product.growth_cells import counting
from tests.settings_files import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import os, time, torch, jupyter_distrib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(folder, steps=10**9):
    # Up to a step or, without one, 20 steps on 4 ranks.
    torch.set_num_threads(1)  # on any number of cores
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40_000, 8), torch.randn(40_000, 1))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plain = jupyter_distrib.resume(folder, model=model, optimizer=optimizer, loader=loader)
    step = plain.get("step", 0)
    steps = step + 20 if steps > 10**8 and os.environ["WORLD_SIZE"] == "4" else steps
    print("from", step, "with", os.environ["WORLD_SIZE"])
    for x, y in loader:
        if step == steps:
            break
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        jupyter_distrib.report(loss=1.0, step=step)
        jupyter_distrib.save(folder, keep=3, model=model, optimizer=optimizer, loader=loader, step=step)
    return step
"""

OFFLOADS = """
from torch.distributed.fsdp import CPUOffloadPolicy
from jupyter_distrib.worker.autoparallel.training import sharding
sharding._offload = lambda plan: CPUOffloadPolicy(pin_memory=False)  # also on the CPU, where it would be left out
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(TRAIN)
    return shared_notebook


REFUSED = (
    ("--nodes 1:3 --ranks 4", "--nodes 1:3 puts the same number of ranks on each node, so --ranks must be a multiple of 3; got 4"),
    ("--nodes 1:2", "--nodes 1:2 needs --gpus N or --ranks N, the number of ranks on all 2 nodes"),
    ("--nodes 1:2 --ranks 1:4", "--nodes 1:2 and --ranks 1:4 exclude each other: give --ranks the number of ranks on all 2 nodes"),
    ("--nodes 2:1 --ranks 4", "--nodes has the range 2:1 backwards: write 1:2"),
    ("--nodes 0:2 --ranks 4", "--nodes must be a whole number, at least 1, or a range such as 2:8; got '0:2'"),
    ("--nodes 1:2 --ranks 4 --on 0", "--on and --nodes 1:2 exclude each other"),
    ("--nodes 1:2 --ranks 4 --keep a", "--keep and --nodes 1:2 exclude each other"),
    ("--nodes 1:2 --ranks 4 --min-ranks 2 --max-restarts 1", "--min-ranks and --nodes 1:2 exclude each other: 2 is the minimum"),
    ("--nodes 2 --ranks 4 --grow-after 5", "--grow-after needs a range of ranks"),
)  # fmt: skip


SCRIPT = """
import os, sys, time, torch, jupyter_distrib
model = torch.nn.Linear(1, 1)
step = jupyter_distrib.resume("ckpt", model=model).get("step", 0)
print("has", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(sys.argv[1]):
    step += 1
    jupyter_distrib.report(loss=1.0, step=step)
    if os.environ["RANK"] == "0":
        jupyter_distrib.save("ckpt", every_s=0.05, keep=2, model=model, step=step)
    time.sleep(0.01)
print("ended with", os.environ["WORLD_SIZE"], step > 1)
"""


def write_pool(folder: Path, size: str) -> None:
    """Write a settings file with such a pool of two hosts, and a script that grows."""
    (folder / "script.py").write_text(SCRIPT)
    found = re.findall(r"--(\w+) ('.*?'|\S+)", pool(folder, "a:2,b:2"))
    options = [f"{name} = {json.dumps(text.strip(chr(39)))}" for name, text in found if name != "pool"]
    lines = ['pool = "lab"', "[pools.lab]", 'kind = "command"', *options, *size.split(", ")]
    write_trusted(folder, "\n".join([*lines, ""]))


def pool(folder: Path, hosts: str) -> str:
    """Return the options of a pool whose hosts can be reached if they have a file."""
    start = 'cd "$(dirname "$0")"\ntest -e up-$1 || exit 1\necho $$ >pid-$1\nshift\nexec "$@"\n'
    (folder / "start.sh").write_text(start)
    start = f"--start 'env -S sh {folder}/start.sh {{host}} {{python}}'"
    return f"--pool command --hosts {hosts} {start} --python {sys.executable} --interface lo"


@pytest.mark.parametrize(
    ("strategy", "hosts", "size"),
    [
        ("ddp", "a:2,b:2", "--ranks 2:4"),
        ("fsdp", "a:2,b:2", "--ranks 2:4"),
        ("fsdp --precision bf16 --fsdp-unit Linear", "a:2,b:2", "--ranks 2:4"),
        ("ddp", "a:8,b:8", "--ranks 4 --nodes 1:2"),
        ("fsdp --cpu-offload", "a:2,b:2", "--ranks 2:4"),
    ],
)
def test_the_weights_are_those_of_the_same_sizes_by_hand(
    book: Notebook, tmp_path: Path, strategy: str, hosts: str, size: str
) -> None:
    line = f"%%distributed {pool(tmp_path, hosts)} --strategy {strategy}"
    before = OFFLOADS if "offload" in strategy else ""
    (tmp_path / "up-a").touch()
    book.start(f"{line} {size} --grow-after 1\n{before}\ntrain('{tmp_path}/grown')")
    book.until("from 0 with 2")
    (tmp_path / "up-b").touch()
    grown = book.finish(90)
    at = int(re.findall(r"from (\d+) with 4", grown.text)[0])

    assert grown.result == f"ranks 0-3: {at + 20}", grown.text
    assert "2 to 4 ranks on 2 nodes" in grown.view
    assert at > 0
    by_hand = f"%%distributed --strategy {strategy} --ranks"
    book.ok(f"{by_hand} 2\n{before}\ntrain('{tmp_path}/hand', steps={at})")
    book.ok(f"{by_hand} 4\n{before}\ntrain('{tmp_path}/hand', steps={at + 20})")
    same = book.ok(
        f"one, two = (jupyter_distrib.load('{tmp_path}/' + name)['model'] for name in ('grown', 'hand'))\n"
        "(len(one), all(torch.equal(one[name], two[name]) for name in one))"
    )
    assert same.result == "(4, True)"
    book.ok("%distributed_pool stop command")
    book.ok("%distributed_pool stop local")


def test_a_run_grows_and_shrinks_by_whole_nodes(book: Notebook, tmp_path: Path) -> None:
    """Each node has the same number of ranks, though one would have room for all, and one has not room for its part."""
    hosts, end = "a:8,b:8,c:1", tmp_path / "end"
    line = f"{pool(tmp_path, hosts)} --reconnect 0 --nodes 1:3 --ranks 6 --max-restarts 1 --grow-after 0.5"
    for host in "ac":
        (tmp_path / f"up-{host}").touch()
    book.start(counting(line, str(tmp_path / "ckpt"), str(end)))
    book.until("has 2")
    (tmp_path / "up-b").touch()
    book.until("grown from 2 to 4 ranks on 2 nodes at step ", 60)
    book.until("has 4", 60)
    (tmp_path / "up-b").unlink()
    os.kill(int((tmp_path / "pid-b").read_text()), signal.SIGKILL)
    book.until("goes on with 2 of 4 ranks on 1 node: there is no room for more now.", 60)
    end.touch()
    ended = book.finish(60)

    assert ended.result == "ranks 0-1: (2, True)", ended.text
    book.ok("%distributed_pool stop command")


def test_a_range_of_nodes_is_refused_in_one_sentence_where_it_cannot_be(book: Notebook, tmp_path: Path) -> None:
    line = f"%%distributed {pool(tmp_path, 'a,b')}"
    for options, said in REFUSED:
        for more in ("", " --explain"):
            assert said in book.cell(f"{line} {options}{more}\na = rank").text, options
    keywords = "pool='command', hosts='a,b', start='x {host} {python}', nodes='1:3', ranks=4"
    called = f"jupyter_distrib.distributed({keywords})(lambda: 0).distributed()"
    assert "ranks must be a multiple of 3; got 4" in book.cell(called).text
    assert "--nodes is an option of --pool command" in book.cell("%%distributed --nodes 1:4 --ranks 4\nrank").text


@pytest.mark.parametrize("size", ['ranks = "2:4"', 'ranks = 4, nodes = "1:2"'])
def test_a_script_grows_by_the_range_of_a_settings_file(tmp_path: Path, size: str) -> None:
    write_pool(tmp_path, size)
    (tmp_path / "up-a").touch()
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.start("%distributed_run --grow-after 1 script.py end")
        book.until("has 2")
        (tmp_path / "up-b").touch()
        book.until("2 to 4 ranks on 2 nodes", 60)
        book.until("has 4", 60)
        (tmp_path / "end").touch()
        assert "[0-3] ended with 4 True" in book.finish(60).view
        book.ok("%distributed_pool stop lab")


def test_a_script_grows_in_a_shell(tmp_path: Path) -> None:
    write_pool(tmp_path, 'ranks = 4, nodes = "1:2"')
    (tmp_path / "up-a").touch()
    words = [f"{os.path.dirname(sys.executable)}/jupyter-distrib", "run", "--grow-after", "1", "script.py", "end"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as shell:
        assert shell.stdout is not None
        said = ""
        for line in shell.stdout:
            said += line
            if "has 2" in line:
                (tmp_path / "up-b").touch()
            if "has 4" in line:
                (tmp_path / "end").touch()
    assert shell.returncode == 0, said
    assert "2 to 4 ranks on 2 nodes" in said, said
    assert "ended with 4 True" in said, said


@pytest.mark.parametrize("size", ['ranks = "2:4"', 'ranks = 4, nodes = "1:2"'])
def test_what_does_not_grow_runs_on_a_pool_whose_size_is_a_range(tmp_path: Path, size: str) -> None:
    write_pool(tmp_path, size)
    for host in "ab":
        (tmp_path / f"up-{host}").touch()
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        swept = book.ok("%%distributed --sweep lr=1,2\n(lr, world_size)")
        assert swept.result.endswith("lr=1: ranks 0-3: (1, 4)\nlr=2: ranks 0-3: (2, 4)"), swept.result
        book.ok("%%distributed --keep a\na = rank")
        assert book.ok("%%distributed --on 2\na").result == "rank 2: 2"
        assert book.ok("%%distributed --ranks 1\nworld_size").result == "rank 0: 1"
        assert book.ok("%%distributed --ranks 3\nworld_size").result == "ranks 0-2: 3"
        assert book.ok("%%distributed --ranks 1:2\nworld_size").result == "ranks 0-1: 2"
        refused = "--sweep and --ranks 1:2 exclude each other: its runs share the pool, so give each a fixed number"
        assert refused in book.fails("%%distributed --sweep lr=1,2 --ranks 1:2\nlr").evalue
        refused = "--sweep and --nodes 1:2 exclude each other: its runs share the pool, so give each a fixed number"
        assert refused in book.fails("%%distributed --sweep lr=1,2 --ranks 4 --nodes 1:2\nlr").evalue
        book.ok("%distributed_pool stop lab")
