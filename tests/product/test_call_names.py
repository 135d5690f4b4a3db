"""The names under which the parts of a function's call travel are seen by no user: not in output, errors or exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook, ask

pytestmark = pytest.mark.slow

INTERNAL = ("__function__", "__arguments__", "__keywords__", "with_variables", "with_arguments", "run_file")
SHOWS_LINES = """\
import jupyter_distrib
@jupyter_distrib.distributed(ranks=1)
def shows(x, y=2):
    import inspect, logging, traceback, warnings
    warnings.warn("look", stacklevel=2)
    traceback.print_stack()
    logging.warning("here", stack_info=True)
    print([frame.code_context for frame in inspect.stack()])
shows.distributed(1, y=3)
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    shared_notebook.ok("%distributed_compat horovod spark")
    yield shared_notebook
    shared_notebook.forget()


def hidden(text: str) -> str:
    assert [name for name in INTERNAL if name in text] == []
    return text


def test_warnings_and_stacks_show_the_call_as_it_is_written(book: Notebook) -> None:
    text = hidden(book.ok(SHOWS_LINES).view)
    assert text.count("shows(1, y=3)") >= 4
    assert "UserWarning: look" in text


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("work.distributed(Broken())", "the arguments cannot be rebuilt on the rank: ValueError"),
        ("work.distributed(x=Broken())", "the keyword arguments cannot be rebuilt on the rank: ValueError"),
        ("work.distributed(Aborts())", "while it was loading the arguments"),
        ("work.distributed((i for i in ()))", "`args` holds a generator"),
    ],
)
def test_errors_name_the_parts_of_a_call_in_words(book: Notebook, call: str, told: str) -> None:
    book.ok(
        dedent("""\
            import jupyter_distrib, os, threading
            @jupyter_distrib.distributed(ranks=1)
            def work(x): return x
            class Broken:
                def __reduce__(self): return int, ('x',)
            class Aborts:
                def __reduce__(self): return os.abort, ()""")
    )
    assert told in hidden(book.fails(call).text)


def test_large_arguments_are_named_in_words(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import jupyter_distrib, numpy
            @jupyter_distrib.distributed(ranks=1)
            def work(x): return 1""")
    )
    told = "the arguments (120.0 MB) are captured and sent once per node. Load them in the cell"
    assert told in hidden(book.ok("work.distributed(numpy.zeros(15_000_000))").text)


def test_an_exported_call_is_written_as_one_would(book: Notebook, tmp_path: Path) -> None:
    book.ok(
        dedent("""\
            import jupyter_distrib
            @jupyter_distrib.distributed(ranks=1)
            def work(x, y=1): return x + y""")
    )
    path = tmp_path / "out.py"
    book.ok(
        dedent(f"""\
            run = work.submit(1, y=2)
            run.result()
            %distributed_export run {path}""")
    )
    assert "work(*arguments, **keywords)" in hidden(path.read_text())
    book.ok(
        dedent(f"""\
            arguments = 5
            run = work.submit(1, y=2)
            run.result()
            %distributed_export run {path}""")
    )
    assert "work(*arguments_, **keywords)" in path.read_text()
    book.ok("run = work.submit([object])")
    told = "`arguments_` (a run keeps the arguments of its call only if they are short plain values)"
    assert told in hidden(book.fails(f"run.wait_ended(30)\n%distributed_export run {path}").evalue)
    book.ok(
        dedent("""\
            class Job:
                def go(self): return 1
            run = jupyter_distrib.distributed(ranks=1)(Job().go).submit()""")
    )
    told = "`function` (a run keeps the function that it calls only if that is a function, and not a method,"
    assert told in hidden(book.fails(f"run.wait_ended(30)\n%distributed_export run {path}").evalue)


def test_runs_of_launchers_have_the_name_of_the_users_function_or_script(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text("print(1)")
    book.ok(
        dedent(f"""\
            import horovod
            from sparkdl import HorovodRunner
            from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor as D
            def train(): raise LookupError('no')
            def fine(): return 1
            D(1, useGpu=False).run(fine)
            D(1, useGpu=False).run({str(tmp_path / "args.py")!r})
            HorovodRunner(np=-1).run(fine)""")
    )
    hidden(book.fails("horovod.run(train)").text)
    labels = book.ok(
        "from jupyter_distrib.kernel.session import session\n"
        "[run.record.label for run in session.current().history[-4:]]"
    )
    assert labels.result == "['fine()', 'args.py', 'fine()', 'train()']"
    hidden(book.ok("%distributed_status").text + book.ok("%distributed_runs").text.partition("args.py")[0])


def test_saved_runs_and_their_comparison_show_the_functions_that_ran(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import horovod, jupyter_distrib
            def train(lr):
                return lr
            horovod.run(train, args=(1,), num_proc=1)
            horovod.run(train, args=(2,), num_proc=1)
            def train(lr):
                return lr + 1
            jupyter_distrib.distributed(ranks=1)(train).distributed(3)""")
    )
    listed = ask(book, op="history", words="train")["saved"]
    hidden(str(listed))
    compared = hidden(str(ask(book, op="compare", runs=[each["run"] for each in listed[:3]])["comparison"]))
    assert "return lr + 1" in compared
    saved = book.ok(
        dedent("""\
            from jupyter_distrib.kernel.history import run_files
            for run in run_files.load_with_note().runs[-3:]:
                print(run, run.source)""")
    )
    assert "return lr + 1" in hidden(saved.text)
    hidden(book.ok("%distributed_status --json").text)
