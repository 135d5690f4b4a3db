"""IPython's syntax in cells: what its lines read, which of it ranks lack, and that lines stay in their places."""

from __future__ import annotations

from textwrap import dedent

import pytest

from jupyter_distrib.errors import CaptureError
from jupyter_distrib.kernel.capture.capture import capture
from jupyter_distrib.kernel.capture.program import as_typed
from tests.kernel.capture.test_capture import taken, transform


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("!echo {a} {b[0]} $c $$HOME {d[1:2]} {e!r}", "a? b? c? d? e?"),
        ("out = !ls {a}\nout", "a?"),
        ("!!ls $a", "a?"),
        ("!awk '{print $1}' $a", "a?"),
        ("!echo {", ""),
        ("%time f(a)", "a f"),
        ("%time x = f(a)\nx", "a f"),
        ("y = %time f(a)\ny", "a f"),
        ("%time !ls {a}", "a?"),
        ("for i in a:\n    !echo {i} {b}\n    %time f(i)", "a b? f"),
        ("def g(a):\n    !echo {a} {b}", "b?"),
        ("%cd {a}", "a?"),
        ("%env X=$a", "a?"),
        ("%pwd\n%matplotlib inline\nx = %pwd\nx", ""),
        ("a = 1\n!echo {a}", ""),
        ("%time =", ""),
    ],
)
def test_names_in_shell_and_magic_lines_travel(body: str, expected: str) -> None:
    captured = taken(body, dict.fromkeys("abcdef"))
    assert " ".join(sorted(each.name + "?" * (not each.certain) for each in captured.inputs)) == expected


def test_an_environment_variable_in_a_shell_line_is_not_missing() -> None:
    assert taken("!echo $HOME {nothing}").missing == ()


def test_every_statement_stays_on_its_line_around_shell_lines() -> None:
    body = "\na\n!ls \\\n  {b} \\\n  c\nd = %time f( \\\n  x)\n'''\n!ls \\\n'''\ne"
    assert taken(body).missing == (("a", 3), ("f", 7), ("x", 7), ("e", 12))
    source = taken(body).cell.source
    assert "\n!ls \\\n" in source
    assert source.splitlines()[11] == "e"


def test_indented_and_prompted_cells_are_translated() -> None:
    assert capture("  a\n  b\n", {}, filename="x", transform=transform).missing == (("a", 2), ("b", 3))
    assert taken(">>> a\n... b\n").missing == (("a", 2), ("b", 3))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a = 1\n\n%pip install x", "line 4: %pip cannot run on a rank; run it in a cell of its own"),
        ("x = %prun f()", "line 2: %prun cannot run on a rank; run it in a cell of its own"),
        ("def f():\n  %load_ext x", "line 3: %load_ext cannot run on a rank; run it in a cell of its own"),
        ("f?", "line 2: `?` cannot run on a rank; run it in a cell of its own"),
        ("%time %pip install x", "line 2: %pip cannot run on a rank; run it in a cell of its own"),
        (
            "%%distributed\nx",
            "line 2: %%distributed cannot stand inside a distributed cell; put it in a cell of its own",
        ),
        ("\n%%capture\nx", "line 3: %%capture cannot stand inside a distributed cell; put it in a cell of its own"),
        ("\n%%time f()\nx", "line 3: %%time must stand alone in its line; the code to time begins in the next line"),
        (
            "%%timeit -n 3\nx",
            "line 2: %%timeit cannot stand inside a distributed cell; write %timeit before the statement to time",
        ),
        (
            "x = 1\n%%bash -e\n",
            "line 3: %%bash cannot stand inside a distributed cell; write !COMMAND to run a command on every rank",
        ),
    ],
)
def test_magics_that_ranks_lack_are_an_error_before_anything_starts(body: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        taken(body)
    assert str(caught.value) == message


def test_plain_python_is_not_translated() -> None:
    def unwanted(_: str) -> str:
        raise AssertionError

    cell = dedent("""\
        x = '!ls'
        if x:
          pass""")
    assert taken(cell, transform=unwanted).missing == ()


@pytest.mark.parametrize(
    "line", ["%time y = f(x)", "y = %time f('a', \"b\")", "%pwd", "!ls -l", "files = !ls {a}", "y = f(x)"]
)
def test_a_line_is_shown_as_it_was_typed(line: str) -> None:
    assert as_typed(transform(line).rstrip("\n")) == line


def test_a_call_that_nobody_typed_as_a_magic_is_shown_as_it_is() -> None:
    line = "get_ipython().run_line_magic(name, 'x')"
    assert as_typed(line) == line
