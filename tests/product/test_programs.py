"""Programs as people write them are cells: magics, sources of functions, spawned processes, dispatch. Real kernel, real
ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook

ON_TWO = "%%distributed --ranks 2\n"
ON_ONE = "%%distributed --ranks 1\n"

pytestmark = pytest.mark.slow


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


# ---------------------------------------------------------------------------------------------------- arguments


def test_argument_parsers_find_a_program_name(book: Notebook) -> None:
    body = dedent("""\
        import argparse, sys
        from pathlib import Path
        str(Path(sys.argv[0]).with_suffix('.args')), argparse.ArgumentParser().format_usage(), sys.argv[1:]""")
    assert book.ok(ON_TWO + body).result == "ranks 0-1: ('cell.args', 'usage: cell.py [-h]\\n', [])"
    book.ok("from jupyter_distrib import distributed\nimport sys")
    assert book.ok("distributed(ranks=1)(lambda: sys.argv).distributed()").result == "rank 0: ['cell.py']"


def test_arguments_that_the_notebook_has_set_are_those_of_the_ranks(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import argparse, sys
            from jupyter_distrib import distributed
            before = sys.argv
            sys.argv = 'train.py --lr 5'.split()
            parser = argparse.ArgumentParser()
            parser.add_argument('--lr', default='1')
            def parsed(): return parser.parse_args().lr, sys.argv[0]""")
    )
    assert book.ok(ON_TWO + "parsed()").result == "ranks 0-1: ('5', 'train.py')"
    assert book.ok("distributed(ranks=1)(parsed).distributed()").result == "rank 0: ('5', 'train.py')"
    book.ok("sys.argv = ['']")
    assert book.ok(ON_TWO + "parsed()").result == "ranks 0-1: ('1', 'cell.py')"
    book.ok("sys.argv = before")
    assert book.ok(ON_TWO + "parsed()").result == "ranks 0-1: ('1', 'cell.py')"


def python(*command: str, folder: Path, stream: str = "stdout") -> str:
    """What a program prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(getattr(done, stream))


def test_a_function_of_a_script_has_the_arguments_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        dedent("""\
            import sys
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def arguments(): return sys.argv
            print(arguments.distributed()[0], arguments())
        """)
    )
    here = "['train.py', '--lr', '5']"
    assert python("train.py", "--lr", "5", folder=tmp_path) == f"{here} {here}\n"


def test_a_script_that_ends_before_its_runs_says_which(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        dedent("""\
            import time
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def nap(seconds): time.sleep(seconds)
            nap.submit(0).result()
            for _ in range(5): nap.submit(30)
        """)
    )
    told = python("train.py", folder=tmp_path, stream="stderr")
    assert told.startswith("nap(30), nap(30), nap(30) and 2 more: stopped because the program ended first. Wait")
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text().replace("range(5)", "[]"))
    assert python("train.py", folder=tmp_path, stream="stderr") == ""


def test_a_function_imports_relatively_where_the_program_does(book: Notebook, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("SIZE = 3")
    (package / "train.py").write_text(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def size():
                from .other import SIZE
                return SIZE, __package__
            print(size.distributed()[0], size())
        """)
    )
    assert python("-m", "pack.train", folder=tmp_path) == "(3, 'pack') (3, 'pack')\n"
    book.ok(
        dedent(f"""\
            import sys
            sys.path.append({str(tmp_path)!r})
            __package__ = 'pack'
            from .other import SIZE""")
    )
    assert book.ok(ON_ONE + "from . import other\nother.SIZE").result == "rank 0: 3"
    book.ok("del __package__\nsys.path.pop()")
    assert "no known parent package" in book.fails(ON_ONE + "from . import other").evalue


# ---------------------------------------------------------------------------------------------------- magics


def test_run_runs_a_script_on_every_rank(book: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        dedent("""\
            import sys, beside
            def twice(x):
                return beside.FACTOR * x
            print('script', sys.argv[1:], __name__)
            if __name__ == '__main__':
                found = twice(int(sys.argv[2]))
        """)
    )
    (tmp_path / "beside.py").write_text("FACTOR = 2\n")

    outcome = book.ok(f"{ON_TWO}%run {script} --x 21\nimport sys\nfound, sys.argv, twice(1), __name__")

    assert "[0-1] script ['--x', '21'] __main__" in outcome.view
    assert outcome.result == "ranks 0-1: (42, ['cell.py'], 2, '__main__')"


def test_run_ends_with_the_scripts_exit_and_tells_its_line(book: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert book.ok(f"{ON_ONE}%run {script} 0\n'went on'").result == "rank 0: 'went on'"
    assert "line 2" in book.fails(f"{ON_ONE}%run {script} 3").traceback
    assert book.ok(f"{ON_ONE}%run -e {script} 3\n'went on'").result == "rank 0: 'went on'"


def test_run_takes_modules_and_refuses_other_files_and_options(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("made = __name__\n")
    assert book.ok(f"{ON_ONE}import sys\nsys.path.insert(0, {str(tmp_path)!r})\n%run -m tool\nmade").result == (
        "rank 0: '__main__'"
    )
    assert "%run on a rank takes a Python file" in book.fails(ON_ONE + "%run notes.ipynb").traceback
    assert "%run -d cannot run on a rank" in book.fails(ON_ONE + "%run -d tool.py").traceback
    assert "there is no file missing.py" in book.fails(ON_ONE + "%run missing.py").traceback


def test_what_people_try_with_run_and_pasted_scripts_is_answered(book: Notebook, tmp_path: Path) -> None:
    refused = book.fails(f"{ON_ONE}%run -m tool --x 1").evalue
    assert refused.endswith("write %run -m tool -- --x 1"), refused
    assert (
        "run the script with %distributed_run" in book.fails(f"{ON_ONE}import os\nos.path.dirname(__file__)").traceback
    )


@pytest.mark.parametrize(
    ("name", "value"), [("TORCH_DISTRIBUTED_DEBUG", "DETAIL"), ("OMP_NUM_THREADS", "3"), ("MKL_NUM_THREADS", "3")]
)
def test_a_variable_that_torch_has_read_already_is_reported_with_its_cure(
    book: Notebook, name: str, value: str
) -> None:
    told = f"--env {name}={value}"
    assert told in book.ok(f"{ON_ONE}import os\nos.environ[{name!r}] = {value!r}").view
    assert told not in book.ok(f"{ON_ONE}rank").view
    assert told not in book.ok(f"{ON_ONE[:-1]} --env {name}={value}\nrank").view
    assert "PYTHONHASHSEED" not in book.ok(f"{ON_ONE}import os\nos.environ['PYTHONHASHSEED'] = '3'").view


def test_code_that_a_library_writes_into_its_cache_is_not_the_users(book: Notebook, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    (cache / "evaluate_modules").mkdir(parents=True)
    for made in (cache / "evaluate_modules" / "__init__.py", cache / "generated.py"):
        made.write_text("VALUE = 1\n")
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    line = f"{ON_ONE[:-1]} --env HF_HOME={cache}\n"
    imports = dedent(f"""\
        import sys
        sys.path[:0] = [{str(cache)!r}, {str(tmp_path)!r}]
        import evaluate_modules, generated, mine
    """)
    book.ok(line + imports)
    for changed in (cache / "evaluate_modules" / "__init__.py", cache / "generated.py", tmp_path / "mine.py"):
        changed.write_text("VALUE = 22\n")
    outcome = book.ok(f"{line}{imports}mine.VALUE")
    assert outcome.result == "rank 0: 22"
    assert "mine.py has changed" in outcome.view
    assert "generated.py has changed" not in outcome.view
    assert "__init__.py has changed" not in outcome.view


def test_time_of_a_whole_cell_is_reported_below_the_magic_line(book: Notebook) -> None:
    outcome = book.ok(f"{ON_TWO}%%time\ny = 40\ny + 2")
    assert "wall time" in outcome.view
    assert outcome.result == "ranks 0-1: 42"
    failed = book.fails(f"{ON_ONE}\n%%time\n1 / 0")
    assert "wall time" in failed.view
    assert "line 4" in failed.traceback


def test_timeit_measures_on_each_rank(book: Notebook) -> None:
    book.ok("data = list(range(100))\ndef work(x): return sum(x)")
    view = book.ok(f"{ON_TWO}%timeit -n 3 -r 2 work(data)").view
    assert view.count("per loop (mean ± std. dev. of 2 runs, 3 loops each)") == 2
    assert book.ok(f"{ON_ONE}t = %timeit -o -q -n2 -r4 work(data)\nt.loops, t.repeat, t.best > 0").result == (
        "rank 0: (2, 4, True)"
    )
    assert "%timeit -n must be a whole number" in book.fails(f"{ON_ONE}%timeit -n x 1").evalue


def test_timeit_calls_a_collective_equally_often_on_all_ranks(book: Notebook) -> None:
    body = """
import time, torch, torch.distributed as dist
x, calls = torch.ones(1), [0]
def meet():
    calls[0] += 1
    dist.all_reduce(x)
    if rank == 1: time.sleep(0.02)
if rank == 0:
    %timeit -r 1 sum(range(10))
%timeit -r 2 meet()
%timeit -r 2 meet()
calls[0]
"""
    result = book.ok(f"{ON_TWO[:-1]} --strategy ddp\n{body}").result
    assert result.startswith("ranks 0-1: ")


BACKSPACES = """
for each in "|/-":
    print(each, end="\\b", flush=True)
print("done")
print("10 %" + 4 * "\\b" + "100 %")
"""


def test_backspaces_move_the_cursor(book: Notebook) -> None:
    assert "[0] done\n[0] 100 %" in book.ok(ON_ONE + BACKSPACES).view


# -------------------------------------------------------------------------------------------------- decorators


def test_the_wrapper_of_a_librarys_decorator_uses_the_librarys_own_state(book: Notebook, tmp_path: Path) -> None:
    """As of gin, pydantic and others: the wrapper looks like a function of the notebook, and its globals are those of a
    module, locks included."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "counting_library.py").write_text("""
import functools, threading
LOCK, calls = threading.Lock(), 0
def counted(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        global calls
        with LOCK:
            calls += 1
        return function(*arguments)
    return wrapper
""")
    book.ok(f"import sys\nsys.path.append({str(tmp_path / 'site-packages')!r})")
    book.ok(
        dedent("""\
            import counting_library
            @counting_library.counted
            def double(x): return 2 * x * scale
            scale = 1""")
    )
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2
            scale = 5
            double(1), double(2), counting_library.calls""")
    )
    assert "(10, 20, 2)" in outcome.result


def test_context_variables_and_thread_locals_of_a_module_are_those_that_it_reads(
    book: Notebook, tmp_path: Path
) -> None:
    """`from module import variable` gives the object itself, which has no name by which pickle could find it."""
    (tmp_path / "with_state.py").write_text(
        dedent("""\
            from contextvars import ContextVar
            import threading
            variable, local = ContextVar('depth', default=0), threading.local()
            def told(): return variable.get(), local.x, local.y
        """)
    )
    book.ok(f"import sys; sys.path.append({str(tmp_path)!r})\nfrom with_state import local, told, variable")
    book.ok("variable.set(4)\nlocal.x = 6")
    cell = dedent("""\
        %%distributed --ranks 2
        variable.set(variable.get() + rank)
        local.y = rank
        told()""")
    assert book.ok(cell).result == "rank 0: (4, 6, 0)\nrank 1: (5, 6, 1)"


# ------------------------------------------------------------------------------------------- files of libraries

_FILES = """
import os, weakref
open_file = open
class Error(Exception): pass
opened = weakref.WeakValueDictionary()
class Environment:
    def __init__(self, path, readonly=False, **options):
        with open_file(path + "/data.mdb") as file: self.content, number = file.read(), os.fstat(file.fileno()).st_ino
        if number in opened: raise Error("already open in this process")
        opened[number] = self
        self.options = {"readonly": readonly, "subdir": True, "lock": False, "readahead": True, **options}
        self._path = path
    def flags(self): return self.options
    def info(self): return {"map_size": 1, "max_readers": 2}
    def path(self): return self._path
    def __reduce__(self): raise TypeError("cannot be pickled")
class Group:
    def __init__(self, file, name): self.file, self.name = file, name
    def __getitem__(self, name): return Dataset(self.file, name)
    def __reduce__(self): raise TypeError("cannot be pickled")
class Dataset(Group):
    def read(self): return open_file(self.file.filename).read() + self.name
class File(Group):
    swmr_mode = False
    def __init__(self, filename, mode="r", swmr=False): self.filename, self.mode, self.file = filename, mode, self
"""


def test_files_of_libraries_that_are_open_for_reading_are_opened_again(book: Notebook, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for library in ("h5py", "lmdb"):
        (folder / f"{library}.py").write_text(_FILES)
    with (folder / "lmdb.py").open("a") as file:
        file.write("open = Environment\n")
    with (folder / "h5py.py").open("a") as file:
        file.write("File.driver = 'sec2'\nclass AttributeManager: pass\n")
    (tmp_path / "data").write_text("numbers ")
    (tmp_path / "data.mdb").write_text("first")
    book.ok(f"import sys; sys.path.append({str(folder)!r})")
    book.ok(f"""
import h5py, lmdb
class Lazy:
    file = None
    def __getitem__(self, name):
        if self.file is None: self.file = h5py.File({str(tmp_path / "data")!r})
        return self.file[name].read()
lazy, environment = Lazy(), lmdb.Environment({str(tmp_path)!r}, readonly=True)
part = h5py.File({str(tmp_path / "data")!r})["y"]
lazy["x"]
""")
    for used in ("environment", f"lmdb.open({str(tmp_path)!r})"):  # a process may not have it twice
        assert book.ok(f"%%distributed --ranks 1\n{used}.content").result == "rank 0: 'first'"
    cell = dedent("""\
        %%distributed --ranks 1
        here, = lmdb.opened.values()
        lazy['x'], part.read(), environment.options['max_readers'], here is environment is again, environment.content""")
    book.ok("again = environment")
    for _ in range(2):
        assert book.ok(cell).result == "rank 0: ('numbers x', 'numbers y', 2, True, 'first')"

    (tmp_path / "new").write_text("second")
    (tmp_path / "new").rename(tmp_path / "data.mdb")  # as a data set that is made anew
    book.ok(f"environment = again = lmdb.Environment({str(tmp_path)!r}, readonly=True)")
    assert book.ok(cell).result == "rank 0: ('numbers x', 'numbers y', 2, True, 'second')"

    other = tmp_path / "other"
    other.mkdir()
    (other / "data.mdb").write_text("")
    book.ok(f"written, changed = h5py.File({str(tmp_path / 'data')!r}, 'r+'), lmdb.Environment({str(other)!r})")
    assert "open it with mode 'r', or in the cell" in book.fails("%%distributed --ranks 1\nwritten").evalue
    assert "open it with readonly=True, or in the cell" in book.fails("%%distributed --ranks 1\nchanged").evalue
    book.ok("attributes = h5py.AttributeManager()")
    assert "take dict(x.attrs)" in book.fails("%%distributed --ranks 1\nattributes").evalue


# ---------------------------------------------------------------------------------------------- refused, with advice


@pytest.mark.parametrize(
    ("makes", "advice"),
    [
        ("import sqlite3; thing = sqlite3.connect(':memory:')", "connect in the cell"),
        ("import ipywidgets; thing = ipywidgets.IntSlider()", "give its value a name in an earlier cell"),
        ("from tqdm import tqdm; thing = tqdm([1])", "make it in the cell, `tqdm(...)`"),
    ],
)
def test_what_stays_in_the_notebook_is_refused_with_what_to_do(book: Notebook, makes: str, advice: str) -> None:
    book.ok(makes)
    cell = dedent("""\
        %%distributed --ranks 2
        print(1)
        thing""")
    told = book.fails(cell).evalue
    assert told.startswith("`thing` (used on line 3) is a ")
    assert advice in told
    book.ok("getattr(thing, 'close', print)()")


def test_a_console_of_rich_prints_on_the_ranks(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").touch()
    (tmp_path / "rich" / "console.py").write_text("""
import sys, threading
class Console:
    def __init__(self, width=None, file=None):
        self.width, self._file, self._lock = width, file, threading.RLock()
    @property
    def file(self): return self._file or sys.stdout
    def print(self, text):
        with self._lock: print(text.center(self.width), file=self.file)
""")
    book.ok(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    book.ok(
        dedent("""\
            import io
            from rich.console import Console
            console, to_file = Console(width=9), Console(file=io.StringIO())""")
    )
    assert "[0-1]    one" in book.ok("%%distributed --ranks 2\nconsole.print('one')").view
    assert "writes to a file of the notebook" in book.fails("%%distributed --ranks 2\nto_file").evalue


# ---------------------------------------------------------------------------------------------------- sources


def test_sources_are_there_when_an_object_of_the_notebook_is_rebuilt(book: Notebook) -> None:
    book.ok("""
import inspect
def scaled(x):
    return 3 * x
class Kernel:
    def __init__(self, function):
        self.source = inspect.getsource(function)
        self.function = function
    def __reduce__(self):
        return Kernel, (self.function,)
kernel = Kernel(scaled)
""")
    assert "return 3 * x" in book.ok("%%distributed --ranks 2\nkernel.source").result


def test_sources_of_the_notebooks_functions_are_on_the_ranks(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import inspect, traceback, torch
            def scaled(x: int) -> int:
                return 3 * x
            class Net(torch.nn.Module):
                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return x + 1
            def broken():
                raise ValueError('told')
        """)
    )
    body = dedent("""\
        scripted = torch.jit.script(Net())
        try:
            broken()
        except ValueError:
            told = traceback.format_exc()
        inspect.getsource(scaled).splitlines()[1].strip(), float(scripted(torch.zeros(1))), "raise ValueError" in told""")
    assert book.ok(ON_ONE + body).result == "rank 0: ('return 3 * x', 1.0, True)"


def test_a_traceback_shows_no_line_that_nobody_wrote(book: Notebook) -> None:
    book.ok("from __future__ import annotations\nimport inspect, sys")
    body = "def typed(x: Nowhere) -> None: ...\ntyped.__annotations__['x'], inspect.getsource(inspect.currentframe())"
    outcome = book.ok(ON_ONE + body)
    assert "Nowhere" in outcome.result
    assert "__future__" not in outcome.result


# ---------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_process_finds_what_notebook_and_cell_define(book: Notebook, method: str) -> None:
    book.ok(
        dedent("""\
            import math
            offset = 100
            class Shape:
                def __init__(self, side): self.side = side
            def area(shape): return offset + math.prod([shape.side, shape.side])""")
    )
    body = f"""
import multiprocessing
context = multiprocessing.get_context({method!r})
class Cube(Shape):
    pass
def work(queue, shape):
    queue.put((area(shape), shape))
queue = context.Queue()
child = context.Process(target=work, args=(queue, Cube(3)))
child.start()
number, shape = queue.get()
child.join()
number, type(shape) is Cube, child.exitcode
"""
    assert book.ok(ON_ONE + body).result == "rank 0: (109, True, 0)"


def test_a_start_method_is_chosen_once_a_cell(book: Notebook) -> None:
    choose = ON_TWO + dedent("""\
        import multiprocessing as mp
        {}
        mp.get_start_method()""")
    for method in ("spawn", "forkserver", "spawn"):
        assert book.ok(choose.format(f"mp.set_start_method({method!r})")).result == f"ranks 0-1: {method!r}"
    assert book.ok(choose.format("mp.get_start_method(allow_none=True)")).result == "ranks 0-1: 'fork'"
    twice = "mp.set_start_method('spawn'); mp.set_start_method('fork')"
    assert "context has already been set" in book.fails(choose.format(twice)).evalue
    assert book.ok(choose.format("import torch.multiprocessing as mp\nmp.set_start_method('spawn')")).result == (
        "ranks 0-1: 'spawn'"
    )


def test_a_number_of_interop_threads_may_be_set_by_each_cell(book: Notebook) -> None:
    body = dedent("""\
        import torch
        torch.set_num_interop_threads({0})
        torch.get_num_interop_threads()""")
    assert book.ok(f"{ON_TWO[:-1]} --fresh\n{body.format(3)}").result == "ranks 0-1: 3"
    assert book.ok(ON_TWO + body.format(3)).result == "ranks 0-1: 3"
    assert "cannot set number of interop threads" in book.fails(ON_TWO + body.format(4)).evalue


SPAWNS = """\
import multiprocessing, os, sys
def work(queue):
    queue.put(os.path.basename(sys.argv[0]))
if __name__ == "__main__":
    {change}
    queue = multiprocessing.get_context({method!r}).Queue()
    child = multiprocessing.get_context({method!r}).Process(target=work, args=(queue,))
    child.start()
    told, _ = queue.get(timeout=30), child.join()
    print("told", told, child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_of_a_cell_may_spawn_processes(book: Notebook, tmp_path: Path, method: str) -> None:
    book.ok(
        dedent(f"""\
            import os, sys
            here = os.getcwd()
            os.chdir({str(tmp_path)!r})
            sys.path.insert(0, os.getcwd())""")
    )
    (tmp_path / "main.py").write_text(SPAWNS.format(change="", method=method))
    (tmp_path / "moves.py").write_text(SPAWNS.format(change="os.chdir('/')", method=method))
    told = [
        book.ok(ON_ONE + run).view
        for run in (
            "%run main.py",
            "%run moves.py",
            "%run -m main",
            "import runpy\nrunpy.run_path('main.py', run_name='__main__')",
        )
    ]
    book.ok("os.chdir(here)\nsys.path.pop(0)")
    assert ["told " in each and " 0\n" in each + "\n" for each in told] == [True] * 4, told


def test_workers_of_a_data_loader_may_be_spawned(book: Notebook) -> None:
    book.ok("factor = 10")
    body = """
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return factor * i
[x.tolist() for x in DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn")]
"""
    assert book.ok(ON_ONE + body).result == "rank 0: [[0, 10], [20, 30]]"


def test_what_a_spawned_process_cannot_be_given_is_reported_by_name(book: Notebook) -> None:
    body = """
import multiprocessing, threading
lock = threading.Lock()
def locked():
    with lock:
        print("never")
def free():
    print("works all the same")
context = multiprocessing.get_context("spawn")
children = [context.Process(target=each) for each in (free, locked)]
for child in children: child.start()
for child in children: child.join()
[child.exitcode for child in children]
"""
    outcome = book.ok(ON_ONE + body)
    assert outcome.result == "rank 0: [0, 1]"
    assert "works all the same" in outcome.view
    assert "`locked` cannot be given to a spawned process" in outcome.view
    assert "cannot pickle '_thread.lock' object" in outcome.view


# ---------------------------------------------------------------------------------------------------- names


def test_functions_with_single_dispatch_travel_and_come_back(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from functools import singledispatch, singledispatchmethod
            @singledispatch
            def shown(x): return 'thing'
            @shown.register
            def _(x: int): return f'number {x}'
            @shown.register(list)
            def _(x): return [shown(each) for each in x]
            class Printer:
                @singledispatchmethod
                def show(self, x): return 'thing'
                @show.register
                def _(self, x: int): return 'number'
        """)
    )
    outcome = book.ok(
        "%%distributed --ranks 1 --out got\nshown([1, 'a']), Printer().show(1), Printer().show('a'), shown"
    )
    assert outcome.result.startswith("rank 0: (['number 1', 'thing'], 'number', 'thing', <function shown")
    assert book.ok("got[0][3] is shown").result == "True"
    body = dedent("""\
        @singledispatch
        def mine(x): return 'other'
        @mine.register
        def _(x: int): return 'number'
        mine""")
    book.ok("%%distributed --ranks 1 --out back\n" + body)
    assert book.ok("back[0](1), back[0]('a')").result == "('number', 'other')"


@pytest.mark.parametrize(
    "body",
    [
        "code = 'hidden + 1'\neval(code)",
        dedent("""\
            import typing
            Shown = typing.Optional['hidden']
            class typed:
                x: Shown
            typing.get_type_hints(typed)"""),
    ],
)
def test_a_name_of_the_notebook_that_only_text_reads_is_reported_with_its_cure(book: Notebook, body: str) -> None:
    book.ok("hidden = int")
    told = book.fails(ON_ONE + body).traceback
    assert "`hidden` is in the notebook, but the cell only reads it through eval" in told
    assert "--with hidden" in told
    assert "--with nowhere" not in book.fails(ON_ONE + "eval('nowhere')").traceback


def test_a_cells_own_keyboard_interrupt_is_reported_at_once(book: Notebook) -> None:
    book.ok(ON_ONE + "rank")
    outcome = book.fails(ON_ONE + "raise KeyboardInterrupt('by the cell itself')")
    assert outcome.ename == "KeyboardInterrupt"
    assert "by the cell itself" in outcome.traceback
    assert "line 2" in outcome.traceback
    assert "Stopped" not in outcome.text
    assert outcome.wall_s < 1.0


# ---------------------------------------------------------------------------------------------------- annotations

TYPED = """
from __future__ import annotations
import dataclasses, typing
from dataclasses import dataclass, field
from typing import Annotated, Literal, Optional
LIMIT, size, Small = 7, list(range(9)), int
class Inner: pass
@dataclass
class Base:
    seen: Optional[Inner] = None
@dataclass
class Args(Base):
    rate: Optional[Small] = 3
    mode: Literal["size"] = "size"
    inner: Inner = field(default_factory=Inner)
    path: typing.Sequence["Small"] = ()
made = Args()
def train(args: Args, limit: Annotated[Small, LIMIT] = 3) -> Optional[Base]: ...
"""
QUOTED = """
import typing
from typing import Optional
class Inner: pass
class Args:
    inner: "Inner"
    more: Optional["Inner"] = None
    most: list["Optional[Inner]"] = ()
class Net:
    def forward(self, x: "Inner") -> "Net": ...
def train(args: "Args") -> "Optional[Inner]": ...
"""


@pytest.mark.parametrize("target", ["Args", "type(made)", "train", "Args.__init__"])
def test_type_hints_of_the_notebook_resolve_under_postponed_annotations(book: Notebook, target: str) -> None:
    book.ok(TYPED)
    hints = f"' '.join(str(each) for each in typing.get_type_hints({target}).values())"
    assert book.ok(ON_ONE + hints).result == f"rank 0: {book.ok(hints).result}"


@pytest.mark.parametrize("target", ["Args", "Net.forward", "train"])
def test_type_hints_of_the_notebook_resolve_in_quotes(book: Notebook, target: str) -> None:
    book.ok(QUOTED)
    hints = f"import typing\n' '.join(str(each) for each in typing.get_type_hints({target}).values())"
    assert book.ok(ON_ONE + hints).result == f"rank 0: {book.ok(hints).result}"


def test_type_hints_of_the_cell_read_names_of_the_notebook(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from typing import Optional
            class Inner: pass
            secret = __import__('threading').Lock()""")
    )
    quoted = dedent("""\
        import typing
        class Args:
            inner: 'Optional[Inner]'
            outer: typing.List['Inner']
            mode: typing.Literal['secret'] = 'secret'
        len(typing.get_type_hints(Args))""")
    assert book.ok(ON_ONE + quoted).result == "rank 0: 3"
    postponed = dedent("""\
        from __future__ import annotations
        import typing
        from dataclasses import dataclass
        @dataclass
        class Args:
            inner: Optional[Inner]
            lock: secret = 0
        len(typing.get_type_hints(Args, localns={'secret': int}))""")
    assert book.ok(ON_ONE + postponed).result == "rank 0: 2"


# ---------------------------------------------------------------------------------------------------- callables


CALLABLES = """
import functools
from jupyter_distrib import distributed
class Trainer:
    def __init__(self, rate): self.rate, self.submit = rate, "its own"
    def __call__(self, x): return self.rate * x
    def fit(self, x): return self.rate + x
def train(x, rate): return rate * x
"""


@pytest.mark.parametrize(
    "function",
    [
        "functools.partial(train, rate=2)",
        "functools.partial(functools.partial(train), rate=2)",
        "Trainer(2)",
        "Trainer(2).fit",
        "functools.partial(Trainer(2))",
        "lambda x: 2 * x",
    ],
)
def test_any_callable_runs_on_ranks(book: Notebook, function: str) -> None:
    book.ok(CALLABLES + f"run = distributed(ranks=1)({function})")
    here = book.ok("run(3)").result
    assert book.ok("run.distributed(3)").result == f"rank 0: {here}"
    assert book.ok("run.submit(3).result()").result == f"rank 0: {here}"
    assert "distributed()" in book.fails("run.distributed()").evalue
    book.ok("%distributed_compat spark\nfrom pyspark.ml.torch.distributor import TorchDistributor")
    assert book.ok(f"TorchDistributor(1, use_gpu=False).run({function}, 3)").result == here


def test_a_coroutine_function_is_awaited_on_the_ranks(book: Notebook) -> None:
    book.ok(
        CALLABLES
        + dedent("""\
            async def later(x): return 2 * x
            class Later:
                async def __call__(self, x): return 3 * x
            calls = [distributed(ranks=1)(each) for each in (later, functools.partial(later), Later())]""")
    )
    assert book.ok("[call.distributed(3)[0] for call in calls]").result == "[6, 6, 9]"
    assert book.ok("calls[0].submit(4).result()[0], await calls[0](5)").result == "(8, 10)"


# ---------------------------------------------------------------------------------------------------- displays


CHART = """
class Chart:
    def __repr__(self): return "alt.Chart(...)"
    def _repr_mimebundle_(self, **_):
        return {"application/vnd.vegalite.v5+json": {"mark": "bar"}, "text/plain": repr(self)}
class Picture(Chart):
    def _repr_mimebundle_(self, **_):
        return {**super()._repr_mimebundle_(), "text/html": "<b>shown</b>"}
"""


def test_a_display_that_needs_code_in_the_page_is_reported_once(book: Notebook) -> None:
    told = "a display of application/vnd.vegalite.v5+json is left out"
    view = book.ok(f"{ON_ONE}{CHART}for _ in range(3): display(Chart())").view
    assert view.count(told) == 1
    assert "end the cell with the object" in view
    raw = "display({'application/javascript': 'alert(1)'}, raw=True)"
    assert "a display of application/javascript is left out" in book.ok(ON_ONE + raw).view
    assert "left out" not in book.ok(f"{ON_ONE}{CHART}display(Picture())").view


def test_plotly_finds_a_renderer_on_ranks(book: Notebook) -> None:
    pytest.importorskip("nbformat", reason="plotly displays nothing without it")
    assert book.ok(f"{ON_ONE}import os\nos.environ['PLOTLY_RENDERER']").result == "rank 0: 'plotly_mimetype'"
    book.ok("import os\nos.environ['PLOTLY_RENDERER'] = 'png'")
    assert book.ok(f"{ON_ONE}import os\nos.environ['PLOTLY_RENDERER']").result == "rank 0: 'png'"
    book.ok("del os.environ['PLOTLY_RENDERER']")


# ---------------------------------------------------------------------------------------------------- asyncio


ASYNC = """\
import asyncio
async def work(x=3):
    await asyncio.sleep(0)
    return x
"""


def test_each_cell_begins_without_the_event_loop_of_another(book: Notebook) -> None:
    finds_loop = ON_TWO + ASYNC + "asyncio.get_event_loop().run_until_complete(work())"
    for before in ("await work()", "asyncio.run(work())", "loop = asyncio.new_event_loop()\nloop.close()", "3"):
        book.ok(f"{ON_TWO}{ASYNC}{before};")
        assert book.ok(finds_loop).result == "ranks 0-1: 3"
    closed = dedent("""\
        loop = asyncio.get_event_loop()
        loop.run_until_complete(work())
        loop.close()""")
    for _ in range(2):
        book.ok(f"{ON_TWO}{ASYNC}{closed};")


def test_a_task_in_a_cell_that_awaits_nothing_says_what_to_do(book: Notebook) -> None:
    told = book.fails(f"{ON_ONE}{ASYNC}task = asyncio.create_task(work())").traceback
    assert "no running event loop" in told
    assert "`await` the task in this cell" in told
    assert book.ok(f"{ON_ONE}{ASYNC}task = asyncio.create_task(work())\nawait task").result == "rank 0: 3"


@pytest.mark.parametrize(
    "body",
    [
        "work()",
        "kept = work()\n1",
        "work();1",
        "def hold():\n    work()\nhold()\n1",
        "def hold(c):\n    1 / 0\nhold(work())",
        "class Node: pass\nnode = Node()\nnode.me, node.task = node, work()\n1",
    ],
)
def test_a_coroutine_that_is_never_awaited_is_reported_with_the_users_line(book: Notebook, body: str) -> None:
    outcomes = [book.cell(f"{ON_ONE}{ASYNC}{body}"), book.ok(f"{ON_ONE}import gc\ngc.collect();")]
    text = "".join(each.text for each in outcomes)
    assert "jupyter_distrib" not in "".join(line for line in text.splitlines() if "never awaited" in line)


# ---------------------------------------------------------------------------------------------------- connections


KILLED_WORKER = """
import os, signal
from torch.utils.data import DataLoader
class Numbers:
    def __len__(self): return 4
    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)
list(DataLoader(Numbers(), num_workers=1))
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "Connection refused"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')", "Connection refused"),
        (
            "if rank == 0: raise ConnectionResetError(104, 'Connection reset by peer')\nraise ValueError",
            "reset by peer",
        ),
        ("raise RuntimeError('the tracker is gone: broken pipe') if rank == 0 else ValueError()", "broken pipe"),
        (KILLED_WORKER, "DataLoader worker"),
    ],
    ids=["socket", "url", "reset", "text", "worker"],
)
@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_broken_connection_of_the_cells_own_is_reported_as_what_it_is(
    book: Notebook, body: str, told: str, strategy: str
) -> None:
    outcome = book.fails(f"{ON_TWO[:-1]} --strategy {strategy}\n{body}")
    assert told in outcome.view
    assert "stopped because another rank" not in outcome.text
    assert "failed  stopped because" not in outcome.view  # a rank that was interrupted may have been


def test_a_rank_that_loses_another_is_told_so(book: Notebook) -> None:
    body = dedent("""\
        import os, torch, torch.distributed as dist
        if rank == 1: os._exit(3)
        dist.all_reduce(torch.ones(2))""")
    outcome = book.fails(f"{ON_TWO[:-1]} --strategy ddp\n{body}")
    assert "rank 0  failed  stopped because of rank 1" in outcome.view or "Rank 0 stopped" in outcome.text


# ---------------------------------------------------------------------------------------------------- finalizers


NOISY = """
import time
class Noisy:
    def __del__(self):
        raise ValueError("told by a finalizer")
def work(seconds):
    noisy = Noisy()
    print("ready", flush=True)
    time.sleep(seconds)
"""


def test_what_finalizers_raise_is_seen_unless_it_follows_from_a_stop(book: Notebook) -> None:
    assert "told by a finalizer" in book.ok(ON_ONE + NOISY + "work(0)").view

    book.start(ON_ONE + NOISY + "work(100)")
    book.until("ready")
    book.interrupt()
    outcome = book.finish()

    assert outcome.ename == "KeyboardInterrupt"
    assert "finalizer" not in outcome.text.replace(NOISY, "")


# ---------------------------------------------------------------------------------------------------- folders


def test_a_folder_of_the_notebook_that_is_gone_is_reported(book: Notebook, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    book.ok(
        dedent(f"""\
            import os
            before = os.getcwd()
            os.chdir({str(folder)!r})
            os.rmdir({str(folder)!r})""")
    )
    told = book.fails(ON_ONE + "rank").traceback
    book.ok("%distributed_pool stop")
    assert "No ranks are up" in book.ok("%distributed_status").text
    book.ok("os.chdir(before)")
    assert told == "OptionsError: the notebook's working folder was deleted or moved: change to one that exists (%cd)"
    assert book.ok(ON_ONE + "rank").result == "rank 0: 0"


# ---------------------------------------------------------------------------------------------------- errors


def test_each_exception_of_a_group_is_reported_with_its_line(book: Notebook) -> None:
    body = dedent("""\
        import asyncio
        async def bad(what):
            raise ValueError(what)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bad('first'))
            tasks.create_task(bad('second'))""")
    told = book.fails(ON_TWO + body).traceback
    assert "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)" in told
    for number, what in enumerate(("first", "second"), 1):
        assert any(
            line.startswith(f"  {number}. ValueError: {what} (Cell In[") and line.endswith("], line 4)")
            for line in told.splitlines()
        ), told
    nested = "raise ExceptionGroup('outer', [ExceptionGroup('inner', [KeyError('lr')])])"
    assert "  1.1. KeyError: 'lr'" in book.fails(ON_TWO + nested).traceback.splitlines()


@pytest.mark.parametrize("kept", [False, True], ids=["sent", "kept"])
def test_a_model_is_saved_whole_in_a_cell_that_does_not_name_its_class(book: Notebook, kept: bool) -> None:
    """`torch.save(model)` looks for the class in `__main__`."""
    book.ok(
        dedent("""\
            import torch
            class Block(torch.nn.Linear): pass
            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.block = Block(2, 2)
            model = Net()""")
    )
    if kept:
        book.ok("%%distributed --ranks 1 --keep model\nmodel = model")
    body = "torch.save(model, 'whole.pt')\ntype(torch.load('whole.pt', weights_only=False).block).__name__"
    assert book.ok(f"{ON_ONE}import torch\n{body}").result == "rank 0: 'Block'"
    assert book.ok("type(torch.load('whole.pt', weights_only=False)) is Net").result == "True"


def test_spawned_workers_read_a_data_set_whose_class_the_cell_does_not_name(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from torch.utils.data import DataLoader
            class Numbers:
                def __len__(self): return 4
                def __getitem__(self, at): return at
            numbers = Numbers()""")
    )
    body = "[x.tolist() for x in DataLoader(numbers, 2, num_workers=1, multiprocessing_context='spawn')]"
    assert book.ok(ON_ONE + body).result == "rank 0: [[0, 1], [2, 3]]"


def test_a_file_with_objects_of_the_notebooks_classes_says_what_to_send(book: Notebook) -> None:
    """`torch.save(model)` names the class only."""
    book.ok(
        dedent("""\
            import torch
            class Net(torch.nn.Linear): pass
            torch.save(Net(2, 2), 'net.pt')""")
    )
    load = "import torch\ntype(torch.load('net.pt', weights_only=False)).__name__"

    assert (
        "needs Net of the notebook, which this cell does not name: add --with Net."
        in book.fails(ON_TWO + load).traceback
    )
    assert book.ok(f"%%distributed --ranks 2 --with Net\n{load}").result == "ranks 0-1: 'Net'"
