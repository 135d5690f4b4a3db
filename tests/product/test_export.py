"""A cell that was exported trains under torchrun to the weights that it had on ranks of this package."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook

pytestmark = pytest.mark.slow

SETUP = """
import math, torch, torch as th
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
features, targets = torch.randn(64, 6), torch.randn(64, 2)
data = TensorDataset(features, targets)
LR, widths = 0.05, [6, 8, 2]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer(a, b) for a, b in zip(widths, widths[1:])))
    def forward(self, x):
        return self.layers(x)
def layer(a, b):
    return nn.Linear(a, b)
def seeded():
    torch.manual_seed(3)
    return Net()
"""
BY_HAND = """
import gc
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(seeded())
optimizer = th.optim.SGD(model.parameters(), lr=LR)
sampler = torch.utils.data.DistributedSampler(data, world_size, rank, shuffle=False)
for x, y in DataLoader(data, batch_size=8, sampler=sampler):
    loss = nn.functional.mse_loss(model(x), y) * math.sqrt(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
if rank == 0:
    torch.save(weights, "weights.pt")
del model, loss, optimizer  # torch aborts some scripts that keep a DDP model until Python's end
gc.collect()
dist.destroy_process_group()
weights
"""
UNCHANGED = """
import os, time
from concurrent.futures import ThreadPoolExecutor
def written_late():
    time.sleep(1)
    open(f"late{rank}", "w").close()
if "TORCHELASTIC_RUN_ID" in os.environ:  # the script
    background = ThreadPoolExecutor(1)
    background.submit(written_late)
model = seeded()
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
for x, y in DataLoader(data, batch_size=8):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
if rank == 0:
    torch.save(weights, "weights.pt")
weights
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernel of this module runs."""
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def _book(folder: Path) -> Iterator[Notebook]:
    with Notebook(folder, {"CUDA_VISIBLE_DEVICES": ""}) as notebook:
        notebook.ok("%load_ext jupyter_distrib")
        yield notebook


@pytest.fixture
def book(_book: Notebook) -> Notebook:
    """The module's kernel, without the names of other tests."""
    _book.forget()
    return _book


def torchrun(folder: Path, script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("options", "body"), [("", BY_HAND), ("--strategy ddp", UNCHANGED)], ids=["by hand", "ddp"])
def test_an_exported_cell_trains_to_the_same_weights_under_torchrun(
    book: Notebook, folder: Path, options: str, body: str
) -> None:
    book.ok(SETUP)
    book.ok(f"%%distributed --ranks 2 {options} --out trained\n{body}")
    cell = dedent("""\
        import os
        os.remove('weights.pt')
        %distributed_export trained train.py""")
    told = book.ok(cell).stdout
    assert told == "train.py and train.pkl written: torchrun --nproc-per-node 2 train.py\n"

    torchrun(folder, "train.py")

    assert sorted(path.name for path in folder.glob("late*")) == (["late0", "late1"] if options else [])
    assert book.ok("theirs = torch.load('weights.pt')\ntorch.equal(trained[0], theirs)").result == "True"


@pytest.mark.parametrize(
    "run",
    [
        "%%distributed --ranks 1 --out done\nprint(rank)",
        "%%distributed --ranks 1 --out done --detach\nprint(rank)",
        "@distributed(ranks=1)\ndef tell():\n    print('made')\ndone = tell.distributed()",
    ],
)
def test_a_cell_that_returns_nothing_is_exported_by_the_name_of_its_results(
    book: Notebook, folder: Path, run: str
) -> None:
    book.ok("from jupyter_distrib import distributed")
    book.ok(run)
    assert book.ok("%distributed_export done quiet.py").stdout.startswith("quiet.py")
    assert "print" in (folder / "quiet.py").read_text()


def test_postponed_annotations_of_the_notebook_are_those_of_the_script(book: Notebook, folder: Path) -> None:
    book.ok(
        dedent("""\
            from __future__ import annotations
            from dataclasses import dataclass
            from typing import Optional
            @dataclass
            class Args:
                rate: Optional[Rate] = 3
                def twice(self): return 2 * self.rate
            class Rate:
                def read(self): return 3""")
    )
    book.ok(
        dedent("""\
            %%distributed --ranks 1 --out got
            import typing
            open('hints', 'w').write(str(typing.get_type_hints(Args)))""")
    )
    book.ok("%distributed_export got typed.py")
    (folder / "hints").unlink()
    book.ok("annotations = None")

    subprocess.run([sys.executable, "typed.py"], cwd=folder, check=True, timeout=60)

    assert (folder / "hints").read_text() == "{'rate': typing.Optional[__main__.Rate]}"


def test_neither_an_argument_nor_the_names_of_files_become_code_of_the_script(book: Notebook, folder: Path) -> None:
    book.ok(
        dedent("""\
            import os, jupyter_distrib
            @jupyter_distrib.distributed(ranks=1)
            def shown(text, more):
                print(text)""")
    )
    book.ok("""job = shown.submit('\"\"\";open("ran", "w")#', 1); job.result()""")
    name = '"""; open("ran", "w") #\\.py'
    book.ok(f"import shlex\nget_ipython().run_line_magic('distributed_export', 'job ' + shlex.quote({name!r}))")
    torchrun(folder, name)
    assert not (folder / "ran").exists()
    told = ast.get_docstring(ast.parse((folder / name).read_text()))
    assert told == f"""shown('\"\"\";open("ran", "w")#', 1) as a script: torchrun --nproc-per-node N {name}"""


def test_a_file_beside_the_script_that_is_not_of_an_export_stays(book: Notebook, folder: Path) -> None:
    (folder / "mine.pkl").write_bytes(b"measured")
    book.ok("%%distributed --ranks 1 --out plain\n1")
    book.ok("import array\nvalues = array.array('d', [1.5])")
    book.ok("%%distributed --ranks 1 --out more\nvalues[0]")

    book.ok("%distributed_export plain mine.py")
    told = book.fails("%distributed_export more mine.py").evalue
    assert told == "mine.pkl is there already, and no export has written it: choose another name for the script"
    assert (folder / "mine.pkl").read_bytes() == b"measured"
    assert "values" not in (folder / "mine.py").read_text()

    for name in ("more", "more", "plain"):
        book.ok(f"%distributed_export {name} own.py")
        assert (folder / "own.pkl").exists() == (name == "more")


def test_an_export_writes_through_no_link_and_waits_for_no_fifo(book: Notebook, folder: Path) -> None:
    book.ok("import array\nvalues = array.array('d', [1.5])")
    book.ok("%%distributed --ranks 1 --out linked\nvalues[0]")
    book.ok("%distributed_export linked first.py")
    outside = folder / "outside"
    for name in ("to_none", "to_one"):
        (folder / f"{name}.py").write_text((folder / "first.py").read_text().replace("first.pkl", f"{name}.pkl"))
        (folder / f"{name}.pkl").symlink_to(outside / name)
    outside.mkdir()
    (outside / "to_one").write_bytes(b"measured")
    (folder / "link.py").symlink_to(outside / "new.py")
    os.mkfifo(folder / "fifo.py")

    for name, there in {"to_none": "pkl", "to_one": "pkl", "link": "py", "fifo": "py"}.items():
        told = book.fails(f"%distributed_export linked {name}.py").evalue
        assert told.startswith(f"{name}.{there} is there already, and no export has written it: "), told
    assert os.listdir(outside) == ["to_one"]
    assert (outside / "to_one").read_bytes() == b"measured"


def test_a_script_that_no_export_has_written_stays(book: Notebook, folder: Path) -> None:
    (folder / "by_hand.py").write_text("print('by hand')\n")
    (folder / "empty.py").touch()
    book.ok("%%distributed --ranks 1 --out plain\n1")

    told = book.fails("%distributed_export plain by_hand.py").evalue
    assert told == "by_hand.py is there already, and no export has written it: choose another name"
    assert (folder / "by_hand.py").read_text() == "print('by hand')\n"
    for _ in range(2):
        book.ok("%distributed_export plain empty.py")


def test_a_script_in_the_home_folder_is_written_there_and_its_command_is_one_of_a_shell(
    book: Notebook, folder: Path
) -> None:
    book.ok("%%distributed --ranks 1 --out plain\n1")
    book.ok(f"%env HOME={folder}")
    told = book.ok('%distributed_export plain "~/of home.py"').stdout
    assert told == f"~/of home.py written: torchrun --nproc-per-node 1 '{folder}/of home.py'\n"
    book.ok(f"%env HOME={os.path.expanduser('~')}")
    assert (folder / "of home.py").is_file()


def test_of_a_sweep_one_run_is_exported(book: Notebook) -> None:
    book.ok("%%distributed --ranks 1 --sweep rate=[3,4] --out swept\nprint(rate)")
    told = book.fails("%distributed_export swept swept.py").evalue
    assert told.startswith("`swept` holds the runs of a sweep: give the number of one of them: ")
    last = told.rstrip(".").split()[-1]
    book.ok(f"%distributed_export {last} swept.py")
    assert "rate = 4" in book.ok("print(open('swept.py').read())").stdout


def test_results_of_another_kernel_are_told_so(book: Notebook) -> None:
    book.ok("%%distributed --ranks 1 --out done\n1")
    book.ok("import copy\nother = copy.copy(done)")
    told = book.fails("%distributed_export other quiet.py").evalue
    assert told == "`other` does not say which run made it: give the number of the run instead."


def test_an_exported_function_is_called_with_its_arguments(book: Notebook, folder: Path) -> None:
    book.ok("""
from jupyter_distrib import distributed
scale = 3
@distributed(ranks=2)
def work(x, *, name):
    import os
    open(name + os.environ["RANK"], "w").write(str(x * scale))
run = work.submit(2, name="out")
run.result()
""")
    book.ok("work = None\n%distributed_export run job.py")
    for rank in range(2):
        (folder / f"out{rank}").unlink()

    torchrun(folder, "job.py")

    assert [(folder / f"out{rank}").read_text() for rank in range(2)] == ["6", "6"]
    assert not (folder / "job.pkl").exists()
    assert "@distributed" not in (folder / "job.py").read_text()


def test_what_awaits_is_a_script_too(book: Notebook, folder: Path) -> None:
    book.ok(
        '%%distributed --ranks 1 --out awaited\nimport asyncio  # kept\ntext = """two\nlines"""\n'
        "async def later(x):\n    await asyncio.sleep(0)\n    return x + len(text)\nprint(await later(rank))"
    )
    book.ok("async def later(x): return [x, rank]\nfrom jupyter_distrib import distributed")
    book.ok("call = distributed(ranks=1)(later).submit(4); call.result()")
    for name, expected in (("awaited", "9"), ("call", "")):
        book.ok(f"%distributed_export {name} {name}.py")
        done = subprocess.run(
            [sys.executable, f"{name}.py"],
            cwd=folder,
            env={**os.environ, "RANK": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
    book.ok(
        dedent("""\
            %%distributed --ranks 1 --out star
            from math import *
            import asyncio
            await asyncio.sleep(0)
            1""")
    )
    assert "the cell awaits at its top level" in book.fails("%distributed_export star star.py").evalue


def as_script(book: Notebook, folder: Path, setup: str, cell: str) -> list[str]:
    """Export a cell, and return what it has printed on rank 1 of two ranks and what its script prints there."""
    book.ok(setup)
    book.ok(f"%%distributed --ranks 2 --out shown\n{cell}")
    in_run = book.ok("%distributed_logs --rank 1").stdout
    book.ok("%distributed_export shown shown.py")
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "shown.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **ranks, **paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [in_run.strip(), done.stdout.strip()]


def in_both(book: Notebook, folder: Path, setup: str, cell: str) -> str:
    """Return what a cell prints on rank 1, which its script must print too."""
    in_run, of_script = as_script(book, folder, setup, cell)
    assert in_run == of_script
    return of_script


@pytest.mark.parametrize(
    ("setup", "cell", "printed"),
    [
        ("import numpy as np\nrate = np.float64(0.5)", "print(repr(rate), type(rate).__name__)", "0.5"),
        ("few = (float('nan'), 1)\nbound = {'a': complex('inf')}", "print(few, bound)", "(nan, 1) {'a': (inf+0j)}"),
        ("digits = 10**5000", "print(digits % 97)", "81"),
    ],
)
def test_values_whose_text_is_no_code_are_those_of_the_run(
    book: Notebook, folder: Path, setup: str, cell: str, printed: str
) -> None:
    assert printed in in_both(book, folder, setup, cell)


@pytest.mark.parametrize(
    ("setup", "cell", "printed"),
    [
        ("def inner(): return rank\ndef outer(): return inner()", "print(outer())", "1"),
        ("import xml.dom.minidom", "print(xml.dom.minidom.Document.__name__)", "Document"),
        ("import json as j, json.tool\ndef name(): return j.tool.__name__", "print(name())", "json.tool"),
        ("", "!echo of $RANK\nplaces = %pwd\nfound = !echo {rank + 1}\nprint(found)", "of 1\n['2']"),
        ("", "display('text')", "text"),
    ],
    ids=["function of a function", "module of a module", "in a function", "shell", "display"],
)
def test_names_that_a_cell_finds_on_a_rank_are_found_by_its_script(
    book: Notebook, folder: Path, setup: str, cell: str, printed: str
) -> None:
    in_run, of_script = as_script(book, folder, setup, cell)
    assert in_run.replace("\r", "") == of_script.replace("\r", "") == printed


@pytest.mark.parametrize(
    ("setup", "cell"),
    [
        ("class Rate: pass\ndef same(x) -> Rate: return x", "print(same(1))"),
        ("class A:\n    two = 2\n    four = two * 2\ntwo = A()", "print(two.four, two.two)"),
        ("class Rate: pass\ndef same(*all: Rate, last: Rate = None, **more: Rate): return all", "print(same(1))"),
        ("from typing import Optional as Maybe, Any\ndef same(x: Maybe[Any] = 2) -> Any: return x", "print(same())"),
        ("import array\nrates = array.array('d', [0.5])\ndef first(x=rates): return x[0]", "print(first())"),
        (
            "from math import sqrt as root\nclass Rates:\n    def of(self): return 1\n    two = root(4)",
            "print(Rates.two)",
        ),
    ],
    ids=["result", "own", "arguments", "typing", "default", "class"],
)
def test_what_a_definition_reads_comes_before_it_in_the_script(
    book: Notebook, folder: Path, setup: str, cell: str
) -> None:
    in_both(book, folder, setup, cell)


@pytest.mark.parametrize(
    ("definition", "cell"),
    [
        ("from dataclasses import dataclass\n@dataclass\nclass Options:\n    rate: float = {}", "print(Options())"),
        ("import enum\nclass Options(enum.IntEnum):\n    RATE = {}", "print(repr(Options.RATE))"),
        ("class Options(Exception):\n    rate = {}", "print(Options.rate)"),
    ],
)
def test_a_class_without_functions_is_written_as_it_is_now(
    book: Notebook, folder: Path, definition: str, cell: str
) -> None:
    book.ok(definition.format(5))
    book.ok(definition.format(3))
    book.ok(definition.format(4))
    assert "3" in in_both(book, folder, definition.format(3), cell)


@pytest.mark.parametrize(
    ("setup", "cell", "printed"),
    [
        ("def f(): return 1\nfirst = f\ndef f(): return 2", "print(first(), f())", "1 2"),
        ("def f(): return 1\nfirst = f\ndef f(): return first() + 1", "print(f(), first())", "2 1"),
        ("class A:\n    def n(self): return 1\nB = A\nclass A(B):\n    pass", "print(A().n(), B.n(0))", "1 1"),
        (
            "class A:\n    def n(self): return 1\nB = A\nclass A(B):\n    def n(self): return 2",
            "print(A().n(), B().n())",
            "2 1",
        ),
        ("def f(): return 1\nalso = f", "print(also(), also is f)", "1 True"),
        ("def f(): return 1\nother = f\ndel f", "print(other())", "1"),
    ],
)
def test_names_of_definitions_that_have_changed_hands_mean_in_the_script_what_they_meant(
    book: Notebook, folder: Path, setup: str, cell: str, printed: str
) -> None:
    assert in_both(book, folder, setup, cell) == printed


@pytest.mark.parametrize(
    ("setup", "cell", "printed"),
    [
        ("rate = 4\ndef f(x=rate): return x\nrate = 5", "print(f(), rate)", "4 5"),
        (
            "rate = 'é'\ndef f(a, x='é', y=rate * 2, *, z=rate,\n  w=(rate +\n  'u')): return x, y, z, w\nrate = 5",
            "print(f(1))",
            "('é', 'éé', 'é', 'éu')",
        ),
        ("def f(x=[]): return x", "print(f())", "[]"),
        ("rate = 4\nf = lambda: 0\ndef f(x=rate): return x", "print(f())", "4"),
    ],
    ids=["name", "expressions", "none", "same"],
)
def test_defaults_of_an_exported_function_are_those_it_was_defined_with(
    book: Notebook, folder: Path, setup: str, cell: str, printed: str
) -> None:
    assert in_both(book, folder, setup, cell) == printed


@pytest.mark.parametrize(
    ("setup", "cell", "printed"),
    [
        ("a = [1]\nb = a", "a.append(2); print(b)", "[1, 2]"),
        ("a = [1]\nb = {'k': a}", "a.append(2); print(b)", "{'k': [1, 2]}"),
        ("from types import SimpleNamespace\na = {1: 1}\nb = SimpleNamespace(a=a)", "a[1] = 2; print(b)", "2"),
        ("a = [1]\nclass B:\n    def __init__(self): self.a = a\nb = B()", "a[0] = 2; print(b.a)", "[2]"),
        ("a = [1]\nb = (1,)", "a.append(2); print(a, b)", "[1, 2] (1,)"),
    ],
    ids=["names", "in another", "in an object", "of a class", "none"],
)
def test_values_of_a_script_share_what_they_share_in_the_notebook(
    book: Notebook, folder: Path, setup: str, cell: str, printed: str
) -> None:
    assert printed in in_both(book, folder, setup, cell)


@pytest.mark.parametrize(
    ("setup", "cell", "message"),
    [
        ("def make(n): return lambda: n\nadd = make(3)", "add()", "the script would miss `add` (a function made in"),
        (
            "class Rate:\n    def read(self): return 1\nrate = Rate()\ndef made(x=rate): return x.read()",
            "made(rate)",
            "the script would miss `rate` (a function or class reads it as it is defined",
        ),
        (
            "from typing import TypeVar\nT = TypeVar('T')\ndef same(x: T): return x",
            "same(1)",
            "the script would miss `T` (its source is not known)",
        ),
        (
            "import array\nrates = array.array('d', [1])\ndef f(x=rates): return x\nrates = array.array('d', [2])",
            "f()",
            "the script would miss `f` (its default `rates` has another value by now)",
        ),
        ("import torch\nx = torch.ones(2)", "x.sum()", "the script would miss `x` (the notebook no longer has it)"),
    ],
)
def test_what_cannot_be_exported_is_named(book: Notebook, setup: str, cell: str, message: str) -> None:
    book.ok(setup)
    book.ok("%%distributed --ranks 1 --out got\n" + cell)
    book.ok("x = None\ndel x")

    assert message in book.fails("%distributed_export got train.py").evalue


def test_a_cell_of_another_library_than_torch_is_not_a_script_for_torchrun(book: Notebook) -> None:
    book.ok("%%distributed --ranks 1 --strategy tensorflow --own-scope --out got\n1")

    refused = book.fails("%distributed_export got train.py").evalue
    assert (
        "a cell with --strategy tensorflow cannot become a script for torchrun, whose ranks compute with torch"
        in refused
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "%distributed_export NAME SCRIPT.py needs the name of a Results or Run"),
        ("got", "%distributed_export NAME SCRIPT.py needs the name of a Results or Run"),
        ("got train", "train is not the name of a Python script: write NAME.py"),
        ("got .py", ".py is not the name of a Python script: write NAME.py"),
        ("nothing train.py", "there is no run nothing in this notebook"),
        ("got /nowhere/train.py", "/nowhere/train.py cannot be written: No such file or directory"),
        ("got folder.py", "folder.py is a folder: write the name of a script in it"),
        ("got full.py", "full.py cannot be written: No space left on device"),
    ],
)
def test_a_wrong_export_is_refused(book: Notebook, line: str, message: str) -> None:
    book.ok("%%distributed --ranks 1 --out got\nrank")
    book.ok(
        dedent("""\
            import os
            os.makedirs('folder.py', exist_ok=True)
            os.path.lexists('full.py') or os.symlink('/dev/full', 'full.py')""")
    )

    assert message in book.fails(f"%distributed_export {line}").evalue
