"""Names that the ranks do not have, though the notebook has or had them or `--keep` names them; and large inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

ON_ONE = "%%distributed --ranks 1\n"
ON_TWO = "%%distributed --ranks 2\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


WRITER = """
import threading
class Writer:
    def __init__(self): self.lock = (i for i in ())
    def add(self, x): pass
writer = Writer()
"""
SENTENCE = (
    "`writer` (used on line {line}) holds a generator at writer.lock, which cannot be sent to the ranks "
    "(cannot pickle 'generator' object). Build it inside the cell."
)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("def main():\n    if rank == 0:\n        writer.add(1)\nmain()", 4),
        ("class Job:\n    def run(self):\n        writer.add(1)\nJob().run()", 4),
        (
            dedent("""\
                def main():
                    try:
                        writer.add(1)
                    except NameError as error:
                        raise ValueError from error
                main()"""),
            4,
        ),
    ],
)
def test_what_was_left_out_is_named_with_its_path_and_line_when_a_rank_misses_it(
    book: Notebook, body: str, line: int
) -> None:
    book.ok(WRITER)

    outcome = book.fails(ON_TWO + body)

    assert re.search(r"NameError: name 'writer' is not defined", outcome.traceback)
    assert SENTENCE.format(line=line) in outcome.traceback


def test_a_name_error_of_the_users_own_has_no_story(book: Notebook) -> None:
    book.ok(WRITER)

    outcome = book.fails(ON_TWO + "def unused(): return writer\nother")

    assert outcome.ename == "NameError"
    assert "cannot be sent" not in outcome.traceback


KEPT_NOT = "Cell In[{number}] defined it on the ranks, where it ended with that run. Add `--keep model` to that cell."
READERS = {
    "a function of the notebook": ("def look(): return model", ON_TWO + "look()"),
    "a function that a function of the notebook calls": (
        "def deep(): return model\ndef look(): return deep()",
        ON_TWO + "look()",
    ),
    "a method of the notebook": (
        dedent("""\
            class A:
                def look(self): return model
            a = A()"""),
        ON_TWO + "a.look()",
    ),
    "a method in the cell": (
        "",
        ON_TWO
        + dedent("""\
            class A:
                def look(self): return model
            A().look()"""),
    ),
    "one branch of a function": (
        "",
        ON_TWO
        + dedent("""\
            def main():
                if rank == 0: print(model)
            main()"""),
    ),
    "a string": ("", ON_TWO + "exec('print(model)')"),
    "a distributed function": (
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def look(): return model"""),
        "look.distributed()",
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_was_not_kept_is_told_wherever_it_is_read(book: Notebook, reader: str) -> None:
    setup, cell = READERS[reader]
    book.ok(ON_TWO + "model = 5")
    number = int(book.ok("len(In) - 2").result)
    book.ok(setup)

    outcome = book.fails(cell)

    assert outcome.ename == "NameError"
    assert KEPT_NOT.format(number=number) in outcome.traceback


@pytest.mark.parametrize(("text", "error"), [("def f(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError")])
def test_a_module_that_can_no_longer_be_imported_is_told_with_its_file(book: Notebook, text: str, error: str) -> None:
    book.ok(
        dedent("""\
            from pathlib import Path
            Path('edited.py').write_text('value = 1')
            import edited""")
    )
    book.ok(f"Path('edited.py').write_text({text!r})")
    outcome = book.fails(ON_TWO + "edited.value")
    book.ok("Path('edited.py').unlink()\ndel edited, __import__('sys').modules['edited']")

    assert f"`edited` cannot be rebuilt on the rank: {error}: " in outcome.evalue
    assert "/edited.py fails on the rank, which reads the file as it is now." in outcome.evalue


def test_a_name_that_its_cell_was_to_keep_and_did_not_reach_is_told(book: Notebook) -> None:
    book.fails(
        dedent("""\
            %%distributed --ranks 2 --keep later
            1 / 0
            later = 5""")
    )
    number = int(book.ok("len(In) - 2").result)

    assert f"Cell In[{number}], which is to keep it, failed, or was stopped before every rank had it." in (
        book.fails(ON_TWO + "later").traceback
    )


def test_a_name_of_a_cell_that_has_failed_is_told_so(book: Notebook) -> None:
    book.fails(
        dedent("""\
            %%distributed --ranks 2
            1 / 0
            later_losses = []
            import colorsys""")
    )
    number = int(book.ok("len(In) - 2").result)
    told = f"Cell In[{number}], which is to define it on the ranks, was stopped or failed. "

    assert f"{told}Run it again with `--keep later_losses`." in book.fails("later_losses").stderr
    assert f"{told}Run it again with `--keep later_losses`." in book.fails(ON_TWO + "later_losses").traceback
    assert "imported it" in book.fails(ON_TWO + "colorsys").traceback


def test_with_names_the_cell_that_did_not_keep_it(book: Notebook) -> None:
    book.ok(ON_TWO + "model = 5")
    number = int(book.ok("len(In) - 2").result)

    outcome = book.fails("%%distributed --ranks 2 --with model\nexec('print(model)')")

    assert outcome.ename == "CaptureError"
    assert KEPT_NOT.format(number=number) in outcome.traceback


def test_a_name_that_the_notebook_has_by_now_has_no_story(book: Notebook) -> None:
    book.ok(ON_TWO + "model = 5")
    book.ok("model = 6")

    assert book.ok(ON_TWO + "def main(): return model\nmain()").result == "ranks 0-1: 6"


# ---------------------------------------------------------------------------------------------------- --keep


@pytest.mark.parametrize(
    "body",
    [
        "import torch\nmodel = torch.nn.Linear(2, 2)\nprint('never')",
        "import sys\nclass model: pass\nmodel.modle = 1\nprint('never')",
    ],
)
def test_a_misspelt_name_to_keep_is_refused_before_the_start(book: Notebook, body: str) -> None:
    outcome = book.fails("%%distributed --ranks 2 --keep modle\n" + body)

    assert outcome.traceback == (
        "CaptureError: --keep names `modle`, which this cell does not define. Did you mean `model`?"
    )
    assert "never" not in outcome.text


@pytest.mark.parametrize(
    ("setup", "body"),
    [
        ("", "exec('mo' + 'del = rank')"),
        ("", "globals()['mo' + 'del'] = rank"),
        ("", "def set_up():\n    global model\n    model = rank\nset_up()"),
        ("def set_up():\n    global model\n    model = 1", "set_up()"),
        ("model = 1", "def look(): return model\nlook()"),
        ("def look(): return model\nmodel = 1", "look()"),
        ("import os; open('all_of_it.py', 'w').write('model = 1')", "from all_of_it import *"),
    ],
)
def test_a_name_that_comes_about_in_other_ways_is_kept(book: Notebook, setup: str, body: str) -> None:
    book.ok(setup)

    outcome = book.ok("%%distributed --ranks 2 --keep model\n" + body)

    assert "no rank" not in outcome.text
    assert "RankValue" in book.ok("type(model)").result


@pytest.mark.parametrize(("strategy", "name"), [("fsdp", "mesh"), ("none", "world_size")])
def test_a_name_that_the_rank_provides_is_kept(book: Notebook, strategy: str, name: str) -> None:
    book.ok(f"%%distributed --ranks 2 --strategy {strategy} --keep {name}\npass")

    assert "RankValue" in book.ok(f"type({name})").result


def test_a_name_to_keep_that_no_rank_had_in_the_end_is_noted(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --keep model,other
            other = 1
            if rank > 5: model = 1""")
    )

    assert "nothing is kept as `model`: no rank has this name at the end of the cell" in outcome.view
    assert "`other`" not in outcome.view


def test_a_name_to_keep_that_the_cell_does_not_use_and_ranks_keep_already_is_not_noted(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep model,other\nmodel, other = rank, 1")

    assert "nothing is kept" not in book.ok("%%distributed --ranks 2 --keep model,other\nmodel").view
    assert book.ok("%%distributed --ranks 2\nother").result == "ranks 0-1: 1"


def test_a_name_to_keep_that_one_rank_has_is_not_noted(book: Notebook) -> None:
    assert book.ok("%%distributed --ranks 2 --keep model\nif rank == 1: model = 1").view == ""


# ---------------------------------------------------------------------------------------- the warning about large inputs


def test_a_large_variable_that_a_function_reads_is_named_with_the_way_to_it(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            data = torch.zeros(26_000_000)
            def batch(): return data[:1]
            def train(): return batch()
            def evaluate(): return batch()""")
    )

    outcome = book.ok(ON_ONE + "(train(), evaluate());")

    assert outcome.stdout == (
        "`data` (104.0 MB, used by train -> batch) is captured and sent once per node. "
        "Load it in the cell to avoid this.\n"
    )


def test_variables_that_are_large_together_are_named_the_largest_first(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            a = torch.zeros(13_000_000)
            b = torch.zeros(15_000_000)
            alias = a
            small = 1""")
    )

    outcome = book.ok(ON_ONE + "(a, b, alias, small) and None")

    assert outcome.stdout == (
        "`b` (60.0 MB) and `a` (52.0 MB) are captured and sent once per node. Load them in the cell to avoid this.\n"
    )


def test_a_function_that_holds_much_itself_is_named(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            def make(data): return lambda: data.numel()
            count = make(torch.zeros(26_000_000))""")
    )

    assert book.ok(ON_ONE + "count()").stdout.startswith("`count` (104.0 MB) is captured")


def test_many_small_variables_are_reported_as_a_sum(book: Notebook) -> None:
    names = [f"part_{i}" for i in range(15)]
    book.ok("".join(f"{name} = bytes(7_000_000)\n" for name in names))

    outcome = book.ok(ON_ONE + f"({', '.join(names)}) and None")

    assert (
        outcome.stdout
        == "15 variables (105.0 MB) are captured and sent once per node. Load them in the cell to avoid this.\n"
    )


def test_a_view_of_a_large_storage_is_not_large(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            view = torch.zeros(50_000_000)[:10]
            large = torch.zeros(26_000_000)""")
    )

    assert book.ok(ON_ONE + "(view, large) and None").stdout.startswith("`large` (104.0 MB) is captured")
