"""What the notebook has set in pandas for all that it prints is in force on the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook

pytest.importorskip("pandas")

THERE = """
import pandas
print(pandas.DataFrame({"x": range(30), "y": [1 / 3] * 30}))
pandas.get_option("display.max_rows"), pandas.get_option("display.max_columns")
"""


def test_a_program_that_has_only_imported_pandas_has_nothing_to_tell() -> None:
    program = dedent("""\
        import pandas
        from jupyter_distrib.libraries import settings as s
        print(s.state().values, [*s.state().stay])""")

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout == "{} []\n"


def test_options_are_the_same_after_a_way_through_json_and_are_taken_back() -> None:
    told = """
import json, pandas
from jupyter_distrib.libraries import settings as s
pandas.options.display.max_rows = 6
pandas.options.display.max_colwidth = None
pandas.options.display.html.border = 3
pandas.options.display.float_format = "{:.2f}".format
print(json.dumps(s.state().values))
pandas.options.display.float_format = lambda number: "?"
print(*s.state().stay)
"""
    applied = """
import json, sys
from jupyter_distrib.libraries import setting, settings as s
applied = s.Applied()
applied.apply(json.loads(sys.argv[1]))
assert "pandas" not in sys.modules
import pandas
setting.imported(pandas)
assert s.state().values == json.loads(sys.argv[1]), s.state().values
assert pandas.options.display.float_format(1 / 3) == "0.33"
applied.apply({})
assert s.state().values == {}, s.state().values
"""
    out = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    settings, sentence = out.splitlines()
    assert json.loads(settings)["pandas"]["display.max_rows"] == 6
    assert sentence.startswith("the function in pandas.options.display.float_format of the notebook is not set")
    subprocess.run([sys.executable, "-c", applied, settings], check=True, cwd=ROOT)


@pytest.mark.slow
def test_ranks_print_as_the_notebook_does(notebook: Notebook) -> None:
    notebook.ok("import pandas; pandas.options.display.max_rows = 4; pandas.options.display.precision = 2")

    there = notebook.ok(f"%%distributed --ranks 2\n{THERE}")

    assert there.result == "ranks 0-1: (4, 20)"
    assert "0.33" in there.view
    assert "[30 rows x 2 columns]" in there.view
    without = notebook.ok("%%distributed --ranks 2 --fresh\nimport sys\n'pandas' in sys.modules")
    assert without.result == "ranks 0-1: False"
    notebook.ok("pandas.reset_option('display.max_rows')")
    assert notebook.ok(f"%%distributed --ranks 2\n{THERE}").result == "ranks 0-1: (60, 20)"
