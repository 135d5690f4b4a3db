"""A distributed cell means what a notebook cell means: real kernel, real ranks."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until

ON_TWO = "%%distributed --ranks 2\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


def both(book: Notebook, body: str) -> object:
    """The value of a cell whose two ranks return equal values."""
    result = book.ok(ON_TWO + body).result
    assert result.startswith("ranks 0-1: "), result
    return ast.literal_eval(result.removeprefix("ranks 0-1: "))


# ---------------------------------------------------------------------------------------------------- names


def test_a_captured_name_can_be_changed_in_place_on_the_ranks_only(book: Notebook) -> None:
    book.ok("x = 1")

    assert both(book, "x += 1\nx") == 2
    assert book.ok("x").result == "1"


def test_globals_holds_what_the_cell_and_the_notebook_defined(book: Notebook) -> None:
    book.ok("before = 1")

    assert both(book, "mine = before\nsorted({'mine', 'before', 'rank'} & globals().keys()), __name__") == (
        ["before", "mine", "rank"],
        "__main__",
    )


def test_a_name_that_only_exec_reaches_is_added_by_with(book: Notebook) -> None:
    book.ok("hidden = 20")

    assert both(book, "exec('y = 5')\ny") == 5
    assert "NameError" in book.fails(ON_TWO + "exec('z = hid' + 'den + 1')").traceback
    cell = dedent("""\
        %%distributed --ranks 2 --with hidden
        exec('z = hid' + 'den + 1')
        z""")
    result = book.ok(cell).result
    assert result == "ranks 0-1: 21"


def test_comprehensions_lambdas_and_generators_see_the_cells_names(book: Notebook) -> None:
    book.ok("base = 10")

    assert both(book, "k = 2\n[i * k + base for i in range(2)], (lambda: base + k)(), sum(k for _ in range(3))") == (
        [10, 12],
        12,
        6,
    )


def test_classes_and_functions_of_the_cell_see_its_globals(book: Notebook) -> None:
    body = """
factor = 3
class Scaled:
    unit = factor
    def of(self, x):
        return x * factor * self.unit
def call(x):
    return Scaled().of(x)
call(2)
"""
    assert both(book, body) == 18


def test_dataclasses_and_enums_can_be_defined_in_a_cell(book: Notebook) -> None:
    body = """
from dataclasses import dataclass, field, replace
from enum import Enum
class Mode(Enum):
    FAST = 1
@dataclass(frozen=True)
class Config:
    lr: float
    mode: "Mode" = Mode.FAST
    names: list[str] = field(default_factory=list)
str(replace(Config(0.1), lr=0.2)), Config.__module__, Config(1.0) == Config(1.0)
"""
    assert both(book, body) == ("Config(lr=0.2, mode=<Mode.FAST: 1>, names=[])", "__main__", True)


def test_instances_of_classes_of_the_cell_can_be_pickled_there(book: Notebook) -> None:
    body = """
import pickle, copy
class Point:
    def __init__(self, x):
        self.x = x
again = pickle.loads(pickle.dumps(Point(4)))
type(again) is Point, again.x, copy.deepcopy(again).x
"""
    assert both(book, body) == (True, 4, 4)


def test_a_function_of_the_notebook_sees_and_sets_the_cells_variables(book: Notebook) -> None:
    book.ok("""
counter = 0
def bump():
    global counter
    counter += 1
    return counter
""")

    assert both(book, "counter = 10\n(bump(), counter)") == (11, 11)
    assert book.ok("counter").result == "0"


def test_functions_of_the_notebook_may_call_each_other(book: Notebook) -> None:
    book.ok("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)")

    assert both(book, "even(10), odd(10)") == (True, False)


def test_decorators_and_closures_of_the_notebook_work(book: Notebook) -> None:
    book.ok("""
import functools
def twice(function):
    @functools.wraps(function)
    def wrapper(*args):
        return 2 * function(*args)
    return wrapper
def adder(n):
    return lambda x: x + n
@twice
def plus_one(x):
    return x + 1
add_five = adder(5)
@functools.lru_cache
def cached(x):
    return x * 3
""")

    cell = dedent("""\
        @twice
        def mine(x): return x
        plus_one(1), add_five(1), mine(4), cached(2)""")
    assert both(book, cell) == (4, 6, 8, 6)


def test_modules_that_the_notebook_imported_are_there_under_its_names(book: Notebook) -> None:
    book.ok("import numpy as np, os.path as osp, torch.nn.functional as F\nfrom math import sqrt as root")

    assert both(book, "int(np.int64(3)), osp.join('a', 'b'), F.relu.__name__, root(9)") == (3, "a/b", "relu", 3.0)


def test_a_users_own_variable_named_rank_wins(book: Notebook) -> None:
    book.ok("rank = 'mine'")
    assert both(book, "rank") == "mine"
    assert both(book, "device = 5\ndevice") == 5

    book.ok("del rank")
    assert book.ok(ON_TWO + "rank, local_rank, world_size, str(device)").result == (
        "rank 0: (0, 0, 2, 'cpu')\nrank 1: (1, 1, 2, 'cpu')"
    )


def test_nothing_of_a_cell_is_left_for_the_next(book: Notebook) -> None:
    book.ok(ON_TWO + "left = 1")

    assert both(book, "'left' in globals()") is False


def test_a_future_import_holds_in_the_cell(book: Notebook) -> None:
    cell = dedent("""\
        from __future__ import annotations
        def f(x: Nowhere) -> None: ...
        f.__annotations__['x']""")
    assert both(book, cell) == "Nowhere"


def test_a_cell_without_statements_does_nothing(book: Notebook) -> None:
    assert book.ok(ON_TWO + "# only a comment").text == ""


# ---------------------------------------------------------------------------------------------------- IPython's syntax


def test_a_task_that_has_not_ended_with_the_cell_is_reported_at_once_and_once(book: Notebook) -> None:
    define = dedent("""\
        import asyncio
        async def later(s=0):
            await asyncio.sleep(s)
            print('ran')
    """)
    makes = [define + "await asyncio.sleep(0)\ntask = asyncio.create_task(later(60))\nawait asyncio.sleep(0)"]
    if sys.version_info < (3, 14):  # there it raises: no event loop
        makes.append(define + "task = asyncio.ensure_future(later())")
    for make in makes:
        told = book.ok(f"%%distributed --ranks 2\n{make}").view
        assert "]:3: RuntimeWarning: task 'later' had not ended when the cell did" in told, told
    after = book.ok("%%distributed --ranks 2\nlen('x')").view
    assert "later" not in after
    ended = book.ok(f"%%distributed --ranks 2\n{define}task = asyncio.create_task(later())\nawait task").view
    assert "Warning" not in ended
    assert "ran" in ended


def test_entries_of_the_path_that_are_not_strings_are_ignored(book: Notebook) -> None:
    more = (
        "import os, pathlib, sys\nsys.path += [os.environ.get('PROJECT_ROOT'), b'/lib', ['/lib'], pathlib.Path('/lib')]"
    )
    assert both(book, f"{more}\nimport colorsys\nlen(sys.path) > 4") is True
    book.ok(more)
    try:
        assert both(book, "import sys\nall(isinstance(each, str) for each in sys.path)") is True
    finally:
        book.ok("del sys.path[-4:]")


def test_a_variable_that_torch_has_read_is_reported_if_it_is_the_users(book: Notebook, tmp_path: Path) -> None:
    told = "was set when torch, which reads it, was loaded already"
    (tmp_path / "helper.py").write_text("import os\nos.environ['OMP_DYNAMIC'] = 'true'\n")
    for body in (
        "import os\nos.environ['OMP_DYNAMIC'] = 'true'",
        f"import sys\nsys.path.append({str(tmp_path)!r})\nimport helper",
    ):
        assert f"OMP_DYNAMIC {told}" in book.ok(ON_TWO + body).view
    by_library = "import json.decoder as library\nexec(compile(TEXT, library.__file__, 'exec'))"
    text = "import os\nos.environ['OMP_' + 'NESTED'] = 'true'"
    assert told not in book.ok(ON_TWO + by_library.replace("TEXT", repr(text))).view  # as scikit-learn does


def test_top_level_await_works(book: Notebook) -> None:
    assert (
        both(
            book,
            dedent("""\
            import asyncio
            async def later(x):
                await asyncio.sleep(0)
                return x
            await later(7)"""),
        )
        == 7
    )


def test_shell_commands_run_on_the_ranks_and_are_shown(book: Notebook) -> None:
    book.ok("word = 'filled'")

    outcome = book.ok(ON_TWO + "!echo {word} $RANK")

    assert "[0] filled 0" in outcome.view
    assert "[1] filled 1" in outcome.view


def test_the_output_of_a_shell_command_can_be_bound(book: Notebook) -> None:
    assert both(book, "lines = !printf 'a\\nb\\n'\nlist(lines)") == ["a", "b"]


def test_time_shows_how_long_a_statement_took(book: Notebook) -> None:
    outcome = book.ok(ON_TWO + "%time y = sum(range(10))\ny")

    assert "wall time" in outcome.view
    assert outcome.result == "ranks 0-1: 45"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1\n%prun x", "line 3: %prun cannot run on a rank"),
        ("%load_ext autoreload\n%load_ext tensorboard", "line 3: %load_ext cannot run on a rank"),
        ("\n%%bash\nls", "line 3: %%bash cannot stand inside a distributed cell"),
        ("print?", "line 2: `?` cannot run on a rank"),
    ],
)
def test_a_magic_that_ranks_lack_is_refused_with_its_line(book: Notebook, body: str, message: str) -> None:
    outcome = book.fails(ON_TWO + body)

    assert outcome.ename == "CaptureError"
    assert message in outcome.traceback
    assert "File " not in outcome.traceback


def test_a_syntax_error_names_the_cells_line_before_anything_starts(book: Notebook) -> None:
    outcome = book.fails(ON_TWO + "print('never')\nx = = 1")

    assert outcome.ename == "SyntaxError"
    assert re.fullmatch(
        r"  Cell In\[\d+\], line 3\n    x = = 1\n        \^\nSyntaxError: invalid syntax", outcome.traceback
    ), outcome.traceback
    assert "never" not in outcome.view


def test_a_distributed_cell_inside_a_distributed_cell_is_refused(book: Notebook) -> None:
    outcome = book.fails(ON_TWO + "%%distributed\n1")

    assert outcome.ename == "CaptureError"
    assert "line 2" in outcome.traceback


def test_a_distributed_function_called_on_a_rank_runs_there_alone(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def f(): return 5""")
    )

    assert both(book, "f()") == 5


# ---------------------------------------------------------------------------------------------------- surroundings


def test_input_is_answered_with_a_sentence(book: Notebook) -> None:
    outcome = book.fails(ON_TWO + "input('name? ')")

    assert outcome.ename == "EOFError"
    assert "a rank has no keyboard" in outcome.traceback
    assert "line 2" in outcome.traceback


def test_breakpoints_are_skipped_with_one_line_where_nobody_can_answer(book: Notebook) -> None:
    outcome = book.ok(
        ON_TWO
        + dedent("""\
        import pdb
        for _ in range(3):
            breakpoint()
        pdb.set_trace()
        x = 1""")
    )

    assert re.findall(r"line \d: the breakpoint is skipped, because this front end takes no input", outcome.view) == [
        "line 4: the breakpoint is skipped, because this front end takes no input",
        "line 5: the breakpoint is skipped, because this front end takes no input",
    ]


def test_another_debugger_that_finds_no_keyboard_fails_the_cell_visibly(book: Notebook) -> None:
    outcome = book.fails(
        ON_TWO
        + dedent("""\
            import pdb
            pdb.Pdb().set_trace()
            x = 1""")
    )

    assert outcome.ename == "BdbQuit"
    assert "no keyboard" in outcome.traceback
    assert re.search("line [34]", outcome.traceback)  # the call itself since Python 3.13, before the line after it


def test_any_text_can_be_printed(book: Notebook) -> None:
    outcome = book.ok(ON_TWO + "print('naïve 日本 😀')\nprint('\\udc80 lone')")

    assert "[0-1] naïve 日本 😀" in outcome.view
    assert "\\udc80 lone" in outcome.view


def test_warnings_and_logging_are_shown_as_stderr_of_their_rank(book: Notebook) -> None:
    outcome = book.ok(
        ON_TWO
        + dedent("""\
            import warnings, logging
            if rank == 1:
                warnings.warn('careful')
            logging.warning('logged')""")
    )

    assert "[1!] Cell In" in outcome.view
    assert "careful" in outcome.view
    assert "[0-1!] WARNING:root:logged" in outcome.view


@pytest.mark.slow
def test_a_figure_can_be_drawn_and_saved(book: Notebook) -> None:
    book.ok("import matplotlib.pyplot as plt\n%matplotlib inline")
    body = """
import io
%matplotlib inline
figure, axes = plt.subplots()
axes.plot([1, 2])
plt.show()
data = io.BytesIO()
figure.savefig(data)
data.getvalue()[1:4]
"""
    assert book.ok(ON_TWO + body).result == "ranks 0-1: b'PNG'"


def test_a_rank_has_torchruns_environment_and_a_clean_command_line(book: Notebook) -> None:
    body = """
import os, sys
names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR'.split()
[os.environ[name] for name in names], sys.argv, 'MASTER_PORT' in os.environ
"""
    assert book.ok(ON_TWO + body).result == (
        "rank 0: (['0', '0', '2', '2', '0', '127.0.0.1'], ['cell.py'], True)\n"
        "rank 1: (['1', '1', '2', '2', '0', '127.0.0.1'], ['cell.py'], True)"
    )


def test_the_kernels_environment_and_folder_are_the_ranks_too(book: Notebook, tmp_path: Path) -> None:
    before = book.ok("import os\nos.getcwd()").result
    book.ok(f"os.environ['COLOUR'] = 'red'\nos.chdir({str(tmp_path)!r})")
    try:
        assert both(book, "import os\nos.environ['COLOUR'], os.getcwd()") == ("red", str(tmp_path))
    finally:
        book.ok(f"os.chdir({before})\ndel os.environ['COLOUR']")
    assert both(book, "import os\n'COLOUR' in os.environ") is False


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "tp"])
@pytest.mark.parametrize("end", ["", "\n1 / 0"], ids=["done", "failed"])
def test_what_a_cell_has_bound_is_let_go_before_the_next_one(
    book: Notebook, tmp_path: Path, strategy: str, end: str
) -> None:
    path = tmp_path / "held"
    path.touch()
    both_run = dedent("""\
        import os, torch.distributed as dist
        print('pid', os.getpid(), flush=True)
        dist.barrier()""")
    code = f"{both_run}\nfile = open({str(path)!r}){end}"
    text = book.cell(f"%%distributed --ranks 2 --strategy {strategy}\n{code}").text
    ranks = {int(pid) for pid in re.findall(r"pid (\d+)", text)}
    assert len(ranks) == 2
    if end:
        book.ok("%distributed_debug --done")
    assert wait_until(lambda: not any(map(partial(holds, path), ranks)), 5)


def holds(path: Path, pid: int) -> bool:
    """Whether a process has a file open; one that has ended has not."""
    with suppress(FileNotFoundError):
        return any(os.path.realpath(each) == str(path) for each in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_env_sets_a_variable_for_one_cell(book: Notebook) -> None:
    read = "import os\nos.environ.get('MODE')"

    assert book.ok("%%distributed --ranks 2 --env MODE=fast\n" + read).result == "ranks 0-1: 'fast'"
    assert book.ok(ON_TWO + read).result == ""


def test_a_data_loader_has_workers_that_know_the_cells_classes(book: Notebook) -> None:
    book.ok("offset = 100")
    body = """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return offset + i * i
[x.tolist() for x in DataLoader(Squares(), batch_size=2, num_workers=2)]
"""
    assert both(book, body) == [[100, 101], [104, 109]]


@pytest.mark.parametrize("use", ["list(loader)", "def use(): return list(loader)\nuse()"])
def test_persistent_workers_of_a_data_loader_end_with_the_cell(book: Notebook, use: str) -> None:
    body = (
        "from torch.utils.data import DataLoader\nloader = DataLoader([1, 2], num_workers=1, persistent_workers=True)\n"
    )
    for _ in range(3):
        assert book.ok(ON_TWO + body + use + "\nlen(loader)").result == "ranks 0-1: 2"
        outcome = book.ok(ON_TWO + "import multiprocessing\nmultiprocessing.active_children()")
        assert outcome.result == "ranks 0-1: []"
        assert outcome.wall_s < 4


def test_a_rank_can_start_processes_that_run_functions_of_the_cell(book: Notebook) -> None:
    body = """
import torch.multiprocessing as mp
def work(queue, i):
    queue.put((i, rank))
queue = mp.Queue()
children = [mp.Process(target=work, args=(queue, i)) for i in range(2)]
for child in children: child.start()
got = sorted(queue.get() for _ in children)
for child in children: child.join()
got == [(0, rank), (1, rank)]
"""
    assert both(book, body) is True


def test_child_processes_and_c_code_print_into_the_view(book: Notebook) -> None:
    body = """
import ctypes, subprocess, os
subprocess.run(['echo', 'from a child'])
os.write(1, b'from a descriptor\\n')
ctypes.CDLL(None).puts(b'from C')
"""
    view = book.ok(ON_TWO + body + "None").view

    for line in ("from a child", "from a descriptor", "from C"):
        assert f"[0-1] {line}" in view


def test_sys_exit_with_zero_leaves_the_cell_on_that_rank(book: Notebook) -> None:
    assert book.ok(f"{ON_TWO}exit()").result == ""
    assert "number of items in a container" in book.ok(f"{ON_TWO}help(len)").view  # exit() closes the standard input

    outcome = book.ok(
        ON_TWO
        + dedent("""\
            import sys
            if rank == 0:
                sys.exit()
            'reached the end'""")
    )

    assert outcome.result == "rank 0: None\nrank 1: 'reached the end'"
    assert "left the cell early" in outcome.view


# ---------------------------------------------------------------------------------------------------- local modules


def test_a_module_next_to_the_notebook_is_used_as_it_is_on_disk_now(book: Notebook) -> None:
    folder = Path(ast.literal_eval(book.ok("import os\nos.getcwd()").result))
    module = folder / "helper_of_cell.py"
    module.write_text("def answer():\n    return 41\n")
    book.ok("import helper_of_cell")
    assert both(book, "helper_of_cell.answer()") == 41

    module.write_text("def answer():\n    return 'edited'\n")
    outcome = book.ok(ON_TWO + "helper_of_cell.answer()")

    assert outcome.result == "ranks 0-1: 'edited'"
    assert "helper_of_cell.py has changed and is imported again" in outcome.view


def test_a_function_of_a_local_module_travels_by_name(book: Notebook) -> None:
    folder = Path(ast.literal_eval(book.ok("import os\nos.getcwd()").result))
    (folder / "tools_of_cell.py").write_text(
        dedent("""\
            SCALE = 2
            def scaled(x):
                return x * SCALE
        """)
    )
    book.ok("from tools_of_cell import scaled")

    assert both(book, "scaled(4), scaled.__module__") == (8, "tools_of_cell")
