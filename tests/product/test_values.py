"""What comes back from the ranks, and what stays on them: real kernel, real ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("cell", ["print(added)", "reads()"])
def test_a_name_that_the_notebook_has_put_among_the_builtins_is_told_with_its_reason(book: Notebook, cell: str) -> None:
    book.ok(
        dedent("""\
            import builtins
            builtins.added = 3
            def reads(): return added""")
    )
    try:
        outcome = book.fails(ON_TWO + cell)
    finally:
        book.ok("del builtins.added")
    assert outcome.ename == "NameError"
    assert "`added` is a builtin that the notebook has added (`builtins.added = ...`)" in outcome.traceback
    assert "builtin" not in book.fails(ON_TWO + "missing").traceback


@pytest.mark.parametrize(
    "body",
    [
        "@property\n    def __class__(self): raise RuntimeError('no class')",
        "def __getattribute__(self, name): raise RuntimeError(name)",
    ],
)
def test_a_value_that_answers_by_an_error_is_named(book: Notebook, body: str) -> None:
    book.ok(f"class Part:\n    {body}\npart = Part()")
    outcome = book.fails(f"{ON_TWO}part")
    assert outcome.ename == "PayloadError"
    assert "`part` (used on line 2) is a Part, which cannot be sent to the ranks" in outcome.evalue
    book.ok("del part")


@pytest.mark.parametrize("call", ["reads()", "evaluates()"])
def test_a_name_that_a_function_reads_in_a_string_is_told_with_what_to_add(book: Notebook, call: str) -> None:
    book.ok(
        dedent("""\
            hidden = 42
            def reads(): exec('print(hidden)')
            def evaluates(): return [eval('hidden + 1') for _ in 'a']""")
    )
    outcome = book.fails(f"%%distributed --ranks 1\n{call}")
    assert "add --with hidden" in outcome.traceback
    assert book.ok(f"%%distributed --ranks 1 --with hidden\n{call}").status == "ok"
    book.ok("import jupyter_distrib")
    of_function = book.fails("jupyter_distrib.distributed(ranks=1)(evaluates).submit().result()")
    assert "`hidden` is in the notebook, but the function only reads it through eval" in of_function.traceback
    assert "pass it as an argument" in of_function.traceback


def test_a_module_inside_a_module_that_the_notebook_has_imported_is_there(book: Notebook) -> None:
    """In a cell, and in one that a rank ran before it."""
    book.ok("import logging.handlers, xml.dom.minidom")
    outcome = book.ok(
        "%%distributed --ranks 1\nlogging.handlers.QueueHandler.__name__, xml.dom.minidom.parseString('<a/>').nodeName"
    )
    assert outcome.result == "rank 0: ('QueueHandler', '#document')"


@pytest.mark.parametrize("call", ["exit()", "quit()", "def leave():\n    exit(0)\nleave()"])
def test_a_cell_may_leave_by_the_name_that_python_has_for_it(book: Notebook, call: str) -> None:
    outcome = book.cell(f"%%distributed --ranks 1\nprint('before')\n{call}\nprint('after')")
    assert "before" in outcome.view
    assert "after" not in outcome.view.replace("before", "")
    assert outcome.ename in ("", "SystemExit"), outcome.text
    assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"


# ---------------------------------------------------------------------------------------------------- values


def test_the_last_expression_of_each_rank_comes_back_in_rank_order(book: Notebook) -> None:
    outcome = book.ok(ON_TWO + "x = rank * 2\nx")

    assert outcome.result == "rank 0: 0\nrank 1: 2"
    assert "<td><b>rank 1</b></td><td><pre>2</pre></td>" in outcome.result_html
    assert book.ok("_[1], list(_), len(_), type(_).__name__").result == "(2, [0, 2], 2, 'Results')"


def test_out_binds_the_values_to_a_name(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --out got\nrank + 5")

    assert book.ok("got[0], got[-1], got.ranks").result == "(5, 6, (0, 1))"


def test_a_cell_without_a_value_shows_none_but_out_is_bound(book: Notebook) -> None:
    outcome = book.ok("%%distributed --ranks 2 --out got\nprint")
    assert "built-in function print" in outcome.result

    assert book.ok("%%distributed --ranks 2 --out got\nx = 1").text == ""
    assert book.ok("got[0], got[1], len(got)").result == "(None, None, 2)"
    assert book.ok(ON_TWO + "None").text == ""


def test_a_trailing_semicolon_hides_the_values_and_out_is_bound(book: Notebook) -> None:
    assert book.ok("%%distributed --ranks 2 --out got\nrank;  # quiet").result == ""
    assert book.ok("got[1]").result == "1"


def test_a_value_of_one_rank_only_comes_with_none_of_the_others(book: Notebook) -> None:
    assert book.ok(ON_TWO + "'best' if rank == 1 else None").result == "rank 0: None\nrank 1: 'best'"


def test_instances_of_the_notebooks_classes_come_back_as_such(book: Notebook) -> None:
    book.ok("""
class Point:
    made = []
    def __init__(self, x):
        self.x = x
    def double(self):
        return self.x * scale
scale = 2
before = dict(vars(Point))
method, globals_before = Point.double, Point.double.__globals__
""")

    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out got
            Point.made.append(rank)
            Point.extra = 1
            Point(rank + 1)""")
    )

    assert book.ok("[type(p) is Point for p in got]").result == "[True, True]"
    assert book.ok("dict(vars(Point)) == before, Point.made, Point.double is method").result == "(True, [], True)"
    assert book.ok("Point.double.__globals__ is globals_before, [p.double() for p in got]").result == "(True, [2, 4])"


def test_a_function_of_the_notebook_comes_back_as_itself(book: Notebook) -> None:
    book.ok("def f(): return 1")

    book.ok("%%distributed --ranks 2 --out got\nf")

    assert book.ok("got[0] is f, got[1] is f").result == "(True, True)"


def test_an_instance_of_a_class_of_the_cell_comes_back_and_works(book: Notebook) -> None:
    body = dedent("""\
        class Pair:
            def __init__(self, a): self.a = a
            def both(self): return self.a, self.a
        Pair(rank)""")

    book.ok("%%distributed --ranks 2 --out got\n" + body)

    assert book.ok("got[1].both(), type(got[0]).__name__, type(got[0]) is type(got[1])").result == (
        "((1, 1), 'Pair', True)"
    )
    assert book.fails("Pair").ename == "NameError"


@pytest.mark.slow
def test_tensors_come_back_on_the_cpu_and_writable(book: Notebook) -> None:
    body = """
import torch
t = torch.full((3, 100_000), float(rank), device=device)
{'whole': t, 'row': t[1], 'small': t[0, :2]}
"""

    book.ok("%%distributed --ranks 2 --out got\n" + body)

    assert book.ok("got[1]['whole'].device.type, got[1]['whole'].shape[1], got[1]['small'].tolist()").result == (
        "('cpu', 100000, [1.0, 1.0])"
    )
    assert book.ok("got[0]['row'].fill_(7)\ngot[0]['whole'][1, 5].item()").result == "7.0"
    assert book.ok("got[1]['whole'].sum().item()").result == "300000.0"


@pytest.mark.slow
def test_gradients_and_parameters_survive_the_way_back(book: Notebook) -> None:
    body = dedent("""\
        import torch
        p = torch.nn.Parameter(torch.ones(3))
        (p * (rank + 1)).sum().backward()
        p, p.grad""")

    book.ok("%%distributed --ranks 2 --out got\n" + body)

    assert book.ok("type(got[0][0]).__name__, got[1][1].tolist(), got[1][0].requires_grad").result == (
        "('Parameter', [2.0, 2.0, 2.0], True)"
    )


@pytest.mark.slow
def test_a_wrapped_model_comes_back_unwrapped(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch
            class Net(torch.nn.Linear): pass
            model = Net(2, 1)""")
    )
    wrap = "%%distributed --ranks 2 --strategy ddp --out got\ntorch.nn.parallel.DistributedDataParallel(model)"

    book.ok(wrap)

    assert book.ok("type(got[0]) is Net, sorted(got[0].state_dict())").result == "(True, ['bias', 'weight'])"
    assert book.ok("got[0](torch.ones(1, 2)).shape").result == "torch.Size([1, 1])"


def test_a_prepared_model_comes_back_plain_and_can_be_used(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import copy, torch
            class Net(torch.nn.Linear): pass
            model = Net(2, 1)""")
    )
    body = """
import jupyter_distrib
model = jupyter_distrib.prepare(model)
model(torch.ones(4, 2)).sum().backward()
model
"""
    book.ok("%%distributed --ranks 2 --strategy ddp --out got\n" + body)

    assert book.ok("type(got[0]) is Net, sorted(got[0].state_dict())").result == "(True, ['bias', 'weight'])"
    assert book.ok(
        "y = got[0](torch.ones(1, 2)); y.sum().backward(); copy.deepcopy(got[0])(torch.ones(1, 2)).shape"
    ).result == ("torch.Size([1, 1])")
    assert book.ok("len(got[0]._forward_hooks), len(got[0]._forward_pre_hooks)").result == "(0, 0)"


def test_what_cannot_be_returned_is_a_placeholder_for_that_rank_alone(book: Notebook) -> None:
    result = book.ok("%%distributed --ranks 2 --out got\n(i for i in range(3)) if rank == 0 else [1, 2]").result

    assert result.startswith("rank 0: <not returned: <generator object")
    assert result.endswith("\nrank 1: [1, 2]")
    assert book.ok("type(got[0]).__name__, got[0].type_name").result == "('Unreturned', 'generator')"


def test_a_value_for_which_there_is_no_room_is_a_placeholder_for_that_rank_alone(book: Notebook) -> None:
    body = """
import mmap, torch
if rank == 0:
    addresses_alone = 0x4000  # MAP_NORESERVE
    room = mmap.mmap(-1, 1 << 45, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | addresses_alone)
    value = torch.frombuffer(room, dtype=torch.uint8)
else:
    value = [1, 2]
value
"""
    result = book.ok("%%distributed --ranks 2 --out got --keep value" + body).result

    assert re.match(r"rank 0: <not returned: tensor\(\[.* of data must be handed over, but only .* are free", result)
    assert result.endswith("\nrank 1: [1, 2]")
    assert book.ok("got[0].type_name").result == "'torch.Tensor'"
    assert book.ok("%%distributed --ranks 2 --on 0\nvalue.numel()").result == f"rank 0: {1 << 45}"


def test_only_the_bad_item_of_a_dict_is_replaced(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --out got\n{'loss': 0.5, 'lock': (i for i in ())}")

    assert book.ok("got[0]['loss'], type(got[0]['lock']).__name__").result == "(0.5, 'Unreturned')"


def test_a_value_that_cannot_be_rebuilt_here_is_a_placeholder(book: Notebook) -> None:
    body = """
class Odd:
    def __reduce__(self):
        return int, ('no number',)
Odd() if rank == 1 else 'fine'
"""
    result = book.ok(ON_TWO + body).result

    assert result.startswith("rank 0: 'fine'\nrank 1: <not returned: ")


def test_a_hundred_megabytes_come_back_from_each_rank(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out got
            import torch
            torch.full((25_000_000,), float(rank));""")
    )

    assert book.ok("[(t.numel(), t[0].item(), t[-1].item()) for t in got]").result == (
        "[(25000000, 0.0, 0.0), (25000000, 1.0, 1.0)]"
    )


def test_values_live_as_long_as_their_names(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --out got
            import torch
            torch.ones(100_000);""")
    )

    freed = dedent("""\
        import gc, weakref
        seen = [weakref.ref(t) for t in got]
        del got
        gc.collect()
        [s() for s in seen]""")
    assert book.ok(freed).result == "[None, None]"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("{}['missing']", "KeyError", "'missing'"),
        ("raise OSError(2, 'gone', 'file.txt')", "FileNotFoundError", "[Errno 2] gone: 'file.txt'"),
        ("class Mine(ValueError): pass\nraise Mine('own')", "Mine", "own"),
        ("raise Ours(7)", "Ours", "code 7"),
        ("import json\njson.loads('{')", "JSONDecodeError", "Expecting property name"),
        ("import torch\ntorch.ones(2) @ torch.ones(3)", "RuntimeError", "size"),
        ("exec('x = = 1')", "SyntaxError", "invalid syntax"),
    ],
)  # fmt: skip
def test_a_failed_cell_raises_the_users_own_exception(book: Notebook, body: str, kind: str, message: str) -> None:
    book.ok(
        dedent("""\
            class Ours(Exception):
                def __init__(self, code):
                    super().__init__(f'code {code}')""")
    )

    outcome = book.fails(ON_TWO + body)

    assert outcome.ename == kind
    assert message in outcome.evalue
    assert re.search(
        r"\((ranks 0-1|rank [01] of 2)\b", outcome.traceback
    )  # the second one may be stopped before it raises
    assert "jupyter_distrib/" not in outcome.traceback


def test_the_exception_is_an_instance_of_the_notebooks_class(book: Notebook) -> None:
    book.ok("class Ours(Exception): pass")
    code = (
        "run = get_ipython().run_cell_magic\n"
        "try:\n    run('distributed', '--ranks 2', 'if rank == 1: raise Ours(5)\\nrank + 10')\n"
        "except Ours as error:\n    print(type(error) is Ours, error.args, error.rank, dict(error.results.items()))"
    )

    assert book.ok(code).stdout == "True (5,) 1 {0: 10}\n"


def test_out_keeps_what_it_had_when_a_cell_fails(book: Notebook) -> None:
    book.ok("got = 'before'")

    book.fails("%%distributed --ranks 2 --out got\n1 / 0")

    assert book.ok("got").result == "'before'"


# ---------------------------------------------------------------------------------------------------- what is kept


KEEP = """%%distributed --ranks 2 --keep model,step
class Net:
    def __init__(self): self.w = [rank]
model, step = Net(), 3
"""


def test_a_kept_name_is_a_handle_that_says_where_the_value_lives(book: Notebook) -> None:
    book.ok(KEEP)

    assert book.ok("step").result.startswith("step: int on ranks 0-1 (local pool, kept since Cell In[")
    assert book.ok("step[0], step[1], [model[rank].w for rank in model.ranks]").result == "(3, 3, [[0], [1]])"
    assert "model[0] to fetch" in book.fails("model.w").traceback
    for use in ("model(1)", "for layer in model: pass", "float(step)"):
        assert "lives on the ranks" in book.fails(use).traceback, use


def test_a_later_cell_reads_the_ranks_own_object(book: Notebook) -> None:
    book.ok(KEEP)

    book.ok(ON_TWO + "model.w.append('changed')\nmine = id(model)")

    assert book.ok(ON_TWO + "model.w, step").result == "rank 0: ([0, 'changed'], 3)\nrank 1: ([1, 'changed'], 3)"
    assert book.ok("model[1].w").result == "[1, 'changed']"


def test_a_kept_value_is_not_sent_again(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep numbers\nnumbers = (i for i in [7])")

    assert book.ok(ON_TWO + "next(numbers)").result == "ranks 0-1: 7"
    assert book.ok("numbers[0]").result.startswith("<not returned: <generator")


def test_a_function_of_the_notebook_can_read_a_kept_name(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep table\ntable = {'a': rank}")
    book.ok("def look(): return table['a']")

    assert book.ok(ON_TWO + "look()").result == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_a_kept_model_is_trained_on_by_the_next_cell(book: Notebook) -> None:
    book.ok("import torch")
    body = """
torch.manual_seed(0)
model = jupyter_distrib.prepare(torch.nn.Linear(2, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 2) * (rank + 1)).pow(2).sum().backward()
    optimizer.step()
step()
"""
    book.ok("%%distributed --ranks 2 --strategy ddp --keep model,optimizer,step\n" + body)
    book.ok("%%distributed --ranks 2 --strategy ddp\nfor _ in range(3): step()")

    assert book.ok("torch.equal(model[0].weight, model[1].weight)").result == "True"
    assert book.ok("optimizer[0].state_dict()['state'][0]['step'].item()").result == "4.0"


def test_a_name_that_only_some_ranks_define_is_kept_there(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep best\nif rank == 1: best = 'here'")

    assert book.ok("best").result.startswith("best: str on rank 1 ")
    assert book.ok("best[1]").result == "'here'"
    assert "`best` was not kept on rank 0: it is on rank 1" in book.fails("best[0]").traceback
    assert book.ok("%%distributed --on 1\nbest").result == "rank 1: 'here'"
    assert "`best` was kept on rank 1 only: run this cell with --on 1." in book.fails("%%distributed\nbest").traceback


def test_a_failed_cell_takes_no_value_from_the_ranks_that_it_failed_on(book: Notebook) -> None:
    """Rank 0 ends its part before rank 1 raises, as GPU ranks do that run ahead."""
    book.ok("%%distributed --ranks 2 --keep w,n\nw, n = [0], rank")
    fails = dedent("""\
        w.append(1)
        m = n = rank + 10
        if rank == 1: raise ValueError""")
    book.fails(f"%%distributed --ranks 2 --keep w,n,m\n{fails}")

    assert book.ok("%%distributed\nw, n").result == "rank 0: ([0, 1], 0)\nrank 1: ([0, 1], 1)"
    assert book.ok("m").result.startswith("m: int on rank 0 ")
    book.ok("w = n = m = None")


def test_ranks_drop_a_value_that_a_failed_cell_has_read_when_its_name_is_bound_anew(book: Notebook) -> None:
    """IPython keeps the frames of an exception in a cycle, until the collector finds it."""
    book.ok("import gc\ngc.disable()")
    book.ok("%%distributed --ranks 2 --keep w\nw = [0]")
    book.fails(
        dedent("""\
            %%distributed --ranks 2 --keep w
            w.append(1)
            raise ValueError""")
    )
    book.ok("%%distributed --ranks 2 --keep w\nw = [2]")

    assert book.ok("%distributed_status").text.count("w: list on ranks 0-1") == 1
    book.ok("gc.enable()\nw = None")


def test_a_handle_and_the_status_say_how_much_memory_the_tensors_of_a_kept_value_take(book: Notebook) -> None:
    keep = "--keep large,small,uneven\nimport torch"
    values = "large, small, uneven = {'w': torch.ones(500_000)}, torch.ones(3), torch.ones(1_000_000 * rank)"
    book.ok(f"%%distributed --ranks 2 {keep}\n{values}")

    told = book.ok("%distributed_status").result
    assert "large: dict on ranks 0-1 (2.0 MB of tensors each, local pool" in told
    assert "uneven: Tensor on ranks 0-1 (4.0 MB of tensors at most, local pool" in told
    assert "small: Tensor on ranks 0-1 (local pool" in told
    book.ok("large = small = uneven = None")


def test_a_dropped_handle_frees_the_memory_on_the_ranks(book: Notebook) -> None:
    body = """
import sys, weakref
class Big: pass
big = Big()
sys.seen_by_test = weakref.ref(big)
"""
    book.ok("%%distributed --ranks 2 --keep big\n" + body)
    assert book.ok(ON_TWO + "import sys\nsys.seen_by_test() is not None").result == "ranks 0-1: True"

    book.ok("del big")

    assert book.ok(ON_TWO + "import sys\nsys.seen_by_test() is None").result == "ranks 0-1: True"


def test_a_dropped_handle_frees_the_memory_also_without_another_distributed_cell(
    book: Notebook, tmp_path: Path
) -> None:
    """Other notebooks may wait for it."""
    body = dedent(f"""\
        import pathlib, weakref
        class Big: pass
        big = Big()
        touch = pathlib.Path({str(tmp_path)!r}, str(rank)).touch""")
    book.ok(f"%%distributed --ranks 2 --keep big\n{body}\nweakref.finalize(big, touch)\n1;")
    assert not list(tmp_path.iterdir())
    book.ok("del big")
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 10)


@pytest.mark.parametrize("more", ["", "def reads(): return big", "class Reads:\n    def it(self): return big"])
def test_what_a_cell_leaves_behind_is_freed_before_the_next_cell(book: Notebook, more: str) -> None:
    book.ok(ON_TWO + f"import sys, weakref\nclass Big: pass\nbig = Big()\nsys.seen_by_test = weakref.ref(big)\n{more}")
    book.ok(ON_TWO + f"import sys, torch, weakref\nlarge = torch.ones(3)\nsys.seen_too = weakref.ref(large)\n{more}")

    # Sent off by one cell, so that the ranks get the second at once: there is no idle moment in which to clean up.
    book.ok("""
first = "import sys, torch, weakref\\nx = torch.ones(9)\\nsys.x = weakref.ref(x)"
for body in (first, "import sys\\nassert sys.x() is None"):
    get_ipython().run_cell_magic("distributed", "--ranks 2", body)
""")
    assert (
        book.ok(ON_TWO + "import sys\nsys.seen_by_test() is None, sys.seen_too() is None").result
        == "ranks 0-1: (True, True)"
    )


def test_a_thread_that_outlives_its_cell_keeps_its_globals(book: Notebook) -> None:
    body = """
import sys, threading
gate, word = threading.Event(), ['still here']
def late():
    gate.wait()
    sys.said_by_test = word[0]
sys.gate_of_test, sys.thread_of_test = gate, threading.Thread(target=late)
sys.thread_of_test.start()
"""
    book.ok(ON_TWO + body)

    source = dedent("""\
        import sys
        sys.gate_of_test.set()
        sys.thread_of_test.join()
        sys.said_by_test""")
    assert book.ok(ON_TWO + source).result == "ranks 0-1: 'still here'"


def test_a_hook_that_a_cell_left_on_a_kept_value_keeps_its_globals(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep hooks\nhooks = []")
    book.ok(ON_TWO + "factor = 3\nhooks.append(lambda x: x * factor)")

    assert book.ok(ON_TWO + "hooks[0](2)").result == "ranks 0-1: 6"


@pytest.mark.parametrize(
    ("changes", "cell", "expected"),
    [
        (["def helper(x): return x * factor * 10"], "kept.go(1)", "20"),
        (["factor = 5"], "kept.go(1)", "5"),
        (["factor = 5"], "uses()", "5"),
        (["factor = 5", "%%distributed --ranks 1\nkept.go(1)", "factor = 2"], "kept.go(1)", "2"),
        (["%%distributed --ranks 1 --keep kept\nkept.go(1)", "factor = 5"], "kept.go(1)", "5"),
        ([], "def helper(x): return x * 100\nkept.go(1)", "100"),
        (["%%distributed --ranks 1\nfactor = 9\nkept.go(1)"], "kept.go(1)", "2"),
        ([], "kept.go(1)", "2"),
    ],
)
def test_the_class_of_a_kept_value_uses_what_the_notebook_has_defined_anew(
    book: Notebook, changes: list[str], cell: str, expected: str
) -> None:
    book.ok(
        dedent("""\
            factor = 2
            def helper(x): return x * factor
            class Part:
                def go(self, x): return helper(x)
            def uses(): return kept.go(1)""")
    )
    book.ok(
        dedent("""\
            %%distributed --ranks 1 --keep kept
            kept = Part()
            kept.made = 1""")
    )
    for change in changes:
        book.ok(change)

    assert book.ok(f"%%distributed --ranks 1\n{cell}").result == f"rank 0: {expected}"
    assert book.ok("%%distributed --ranks 1\nkept.made, type(kept) is Part").result == "rank 0: (1, True)"


def test_a_global_of_a_kept_value_that_cannot_be_sent_leaves_it_as_it_was(book: Notebook) -> None:
    book.ok(
        dedent("""\
            tool = 2
            class Part:
                def go(self): return tool""")
    )
    book.ok("%%distributed --ranks 1 --keep kept\nkept = Part()")
    book.ok("tool = open('text', 'w')")

    outcome = book.ok("%%distributed --ranks 1\nkept.go()")

    assert outcome.result == "rank 0: 2"
    assert "`kept` goes on with the `tool` that it was kept with" in outcome.view


def test_a_kept_value_whose_class_uses_names_of_its_cell_says_that_it_goes_on_with_them(book: Notebook) -> None:
    book.ok(
        dedent("""\
            factor = 2
            class Part:
                def go(self): return factor + own""")
    )
    body = dedent("""\
        import os
        own = 1
        kept = Part()
        kept.go()""")
    assert book.ok(f"%%distributed --ranks 1 --keep kept\n{body}").result == "rank 0: 3"
    cell = dedent("""\
        %%distributed --ranks 1
        import os
        kept.go()""")
    assert "goes on with" not in book.ok(cell).view
    book.ok("factor = 5")

    outcome = book.ok("%%distributed --ranks 1\nkept.go()")

    assert outcome.result == "rank 0: 3"
    assert "`kept` goes on with the `factor` that it was kept with" in outcome.view


def test_what_a_cell_leaves_behind_is_dropped_although_something_else_is_kept(book: Notebook) -> None:
    body = """
import sys, weakref
class Big: pass
big, small = Big(), 1
sys.seen_by_test = weakref.ref(big)
"""
    book.ok("%%distributed --ranks 2 --keep small\n" + body)

    assert book.ok(ON_TWO + "import sys\nsys.seen_by_test() is None").result == "ranks 0-1: True"


def test_functions_read_the_notebooks_own_rank_and_display(book: Notebook) -> None:
    """`rank` of LoRA, `display` of `from IPython import display`; the device stays that of the rank."""
    book.ok(
        dedent("""\
            from IPython import display
            rank, world_size, device = 16, 8, 'cuda:7'
            def adapter(): return rank, world_size, str(device), display.__name__""")
    )
    try:
        assert book.ok(ON_TWO + "adapter()").result == "ranks 0-1: (16, 8, 'cpu', 'IPython.display')"
        assert book.ok(ON_TWO + "adapter()[:2], rank").result == "ranks 0-1: ((16, 8), 16)"
    finally:
        book.forget()
    assert book.ok(ON_TWO + "rank").result == "rank 0: 0\nrank 1: 1"


def test_a_name_kept_again_is_the_new_value(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep counter\ncounter = 1")
    book.ok("%%distributed --ranks 2 --keep counter\ncounter += 1")

    assert book.ok("counter[0], counter[1]").result == "(2, 2)"


def test_a_handle_whose_ranks_are_gone_says_so(book: Notebook) -> None:
    book.ok(KEEP)
    book.ok("%distributed_pool stop")

    assert "gone on ranks 0-1" in book.ok("model").result
    for use in ("model[0]", ON_TWO + "model"):
        outcome = book.fails(use)
        assert outcome.ename == "ValueLost"
        assert "run Cell In[" in outcome.traceback


def test_a_handle_on_a_rank_that_died_says_so_and_the_others_stay(book: Notebook) -> None:
    book.ok(KEEP)

    book.fails(ON_TWO + "import os\nif rank == 1: os._exit(3)")

    assert "gone on rank 1" in book.ok("step").result
    assert book.ok("step[0]").result == "3"
    assert book.fails("step[1]").ename == "ValueLost"


def test_a_restarted_cell_that_reads_what_the_lost_rank_kept_says_what_to_do(book: Notebook) -> None:
    book.ok(KEEP)
    first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    code = dedent(f"""\
        import os
        if rank == 1 and {first}: os._exit(3)
        step""")

    outcome = book.fails(f"{ON_TWO.rstrip()} --max-restarts 1\n{code}")

    assert "attempt 2 of 2, since rank 1 was lost (exit code 3)" in outcome.view
    assert outcome.ename == "ValueLost", outcome.traceback
    assert "`step`: the value kept as " in outcome.traceback
    assert "Run the cell that keeps it again." in outcome.traceback
    assert "install the missing parts" not in outcome.traceback
    assert "--restart-on" not in outcome.view


def test_what_a_rank_kept_in_a_run_that_it_did_not_survive_is_not_a_handle(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""\
            %%distributed --ranks 2 --keep value
            import os, time
            value = rank
            if rank == 1:
                time.sleep(0.5)  # rank 0 is at its end, which no event tells the other
                os._exit(3)""")
    )

    assert outcome.ename == "RankLost"
    assert book.ok("value").result.startswith("value: int on rank 0 ")
    assert book.ok("value[0]").result == "0"


def test_handles_from_different_ranks_cannot_be_read_by_one_cell(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep two\ntwo = 2")
    book.ok("%%distributed --ranks 1 --keep one\none = 1")

    outcome = book.fails("%%distributed\ntwo + one")

    assert outcome.ename == "CaptureError"
    assert "were kept on different ranks; one cell cannot read both." in outcome.traceback
    assert book.ok("two[0] + one[0]").result == "3"
    book.ok("del two, one")


def test_a_cell_of_another_size_cannot_read_a_handle(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep two\ntwo = 2")

    outcome = book.fails("%%distributed --ranks 3\ntwo")

    assert "`two` is kept on 2 ranks: run this cell with --ranks 2, or --on some of them." in outcome.traceback


def test_an_interrupted_run_still_gives_handles_to_what_finished_ranks_kept(book: Notebook) -> None:
    body = dedent("""\
        import time
        value = rank + 1
        print('ready')
        while rank == 1: time.sleep(0.01)""")
    book.start("%%distributed --ranks 2 --keep value\n" + body)
    book.until("[0-1] ready")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert book.ok("value[0]").result == "1"


def stopped(book: Notebook, line: str, body: str) -> str:
    """Stop a cell whose ranks go on for ever once they have printed "ready", and return its text."""
    book.start(f"%%distributed --ranks 2 {line}\nimport time\n{body}\nprint('ready')\nwhile True: time.sleep(0.01)")
    book.until("[0-1] ready")
    book.interrupt()
    outcome = book.finish()
    assert outcome.ename == "KeyboardInterrupt"
    return outcome.text


def test_a_cell_that_is_stopped_keeps_its_names_as_they_are_then(book: Notebook) -> None:
    text = stopped(book, "--keep losses,best", "losses = [rank, 0.5]\nbest = None")

    assert "kept as they were when the cell was stopped: `losses`, `best`" in text
    assert book.ok("losses[0], losses[1]").result == "([0, 0.5], [1, 0.5])"
    cell = dedent("""\
        %%distributed --ranks 2
        losses.append(0.25)
        losses""")
    assert book.ok(cell).result == "rank 0: [0, 0.5, 0.25]\nrank 1: [1, 0.5, 0.25]"


def test_names_in_texts_are_those_of_the_notebook(book: Notebook) -> None:
    book.ok("spoken = 5\ndef by_name(name): return globals()[name]")

    cell = dedent("""\
        %%distributed --ranks 2
        import __main__
        'spoken' in globals(), globals().get('spoken'), eval('spoken + 1'), __main__.spoken""")
    assert book.ok(cell).result == "ranks 0-1: (True, 5, 6, 5)"
    assert "add --with spoken" in book.fails("%%distributed --ranks 2\nby_name('spoken')").text


def test_a_cell_that_is_stopped_while_its_value_is_pickled_keeps_its_names(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --ranks 2 --keep mine
            import fractions, time
            mine = rank
            def slow(self):
                print('ready')
                while True: time.sleep(0.01)
            slow.__code__ = slow.__code__.replace(co_filename=fractions.__file__)
            type('Slow', (), {'__reduce__': slow})()""")
    )
    book.until("[0-1] ready")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert book.ok("mine[1]").result == "1"


@pytest.mark.parametrize("strategy", ["ddp", "none"])
def test_a_cell_that_is_stopped_says_what_it_has_changed_on_the_ranks_only(book: Notebook, strategy: str) -> None:
    model, losses = f"{strategy}_model", f"{strategy}_losses"
    book.ok(f"import torch\n{model}, {losses} = torch.nn.Linear(2, 1), []")

    text = stopped(
        book,
        f"--strategy {strategy}",
        dedent(f"""\
            optimizer = torch.optim.SGD({model}.parameters(), 0.1)
            {model}(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            {losses}.append(1)"""),
    )

    assert f"`{model}` of the notebook" in text
    assert f"`{losses}` of the notebook" in text


def test_a_name_that_one_of_the_stopped_ranks_does_not_have_stays_the_notebooks(book: Notebook) -> None:
    book.ok("mine = 'the notebook has it'")

    assert "kept as" not in stopped(book, "--keep mine", "if rank == 0: mine = 1")

    assert book.ok("mine").result == "'the notebook has it'"
    assert book.ok("%%distributed --ranks 2\nmine").result == "ranks 0-1: 'the notebook has it'"
    assert "keep" not in book.ok("%distributed_status").text


def test_ranks_that_another_ones_failure_has_stopped_keep_nothing(book: Notebook) -> None:
    book.ok("mine = 'the notebook has it'")

    book.fails(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp --keep mine
            import torch.distributed as dist
            mine = rank
            dist.barrier()
            if rank == 1: 1 / 0
            dist.barrier()""")
    )

    assert book.ok("mine").result == "'the notebook has it'"
    assert book.ok("%%distributed --ranks 2\nmine").result == "ranks 0-1: 'the notebook has it'"
    assert "keep" not in book.ok("%distributed_status").text


# ---------------------------------------------------------------------------------------------------- some ranks only


def test_a_cell_can_run_on_some_ranks_of_the_warm_pool(book: Notebook) -> None:
    book.ok("%%distributed --ranks 4 --keep mine\nmine = rank * 10")

    assert book.ok("%%distributed --on 0\nmine").result == "rank 0: 0"
    outcome = book.ok(
        dedent("""\
            %%distributed --on 0,2-3 --out some
            print('here')
            mine""")
    )
    assert outcome.result == "rank 0: 0\nrank 2: 20\nrank 3: 30"
    assert "ranks 0, 2-3 of 4" in outcome.view
    assert "[0,2-3] here" in outcome.view
    assert book.ok("some[2], some.ranks").result == "(20, (0, 2, 3))"
    assert "--on names rank 4, but there are ranks 0-3 only" in book.fails("%%distributed --on 4\nmine").traceback
    assert book.ok("%%distributed --ranks 4\nmine").result.endswith("rank 3: 30")


def test_a_cell_on_some_ranks_needs_warm_ranks(tmp_path: Path) -> None:
    with Notebook(tmp_path) as other:
        other.ok("%load_ext jupyter_distrib")
        assert "run a cell without --on first" in other.fails("%%distributed --on 0\n1").traceback


# ---------------------------------------------------------------------------------------------------- detached


def test_a_detached_run_is_bound_to_out_and_gives_its_values(book: Notebook) -> None:
    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            print('far away')
            rank + 1""")
    )
    assert outcome.result.startswith("Run ")

    assert book.ok("job.result(timeout_s=20)").result == "rank 0: 1\nrank 1: 2"
    assert book.ok("list(job.result()), job.done(), job.logs(1)").result == "([1, 2], True, 'far away\\n')"


def test_a_detached_run_can_be_waited_for_and_cancelled(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            while True: time.sleep(0.01)""")
    )

    assert book.fails("job.result(timeout_s=0.05)").ename == "TimeoutError"
    assert book.ok("job.done()").result == "False"
    assert book.fails("job.cancel()\njob.result(timeout_s=20)").ename == "KeyboardInterrupt"
    assert "interrupted" in book.ok("job").result


def test_a_cell_runs_beside_a_detached_run(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            while True: time.sleep(0.01)""")
    )

    assert book.ok(ON_TWO + "rank").result == "rank 0: 0\nrank 1: 1"
    assert book.fails("job.cancel()\njob.result(timeout_s=20)").ename == "KeyboardInterrupt"


def test_a_detached_runs_failure_is_raised_by_result(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --detach --out job\n1 / 0")

    outcome = book.fails("job.result(timeout_s=20)")

    assert outcome.ename == "ZeroDivisionError"
    assert "line 2" in outcome.traceback


def test_a_detached_run_gives_handles_when_it_has_ended(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --detach --out job --keep value\nvalue = rank * 3")
    book.ok("job.result(timeout_s=20)")

    assert book.ok("value[1]").result == "3"
    assert book.ok("%%distributed\nvalue").result == "rank 0: 0\nrank 1: 3"


def test_a_detached_run_leaves_alone_what_was_bound_meanwhile(book: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = dedent(f"""\
        import os, time
        value = rank
        while not os.path.exists({str(gate)!r}): time.sleep(0.01)""")
    book.ok("%%distributed --ranks 2 --detach --out job --keep value\n" + body)
    book.ok("value = 'the notebook went on'")

    gate.touch()
    book.ok("job.result(timeout_s=20)")

    assert book.ok("value").result == "'the notebook went on'"


def test_files_that_ranks_write_have_the_modes_that_the_notebook_wants(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 1
        import os
        from pathlib import Path
        path = Path(f'written {name}')
        path.touch()
    """)
    for name, mask, mode in (("a", "0o027", "0o100640"), ("b", "0o022", "0o100644")):
        book.ok(f"import os\nname = {name!r}\nbefore = os.umask({mask})")
        outcome = book.ok(f"{cell}oct(path.stat().st_mode)")
        book.ok("_ = os.umask(before)")
        assert outcome.result == f"rank 0: '{mode}'"


BEFORE = """
import os, signal, sys
forks = []
os.register_at_fork(before=lambda: forks.append(1))
def found():
    return {
        "signals": [signal.getsignal(each) for each in signal.valid_signals()], "torch": "torch" in sys.modules,
        "forks": list(forks), "folder": os.getcwd(), "environment": dict(os.environ), "mask": signal.pthread_sigmask(0, []),
    }
mine = [1, 2]
was, names = found(), {*globals(), "names", "was"}
"""


def test_the_kernel_stays_as_it_was_also_after_a_cell_that_fails(tmp_path: Path) -> None:
    """It is not forked, does not load torch, joins no group, and nothing in it changes but what the cell names."""
    change = dedent("""\
        %%distributed --ranks 2 --strategy ddp --out kept --keep more
        mine.append(3)
        more = other = os.chdir('/')
    """)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(BEFORE)
        book.fails(f"{change}raise ValueError('on the ranks')")
        assert (
            book.ok("found() == was, mine, set(globals()) & {'kept', 'more', 'other'}").result
            == "(True, [1, 2], set())"
        )
        book.ok(f"{change}rank")
        assert book.ok("found() == was, mine").result == "(True, [1, 2])"
        new = "sorted(name for name in set(globals()) - names if not name.startswith('_'))"
        assert book.ok(new).result == "['kept', 'more']"
