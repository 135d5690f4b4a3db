"""`%%distributed` as it is typed: options, help, completion, capture, the live view, and what stands in whose place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook

ON_TWO = "%%distributed --ranks 2\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


def completions(book: Notebook, code: str) -> list[str]:
    """What the tab key offers at the end of this text, as whole words in place of the one at the cursor."""
    book.client.complete(code, len(code))
    reply = book.client.get_shell_msg(timeout=30)["content"]
    start = code.rfind(" ") + 1
    return [code[start : reply["cursor_start"]] + match for match in reply["matches"]]


# ---------------------------------------------------------------------------------------------------- options


def test_a_wrong_option_is_one_line_that_names_the_near_one(book: Notebook) -> None:
    outcome = book.fails("%%distributed --stratgy ddp\n1")

    assert outcome.traceback == "OptionsError: unknown option --stratgy: did you mean --strategy?"


def test_an_unknown_strategy_or_pool_is_one_line(book: Notebook) -> None:
    assert book.fails("%%distributed --strategy dpd\n1").traceback == (
        "OptionsError: --strategy dpd is not known: did you mean ddp?"
    )
    assert book.fails("%%distributed --pool lcoal\n1").traceback == (
        "OptionsError: --pool lcoal is not known: did you mean local?"
    )


def test_distrib_is_the_same_magic(book: Notebook) -> None:
    assert book.ok("%%distrib --ranks 2\nrank + 1").result == "rank 0: 1\nrank 1: 2"


@pytest.mark.parametrize("magic", ["%%distributed", "%%distrib"])
def test_the_question_mark_shows_the_help_made_from_the_options(book: Notebook, magic: str) -> None:
    page = book.ok(magic + "?").page

    assert "usage: %%distributed [OPTION]..." in page
    assert "--keep NAMES" in page
    assert "one of none, auto, ddp" in page


@pytest.mark.parametrize("magic", ["status", "logs", "attach", "pool"])
def test_every_line_magic_has_help(book: Notebook, magic: str) -> None:
    assert f"`%distributed_{magic}" in book.ok(f"%distributed_{magic}?").page


def test_help_is_printed_for_whoever_asks_as_in_a_shell(book: Notebook) -> None:
    named = book.ok("print(*(name for name in get_ipython().magics_manager.magics['line'] if 'distributed' in name))")
    names = named.stdout.split()
    assert len(names) >= 14
    for name in names:
        for word in ("--help", "-h") if name != "distributed_setup" else ("--help",):
            told = book.ok(f"%{name} {word}").stdout
            assert f"`%{name}" in told.replace("\n", " ").replace("%%", "%"), told
    for line in ("--help", "--ranks 2 --help"):
        assert "usage: %%distributed [OPTION]..." in book.ok(f"%%distributed {line}\n1 / 0").stdout
    assert "before its first cell" in book.ok("%%distributed_setup --help\n1 / 0").stdout


def test_a_value_or_a_comment_with_the_word_help_asks_for_none(book: Notebook) -> None:
    line = "%%distributed --ranks 1 --env 'X=a --help b'  # or --help"

    assert book.ok(f"{line}\nimport os\nos.environ['X']").result == "rank 0: 'a --help b'"


@pytest.mark.parametrize("magic", ["%%distributed", "%%distrib"])
def test_the_tab_key_offers_options_and_nothing_else(book: Notebook, magic: str) -> None:
    assert completions(book, f"{magic} --str") == ["--strategy"]
    assert completions(book, f"{magic} --gpus 2 --strategy ") == [
        "auto",
        "ddp",
        "deepspeed",
        "fsdp",
        "none",
        "tensorflow",
        "tp",
    ]
    assert completions(book, f"{magic} --strategy=d") == ["--strategy=ddp", "--strategy=deepspeed"]
    assert completions(book, f"{magic} --pool l") == ["local"]
    assert "--keep" in completions(book, f"{magic} --")
    assert "--gpus" not in completions(book, f"{magic} --gpus 2 --")


@pytest.mark.slow
def test_the_tab_key_in_the_cells_body_offers_python(book: Notebook) -> None:
    book.ok("weights_of_model = 1")

    assert "weights_of_model" in completions(book, "%%distributed --ranks 2\nx = weights_of_m")


def test_the_wrong_use_of_a_line_magic_is_one_line(book: Notebook) -> None:
    book.ok("%%distributed --pool inline\nrank")  # a run that is there
    for line, message in [
        ("%distributed_pool bogus", "choose list, use, add, remove, start, stop, restart, resize, up, down or trust"),
        ("%distributed_pool use nowhere", "pool nowhere is not known: choose local, "),
        ("%distributed_pool resize", "resize takes one of N, --gpus N or --ranks N; got none of them"),
        ("%distributed_logs --rnk 1", "unknown option --rnk: did you mean --rank?"),
        ("%distributed_logs no-such-run", "there is no run no-such-run"),
        ("%distributed_status now", "'now' is one word too many"),
        ("%distributed_attach no-such-run", "no-such-run"),
    ]:
        outcome = book.fails(line)
        assert message in outcome.traceback, (line, outcome.traceback)
        assert outcome.traceback.count("\n") == 0


# ---------------------------------------------------------------------------------------------------- the extension


FOREIGN = """
from IPython.core.magic import register_cell_magic
@register_cell_magic
def distributed(line, cell):
    return "the other one"
"""


@pytest.mark.slow
def test_another_extensions_magic_is_taken_and_given_back(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok(FOREIGN)
        assert book.ok("%load_ext jupyter_distrib").stdout == (
            "%%distributed was this notebook's; it is jupyter_distrib's until %unload_ext jupyter_distrib.\n"
        )
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"
        assert "already loaded" in book.ok("%load_ext jupyter_distrib").stdout
        assert book.ok("import jupyter_distrib as d; d.load_ipython_extension(get_ipython())").text == ""
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"

        book.ok("%unload_ext jupyter_distrib")

        assert book.ok("%%distributed\n1").result == "'the other one'"
        assert book.fails("%distributed_status").status == "error"
        assert "--strategy" not in completions(book, "%%distributed --str")

        assert "was this notebook's" in book.ok("%load_ext jupyter_distrib").stdout
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"
        assert book.ok("%reload_ext jupyter_distrib").status == "ok"
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"


# ---------------------------------------------------------------------------------------------------- names


def test_a_plain_cell_that_reads_what_only_the_ranks_had_is_told_where_it_is(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            history = [1]
            import statistics as stats""")
    )

    assert (
        "defined it on the ranks, where it ended with that run. Add `--keep history`"
        in book.fails("sum(history)").stderr
    )
    assert "imported it" in book.fails("def use(): return stats\nuse()").stderr
    assert book.fails("unheard").stderr == ""
    assert book.fails("%%distributed --ranks 2\nsum(history)").stderr == ""
    book.ok("history = [2]")
    assert book.ok("sum(history)").result == "2"


def test_a_name_that_only_an_earlier_cell_defined_is_named_with_that_cell(book: Notebook) -> None:
    book.ok(ON_TWO + "weights = [1, 2]")
    number = int(book.ok("len(In) - 2").result)

    outcome = book.fails(ON_TWO + "\nsum(weights)")

    assert outcome.traceback == (
        f"CaptureError: `weights` (line 3) is not in this notebook: Cell In[{number}] defined it on the ranks, where "
        "it ended with that run. Add `--keep weights` to that cell."
    )


def test_a_module_that_only_an_earlier_cell_imported_is_to_be_imported_again(book: Notebook) -> None:
    book.ok(ON_TWO + "import torch.distributed as dist")

    outcome = book.fails(ON_TWO + "dist.is_initialized()")

    assert "imported it" in outcome.traceback
    assert outcome.traceback.endswith("Import it in this cell, or in a cell of its own.")


def test_a_misspelt_name_fails_on_the_ranks_as_it_would_in_the_notebook(book: Notebook) -> None:
    outcome = book.fails(ON_TWO + "\nundefinde + 1")

    assert outcome.ename == "NameError"
    assert re.search(r"Cell In\[\d+\], line 3", outcome.traceback)


UNPICKLABLE = [
    ("guard = {'a': [(i for i in ())]}", "guard", "generator", "guard['a'][0]"),
    ("stream = (i for i in range(3))", "stream", "generator", ""),
    ("class Box: pass\nbox = Box()\nbox.file = open('/dev/null', 'w')", "box", "TextIOWrapper", "box.file"),
    ("import socket\npair = socket.socketpair()", "pair", "socket", "pair[0]"),
    ("import sqlite3\nbase = sqlite3.connect(':memory:')", "base", "Connection", ""),
    (
        "lock = (i for i in ())\ndef deep(): return lock\nshallow = lambda: deep()",
        "shallow",
        "lock",
        "lock",
    ),
]


@pytest.mark.parametrize(("setup", "name", "kind", "path"), UNPICKLABLE)
def test_what_cannot_be_sent_is_named_with_its_path_and_line(
    book: Notebook, setup: str, name: str, kind: str, path: str
) -> None:
    book.ok(setup)

    outcome = book.fails(ON_TWO + f"import os\nx = {name}\nprint('never')")

    assert outcome.ename == "PayloadError"
    assert f"`{name}` (used on line 3)" in outcome.traceback
    assert kind in outcome.traceback
    assert path in outcome.traceback
    assert re.search(r"(Build it inside|open it in|connect in) the cell\b", outcome.traceback)
    assert outcome.traceback.count("\n") == 0
    assert "never" not in outcome.view
    book.ok("stream = box = pair = base = None")


def test_what_cannot_be_sent_is_left_out_if_the_cell_may_do_without_it(book: Notebook) -> None:
    book.ok("guard = (i for i in ())")

    body = dedent("""\
        def unused():
            return guard
        5""")
    assert book.ok(ON_TWO + body).result == "ranks 0-1: 5"


@pytest.mark.slow
def test_a_large_variable_is_named_in_a_warning(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            small = torch.ones(3)
            large = torch.zeros(26_000_000)""")
    )

    outcome = book.ok(ON_TWO + "large.numel() + small.numel()")

    assert outcome.stdout == (
        "`large` (104.0 MB) is captured and sent once per node. Load it in the cell to avoid this.\n"
    )
    assert outcome.result == "ranks 0-1: 26000003"


def test_explain_shows_what_would_travel_and_runs_nothing(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            scale = 2
            weights = torch.ones(1000)
            def helper(x): return x * scale""")
    )

    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --explain
            print('never')
            y = helper(weights)""")
    )

    assert outcome.view == ""
    head, *rows = [re.split(r" {2,}", line) for line in outcome.result.splitlines()]
    assert head == ["name", "type", "size", "why"]
    assert {row[0]: row[-1] for row in rows} == {
        "helper": "read on line 3",
        "weights": "read on line 3",
        "scale": "used by helper",
    }
    assert re.search(r"weights +Tensor +4\.\d kB", outcome.result)
    assert ">weights</td>" in outcome.result_html


def test_explain_says_what_cannot_be_sent(book: Notebook) -> None:
    book.ok("guard = (i for i in ())")

    assert "cannot be sent" in book.ok("%%distributed --explain\nguard").result


def test_two_names_of_one_object_stay_one_object(book: Notebook) -> None:
    book.ok(
        dedent("""\
            first = [1]
            second = first
            holder = {'inside': first}""")
    )

    assert book.ok(ON_TWO + "first.append(2)\nsecond, holder['inside'] is first").result == "ranks 0-1: ([1, 2], True)"
    assert book.ok("first").result == "[1]"


def test_views_of_one_storage_stay_views_of_one_storage(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch, numpy
            whole = torch.zeros(5000)
            part = whole[10:20]
            array = whole.numpy()""")
    )

    outcome = book.ok(ON_TWO + "part.fill_(1)\n(whole.sum().item(), whole[10].item(), part.storage_offset())")

    assert outcome.result == "ranks 0-1: (10.0, 1.0, 10)"
    assert book.ok("whole.sum().item(), array.sum().item()").result == "(0.0, 0.0)"


def test_every_rank_has_its_own_copy(book: Notebook) -> None:
    book.ok("import torch\nshared = torch.zeros(100_000)")

    assert book.ok(ON_TWO + "shared += rank + 1\nshared.mean().item()").result == "rank 0: 1.0\nrank 1: 2.0"
    assert book.ok("shared.sum().item()").result == "0.0"


def test_nothing_that_was_captured_is_held_after_the_run(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import gc, torch, weakref
            big = torch.ones(100_000)
            class Local: pass
            thing = Local()""")
    )
    book.ok(ON_TWO + "big.sum().item(), type(thing).__name__;")

    cell = dedent("""\
        seen = weakref.ref(big), weakref.ref(thing)
        del big, thing
        gc.collect()
        [s() for s in seen]""")
    assert book.ok(cell).result == "[None, None]"


# ---------------------------------------------------------------------------------------------------- the view


def test_a_cell_that_shows_nothing_leaves_nothing(book: Notebook) -> None:
    outcome = book.ok(ON_TWO + "x = 1")

    assert (outcome.text, outcome.messages) == ("", 0)


def test_output_is_live(book: Notebook) -> None:
    book.start(
        ON_TWO
        + dedent("""\
            import time
            print('at once', flush=True)
            while True:
                time.sleep(0.01)""")
    )
    outcome = book.until("[0-1] at once")
    assert outcome.status == ""
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"


def test_the_view_is_one_display_that_is_drawn_a_few_times_a_second(book: Notebook) -> None:
    outcome = book.ok(
        ON_TWO
        + dedent("""\
            import time
            for i in range(60):
                print('line', i)
                time.sleep(0.01)""")
    )

    assert len(outcome.displays) == 1
    assert 2 <= outcome.messages <= 8
    assert "[0-1] line 59" in outcome.view
    assert outcome.kinds == {"text/plain", "text/html"}


def test_the_final_view_is_always_drawn(book: Notebook) -> None:
    for _ in range(10):
        assert "[0-1] last" in book.ok(ON_TWO + "print('first')\nprint('last')").view


def test_many_lines_cost_few_messages(book: Notebook) -> None:
    outcome = book.ok(ON_TWO + "for i in range(20_000):\n    print('line', i)")

    assert outcome.messages <= 30
    assert "line 19999" in outcome.view
    assert "lines not shown here" in outcome.view


def test_reports_progress_and_tqdm_are_shown_by_rank(book: Notebook) -> None:
    body = """
import jupyter_distrib, time
from tqdm import tqdm
for i in jupyter_distrib.progress(range(4), label='mine'):
    jupyter_distrib.report(loss=1 / (i + 1), accuracy=rank)
for _ in tqdm(range(3), desc='theirs'):
    pass
"""
    view = book.ok(ON_TWO + body).view

    assert "loss 0.25" in view
    assert "accuracy 1" in view
    assert "theirs 3/3" in view
    assert "it/s]" not in view


def test_progress_of_a_running_cell_is_shown(book: Notebook) -> None:
    body = """
import jupyter_distrib, time
for i in jupyter_distrib.progress(range(10), label='epoch'):
    if i == 4:
        while True:
            time.sleep(0.01)
"""
    book.start(ON_TWO + body)
    book.until("epoch 4/10")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"


def test_a_finalizer_reports_in_the_midst_of_a_report(book: Notebook) -> None:
    """Python may call it at any allocation, also while the rank tells something."""
    body = """
import gc, time, jupyter_distrib
done = []
class Meter:
    def __init__(self):
        self.me = self
    def __del__(self):
        jupyter_distrib.report(last=i)
        done.append(i)
gc.collect()
gc.freeze()
for i in range(2000):
    gc.disable()
    gc.collect()
    Meter()
    gc.set_threshold(1 + i % 20)  # from here on, so many allocations later
    gc.enable()
    jupyter_distrib.report(loss=i)
    gc.disable()
while len(done) < 2000:  # another thread may be at it, and waits for its turn
    gc.collect()
    time.sleep(0.001)
gc.set_threshold(700)
gc.enable()
gc.unfreeze()
"""
    assert "last 1999" in book.ok(f"%%distributed --ranks 1\n{body}").view


def test_report_and_progress_are_harmless_outside_a_run(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            import jupyter_distrib as d
            d.report(loss=1)
            list(d.progress(range(3)))""")
    )

    assert outcome.result == "[0, 1, 2]"
    assert outcome.view == ""


def test_carriage_returns_are_folded_to_one_line(book: Notebook) -> None:
    view = book.ok(ON_TWO + r"for i in range(50): print(f'\r{i} of 50', end='')").view

    assert "[0-1] 49 of 50" in view
    assert "48 of 50" not in view


def test_gpus_on_a_machine_without_any_are_as_many_cpu_ranks_and_the_run_says_so(tmp_path: Path) -> None:
    sentence = "· no GPU here: 2 CPU ranks (gloo)"
    with Notebook(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) as book:
        book.ok("%load_ext jupyter_distrib")
        for _ in range(2):
            assert sentence in book.ok("%%distributed --gpus 2\nstr(device)").view
        again = book.ok(
            dedent("""\
                %%distributed --gpus 2
                print('hello')
                str(device)""")
        )
        assert again.view.count(sentence) == 1
        assert again.result == "ranks 0-1: 'cpu'"
        assert sentence not in book.ok("%%distributed --ranks 2\nprint('hello')").view
        assert "· no GPU here: 1 CPU rank (gloo)" in book.ok("%%distributed --gpus 1\nstr(device)").view
        total = dedent("""\
            import torch
            total = torch.tensor(rank)
            torch.distributed.all_reduce(total)
            int(total)""")
        assert book.ok(f"%%distributed --gpus 8 --strategy ddp\n{total}").result == "ranks 0-7: 28"


@pytest.mark.slow
def test_ranks_asked_for_by_number_serve_cells_that_name_none(tmp_path: Path) -> None:
    """Where there is no GPU, both mean the same two CPU ranks."""
    pids = "\nimport os\nos.getpid()"
    with Notebook(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) as book:
        book.ok("%load_ext jupyter_distrib")
        first = book.ok("%%distributed --ranks 2" + pids).result
        assert book.ok("%%distributed" + pids).result == first
        assert book.ok("%%distributed --gpus 2" + pids).result == first


TERMINAL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "jupyter_distrib")
shell.run_cell("%%distributed --ranks 2\\nimport time\\nprint('hello from', rank)\\nrank + 1")
shell.run_cell("%%distributed --ranks 2\\n5;")
shell.run_line_magic("unload_ext", "jupyter_distrib")
"""


@pytest.mark.slow
def test_in_a_terminal_lines_are_printed_as_they_come(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip

    lines = done.stdout.splitlines()
    assert {"[0] hello from 0", "[1] hello from 1"} <= set(lines)
    assert any(re.fullmatch(r"2 ranks · [\d.]+ s", line) for line in lines)
    assert "rank 0: 1" in done.stdout
    assert "ranks 0-1: 5" not in done.stdout
    assert done.stderr == ""
