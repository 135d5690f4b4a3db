"""What a notebook that is used for a week must not gather: counted over many cells in a real kernel."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

BIG = """
import gc, weakref

class Big:
    size = 3

big = Big()
known = weakref.ref(big)
"""


@pytest.mark.parametrize(
    "options", ["--ranks 2", "--ranks 2 --detach", "--ranks 1 --sweep lr=1,2", "--ranks 2 --out run"]
)
@pytest.mark.parametrize("ending", ["big.size", "1 / (big.size - 3)"])
def test_what_a_cell_has_read_is_freed_though_its_run_is_kept(
    shared_notebook: Notebook, options: str, ending: str
) -> None:
    shared_notebook.ok(BIG)
    shared_notebook.cell(f"%%distributed {options}\n{ending}")
    shared_notebook.ok(
        dedent("""\
            import jupyter_distrib
            for each in jupyter_distrib.runs():
                each.wait_ended(30)""")
    )
    shared_notebook.ok("del big")
    shared_notebook.cell("1")  # IPython keeps the frames of the last exception

    assert shared_notebook.ok("gc.collect(); known() is None").result == "True"


def test_what_a_detached_run_has_read_is_freed_while_it_runs(shared_notebook: Notebook) -> None:
    shared_notebook.ok(BIG)
    shared_notebook.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out run
            import os, time
            while not os.path.exists('end'):
                time.sleep(0.01)
            big.size""")
    )
    shared_notebook.ok("del big")

    assert shared_notebook.ok("gc.collect(); known() is None, run.done()").result == "(True, False)"
    assert shared_notebook.ok("open('end', 'w').close()\nrun.result()").result == "ranks 0-1: 3"


def test_a_set_up_that_is_edited_again_and_again_leaves_one_copy_of_what_it_makes(shared_notebook: Notebook) -> None:
    for number in range(10):
        shared_notebook.ok(
            dedent(f"""\
                %%distributed_setup data
                class Data:
                    number = {number}
                data = Data()""")
        )
        shared_notebook.ok("%%distributed --ranks 2\ndata.number")
    counted = dedent("""\
        import gc
        gc.collect()
        [each.number for each in gc.get_objects() if type(each).__name__ == 'Data']""")

    assert shared_notebook.ok(f"%%distributed --ranks 2\n{counted}").result == "ranks 0-1: [9]"
    assert shared_notebook.ok(counted).result == "[9]"
    shared_notebook.ok("%distributed_setup --undo data")
