"""Cells in, captured programs out; and the proof that a cell with its inputs alone does the same as in the notebook."""

from __future__ import annotations
import __future__

import ast
import asyncio
import contextlib
import inspect
import io
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core import autocall
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell, _modified_open

from jupyter_distrib.cells.cell import execute
from jupyter_distrib.errors import CaptureError
from jupyter_distrib.kernel.capture.capture import (
    MODULE_NAMES,
    PROVIDED,
    Captured,
    Dropped,
    capture,
    explain_missing,
    global_names,
    reachable,
)

transform = TransformerManager().transform_cell


def notebook(**values: object) -> dict[str, Any]:
    return {"__name__": "__main__", **values}


def taken(body: str, namespace: dict[str, Any] | None = None, **options: Any) -> Captured:
    return capture(dedent(body), namespace or {}, filename="Cell In[1]", **{"transform": transform, **options})


def inputs(captured: Captured) -> dict[str, Any]:
    return {each.name: each.value for each in captured.inputs}


# Inputs.


@pytest.mark.parametrize("body", ["", "\n\n", "# a comment", "   \n  # another"])
def test_an_empty_cell_needs_nothing(body: str) -> None:
    captured = taken(body)
    assert (captured.inputs, captured.defines, captured.missing) == ((), (), ())
    compile(captured.cell.source, "x", "exec")


def test_an_input_says_its_value_its_line_and_why_it_travels() -> None:
    model = object()
    cell = dedent("""\
        x = 1
        model(x)
        def f():
          return lr""")
    (read, perhaps) = taken(cell, {"model": model, "lr": 0.1, "unused": 1}).inputs
    assert (read.name, read.line, read.certain, read.reason) == ("model", 3, True, "read on line 3")
    assert read.value is model
    assert (perhaps.name, perhaps.line, perhaps.certain, perhaps.reason) == ("lr", 5, False, "perhaps read on line 5")


def test_a_name_that_the_cell_binds_first_does_not_travel() -> None:
    assert inputs(taken("x = 2\nx", {"x": 1})) == {}


def test_builtins_travel_only_if_the_notebook_hides_them() -> None:
    assert inputs(taken("print(max(a))", {"a": [1], "max": min})) == {"a": [1], "max": min}


def test_a_provided_name_travels_only_if_the_notebook_has_its_own() -> None:
    assert inputs(taken("rank, device, world_size", {"rank": 3})) == {"rank": 3}
    assert taken("rank, device, display, get_ipython, __name__").missing == ()


def test_what_ipython_puts_into_every_notebook_stays_there() -> None:
    leave = autocall.ExitAutocall()
    names = {"get_ipython": InteractiveShell.get_ipython, "open": _modified_open, "exit": leave, "quit": leave}
    namespace = notebook(**names, helper=1)
    assert inputs(taken("get_ipython(), open, exit, quit, helper, __name__", namespace)) == {"helper": 1}


def test_a_wrapper_that_the_notebook_puts_over_a_builtin_travels() -> None:
    namespace = notebook()
    exec(
        dedent("""\
            import functools, builtins
            @functools.wraps(builtins.print)
            def print(): ..."""),
        namespace,
    )
    assert list(inputs(taken("print()", namespace))) == ["print"]


def test_a_name_that_nobody_has_is_missing_with_its_line() -> None:
    captured = taken("""\
        a

        if b:
          c = 1
        c
        lambda: d""")
    assert captured.missing == (("a", 2), ("b", 4))


def test_defines_lists_what_the_cell_binds_in_order() -> None:
    cell = dedent("""\
        b = 1
        import os.path
        def a(): c = 1""")
    assert taken(cell).defines == ("b", "os", "a")


# Names in texts


@pytest.mark.parametrize(
    "body",
    [
        "'x' in globals()",
        "if 'x' not in locals():\n    x = 2",
        "'x' in dir()",
        "'x' in globals().keys()",
        "globals()['x']",
        "vars().get('x', 3)",
        "get_ipython().user_ns['x']",
        "eval('x + 1')",
        "exec('y = [x for _ in range(2)]', globals())",
        "def f():\n    return globals()['x'] if 'x' in globals() else 0",
        "import __main__\n__main__.x",
        "import __main__\nhasattr(__main__, 'x')",
        "import __main__\n'x' in vars(__main__)",
        "__import__('__main__').x",
        "import sys\nsys.modules['__main__'].x",
    ],
)
def test_a_name_that_is_read_by_a_text_travels(body: str) -> None:
    (one,) = taken(body, {"x": 1}).inputs
    assert (one.name, one.certain) == ("x", False)


@pytest.mark.parametrize(
    "body",
    [
        "x = 2\n'x' in globals()",
        "def f(a):\n    return 'x' in vars(a) or 'x' in locals() or 'x' in dir()",
        "class A:\n    y = 'x' in locals()",
        "model.eval('x')",
        "exec('x', {'x': 2})",
        "eval('x +')",
        "globals()['x'] = 2",
        "'x' in 'globals()'",
    ],
)
def test_a_text_that_is_no_read_of_the_notebooks_name_takes_nothing_along(body: str) -> None:
    assert [each.name for each in taken(body, {"x": 1}).inputs] == []


def test_a_deep_expression_beside_a_name_in_a_text_is_analysed() -> None:
    assert taken("'x' in globals()\n" + "y" + " + 1" * 900, {"y": 1}).inputs[-1].name == "y"


# --with


def test_a_with_name_travels_though_the_cell_does_not_read_it() -> None:
    (one,) = taken("eval('x'.lower())", {"x": 1}, with_names=["x"]).inputs
    assert (one.name, one.line, one.certain, one.reason) == ("x", 0, True, "named by --with")


def test_a_with_name_that_is_read_keeps_its_line_and_becomes_certain() -> None:
    (one,) = taken("lambda: x", {"x": 1}, with_names=["x"]).inputs
    assert (one.line, one.certain) == (2, True)


def test_an_unknown_with_name_is_an_error_that_names_the_near_one() -> None:
    with pytest.raises(CaptureError, match=r"`modle`, which is not in this notebook. Did you mean `model`\?"):
        taken("", {"model": 1, "_modl": 2}, with_names=["modle"])
    with pytest.raises(CaptureError, match="`zzz`, which is not in this notebook"):
        taken("", {"model": 1}, with_names=["zzz"])


# The source.


def test_line_numbers_are_those_of_the_front_end() -> None:
    captured = taken("\n\nx\n")
    assert captured.missing == (("x", 4),)
    assert captured.cell.source.splitlines().index("x") == 3
    assert captured.cell.filename == "Cell In[1]"


def test_the_body_may_begin_on_another_line() -> None:
    assert taken("x", first_line=1).missing == (("x", 1),)
    assert taken("x", first_line=5).missing == (("x", 5),)


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        ("x = 1\ny = = 2\n", 3, "y = = 2\n"),
        ("x = (\n", 2, "x = (\n"),
        ("x = 1\n\nreturn x", 4, "return x"),
        ("x = 1\nif x:\nprint(x)\n", 4, "print(x)\n"),
        ("break", 2, "break"),
        ("def f():\n  nonlocal x", 3, "  nonlocal x"),
        ("x = 1\nyield x", 3, "yield x"),
        ("!ls \\\n -l\nx = = 1", 4, "x = = 1\n"),
        ("\n\n!ls\nx = = 1", 5, "x = = 1\n"),
        ("def f():\n  x\n  global x", 4, "  global x"),
    ],
)
def test_a_syntax_error_has_all_that_ipython_shows(body: str, line: int, text: str) -> None:
    with pytest.raises(SyntaxError) as caught:
        taken(body)
    error = caught.value
    assert (error.filename, error.lineno, error.text) == ("Cell In[1]", line, text)
    assert error.offset
    assert error.__context__ is None


def test_top_level_await_is_not_a_syntax_error() -> None:
    assert [name for name, _ in taken("await a\nasync for b in c: b\n[d async for d in e]").missing] == ["a", "c", "e"]


def test_future_imports_keep_working() -> None:
    source = taken("from __future__ import annotations\nx: T = 1").cell.source
    namespace: dict[str, Any] = {}
    exec(compile(source, "x", "exec", dont_inherit=True), namespace)
    assert namespace["__annotations__"] == {"x": "T"}


def test_a_future_import_of_an_earlier_cell_holds_for_this_one() -> None:
    captured = taken("def f(x: Later): pass\nclass Later: pass", {"annotations": __future__.annotations})
    namespace: dict[str, Any] = {}
    assert captured.cell.future_annotations
    assert "__future__" not in captured.cell.source
    execute(captured.cell, namespace)
    assert namespace["f"].__annotations__ == {"x": "Later"}
    assert captured.defines == ("f", "Later")
    assert namespace["f"].__code__.co_firstlineno == 2


# IPython syntax.


# Explanations.


def test_a_name_that_ended_with_an_earlier_run_is_explained() -> None:
    error = explain_missing(
        taken("other\nmodel(x)"), {"model": Dropped(cell="Cell In[3]"), "unread": Dropped(cell="Cell In[2]")}
    )
    assert str(error) == (
        "`model` (line 3) is not in this notebook: Cell In[3] defined it on the ranks, where it ended with that run. "
        "Add `--keep model` to that cell."
    )


def test_a_misspelt_name_is_left_to_the_rank() -> None:
    assert explain_missing(taken("modle"), {"model": Dropped(cell="Cell In[3]")}) is None


def test_a_module_that_an_earlier_run_imported_is_to_be_imported_again() -> None:
    error = explain_missing(taken("\ndist.barrier()"), {"dist": Dropped(cell="Cell In[3]", imported=True)})
    assert str(error) == (
        "`dist` (line 3) is not in this notebook: Cell In[3] imported it on the ranks, where it ended with that run. "
        "Import it in this cell, or in a cell of its own."
    )


def test_imports_are_those_of_the_module_level() -> None:
    body = dedent("""\
        import a.b, c as d
        if x:
          from e import f as g
        try:
          import h
        except E:
          import i
        def j(): import k""")
    assert taken(body).imports == {"a", "d", "g", "h", "i"}


DEFINITIONS = """
import functools
scale, offset, log, count, hook, unit, limit, size = range(8)
def helper(x): return x * scale
def train(x): return [helper(i) for i in x]
def deep():
    def inner():
        global count
        return lambda: offset
    return inner
class Base:
    def base(self): return log
class Net(Base):
    size = size
    @property
    def p(self): return hook
    @staticmethod
    def s(): return unit
    @classmethod
    def c(cls): return helper
    @functools.cached_property
    def q(self): return limit
net = Net()
bound = net.base
part = functools.partial(train, 1)
cached = functools.lru_cache(helper)
plain = 3
"""


@pytest.fixture
def defined() -> dict[str, Any]:
    namespace = notebook()
    exec(DEFINITIONS, namespace)
    return namespace


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("helper", "scale"),
        ("train", "helper"),
        ("deep", "offset"),
        ("Base", "log"),
        ("Net", "log hook unit helper limit"),
        ("net", "log hook unit helper limit"),
        ("bound", "log hook unit helper limit"),
        ("part", "helper"),
        ("cached", "scale"),
        ("plain", ""),
    ],
)
def test_a_function_or_class_names_its_globals(defined: dict[str, Any], name: str, expected: str) -> None:
    builtin_or_class_level = {"functools", "property", "staticmethod", "classmethod", "size"}
    assert global_names(defined[name]) - builtin_or_class_level == set(expected.split())


def test_functions_of_libraries_have_no_globals_of_the_notebook() -> None:
    assert global_names(dedent) == global_names(inspect) == global_names(SimpleNamespace(a=1)) == set()


def test_a_librarys_decorator_does_not_hide_the_notebooks_function(defined: dict[str, Any]) -> None:
    assert global_names(contextlib.contextmanager(defined["helper"])) == {"scale"}


def test_reachable_names_come_with_the_way_to_them(defined: dict[str, Any]) -> None:
    found = reachable(taken("train(plain)", defined).inputs, defined)
    assert found == {"helper": ("train",), "scale": ("train", "helper")}


def test_inputs_themselves_are_not_reached(defined: dict[str, Any]) -> None:
    assert reachable(taken("train(scale)", defined).inputs, defined) == {"helper": ("train",)}


def test_functions_that_call_each_other_end(defined: dict[str, Any]) -> None:
    exec("def ping(): pong()\ndef pong(): ping()", defined)
    assert reachable(taken("ping()", defined).inputs, defined) == {"pong": ("ping",)}


# The proof.

NOTEBOOK = """
import math, os
a, b, c, n, flag = 1, 2, 3, 4, True
text, items, table = "text", [3, 1, 2], {"k": 1}
box = type(math)("box")
box.value = 5
max = min
def add(x, y=10): return x + y
def scaled(x): return x * n
class Thing:
    kind = "thing"
    def __init__(self, x): self.x = x
    def twice(self): return self.x * 2
async def later(x): return x
async def several():
    for i in range(3): yield i
class Quiet:
    def __enter__(self): return 7
    def __exit__(self, *_): return False
i = x = y = e = k = "notebook"
"""

PROGRAMS = """
x = a + b
---
a += 1
---
a = a * 2; print(a)
---
del a
print(a)
---
print(x)
x = 2
---
x = 2
print(x)
---
for i in items: x = i
print(i, x)
---
for i in []: x = i
print(i, x)
---
for q in items:
    if q == 2: break
else:
    x = 0
print(x, q)
---
while True:
    x = a
    if x: break
print(x)
---
while a < 5: a += 1
---
while False: x = 1
else: y = 2
print(x, y)
---
if flag: x = 1
print(x)
---
if not flag: x = 1
print(x)
---
if flag: x = 1
else: x = 2
print(x)
---
x = 1 if flag else y
---
flag or (x := 3)
print(x)
---
flag and (x := 3)
print(x)
---
0 > a > (x := 3)
print(x)
---
print([x := i for i in items], x)
---
print([x := i for i in []], x)
---
print([i for i in items], i)
---
print({k: v for k, v in table.items()}, k)
---
print(sum(i * n for i in items if i > a))
---
print((lambda x, y=b: x + y + c)(a))
---
def f(x): return x + a
print(f(1))
---
def f():
    global a
    a += 1
f(); print(a)
---
def f():
    x = a
    def g():
        nonlocal x
        x += b
        return x
    return g()
print(f())
---
def f(): return x
x = 1
print(f())
---
def f(): return x
print(f())
x = 1
---
def f(z=a, *args, k=b, **kw): return z, args, k, kw
print(f(), f(1, 2, k=3, j=4))
---
def f() -> text: return f.__name__
print(f())
---
class A(Thing):
    x = x
    def twice(self): return super().twice() + n
print(A(1).twice(), A.x, A.kind)
---
class A:
    x = 1
    y = [x for _ in items]
    def m(self): return x, y
print(A.y, A().m())
---
class A:
    if not flag: x = 1
    z = x
print(A.z)
---
with Quiet() as x: print(x)
print(x)
---
import contextlib
with contextlib.suppress(ZeroDivisionError):
    1 / 0
    x = 1
print(x)
---
try: x = 1 / 0
except ZeroDivisionError as e: print(e)
print(x)
---
try: 1 / 0
except ZeroDivisionError as e: pass
print(e)
---
try: pass
except ZeroDivisionError as e: pass
print(e)
---
try: nothing
except NameError: nothing = 1
print(nothing)
---
try: x
except NameError: x = 1
print(x)
---
try: x = 1
finally: print(x)
---
try: y = 1 / 0
finally: print(y)
---
try: z = 1
except ValueError: raise
else: y = 2
print(z, y)
---
try: import json as x
except ImportError: x = None
print(x.__name__)
---
try: raise ExceptionGroup("g", [ValueError(a)])
except* ValueError as e: print(len(e.exceptions))
---
match items:
    case [x, *y]: print(x, y)
print(x, y)
---
match table:
    case {"k": str()}: x = 1
    case {"z": x}: pass
print(x)
---
match b:
    case 1: x = 1
    case _: x = 2
print(x)
---
match (1, 2):
    case (x, 3): pass
print(x)
---
match Thing(4):
    case Thing(x=x) if x > a: print(x)
---
print(f"{a=} {text!r:>{n + b}} {items[0]}")
---
items[0] = a; items += [b]; items.append(c)
---
table["k"], box.value = box.value, table["k"]
print(table, box.value)
---
x: int = a
y: text
print(x, y)
---
from math import *
print(sqrt(a), x)
---
import os.path as k
print(k.basename("a/b"))
---
from __future__ import annotations
def f(z: undefined): return z
print(f(a))
---
print(max(items))
---
print(len(items), max)
---
print(undefined)
---
print(scaled(a), add(b))
---
print(sorted(items, key=lambda q: -q * n))
---
@lambda f: [f.__name__, a]
def g(): pass
print(g)
---
print(await later(a))
---
async for x in several(): print(x)
print(x)
---
print([q async for q in several() if q != a])
---
async def f(): return await later(b)
x = await f()
---
def gen():
    for q in items: yield q * n
print(list(gen()))
---
g = (q * x for q in items)
x = 2
print(list(g))
---
exec("w = 1"); print(w)
---
assert flag, undefined
print(a) if flag else print(undefined)
---
x, *y = items; (k, (i, e)) = a, (b, c)
print(x, y, k, i, e)
---
global a
a = 9
---
def f():
    try: return a
    finally: print(b)
print(f())
---
def f():
    import math as k
    class In: z = k.pi; w = x
    return In.z, In.w
print(f())
---
print(*items, **{"sep": text})
---
del items[0]; print(items)
---
if flag: del x
else: x = 1
print(x)
---
for box.value in items: pass
print(box.value)
---
if __name__ == "__main__": print(a)
"""


def outcome(source: str, namespace: dict[str, Any], defines: tuple[str, ...]) -> object:
    """What the program prints, raises, and leaves behind under the names it binds."""
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            code = compile(source, "Cell In[1]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            result = eval(code, namespace)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as raised:  # noqa: BLE001  # the cell's own, whatever it is
            error = repr(raised)
    plain = (int, str, list, dict, tuple, set, type(None))
    left = {name: namespace[name] for name in defines if name in namespace and isinstance(namespace[name], plain)}
    return printed.getvalue(), error, left


def fresh() -> dict[str, Any]:
    namespace = notebook()
    exec(NOTEBOOK, namespace)
    return namespace


@pytest.mark.parametrize("program", [each.strip("\n") for each in PROGRAMS.split("---\n")])
def test_a_cell_does_the_same_with_its_inputs_alone_as_in_the_notebook(program: str) -> None:
    namespace = fresh()
    captured = taken(program, namespace)
    # what the notebook's own functions read travels with them, which is the payload's business
    alone = outcome(captured.cell.source, notebook(**inputs(captured)), captured.defines)
    assert alone == outcome(captured.cell.source, fresh(), captured.defines)


def test_no_program_of_the_proof_takes_the_whole_notebook() -> None:
    for program in PROGRAMS.split("---\n"):
        assert len(taken(program, fresh()).inputs) <= 6, program


def test_the_defaults_of_provided_names_are_the_documented_ones() -> None:
    assert "__name__" in MODULE_NAMES
    documented = {"rank", "local_rank", "world_size", "device", "get_ipython", "display", "jupyter_distrib"}
    assert documented == PROVIDED - MODULE_NAMES
