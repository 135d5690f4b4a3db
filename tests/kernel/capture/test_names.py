"""Which names a program needs from outside: one table, one row a program."""

from __future__ import annotations

import argparse
import ast
import asyncio.base_events
import builtins
import dataclasses
import enum
import functools
import inspect
import logging
import subprocess
import sys
import typing
from textwrap import dedent
from types import ModuleType

import pytest

from jupyter_distrib.kernel.capture.names import LAZY_ANNOTATIONS, Names, analyse


def names(program: str) -> Names:
    return analyse(ast.parse(dedent(program)))


def needs(program: str) -> str:
    """`a b?`: needs `a` for certain, and perhaps `b`; sorted."""
    found = names(program).needs
    return " ".join(sorted(need.name + ("" if need.certain else "?") for need in found))


STRAIGHT = [
    ("", ""),
    ("# only a comment", ""),
    ("a", "a"),
    ("a = b", "b"),
    ("a = 1; a", ""),
    ("a = a", "a"),
    ("a += 1", "a"),
    ("a[0] += b", "a b"),
    ("a.x = b", "a b"),
    ("a, (b, *c) = d; a, b, c", "d"),
    ("a: int = b; a", "b int"),
    ("a: int", "int"),
    ("del a", "a"),
    ("a = 1; del a; a", ""),
    ("del a; a", "a"),
    ("import a.b.c; a", ""),
    ("import a.b as c; a, c", "a"),
    ("from a import b as c; b, c", "b"),
    ("from a import *; b", "b?"),
    ("b\nfrom a import *", "b"),
    ("f'{a} {b:{c}} {d!r} {e=}'", "a b c d e"),
    ("(a := b) + a", "b"),
    ("a + (a := b)", "a b"),
    ("a[b:c, ...]", "a b c"),
    ("f(a, *b, k=c, **d)", "a b c d f"),
    ("{**a, 'k': b}", "a b"),
    ("await a", "a"),
    ("assert a, b", "a b"),
    ("raise A from b", "A b"),
    ("global a; a = 1; a", ""),
    ("raise E\na", "E a?"),
    ("lambda: a", "a?"),
    ("a = 1; lambda: a", ""),
    ("lambda a, *b, c=d, **e: a + b + c + e", "d"),
    ("(lambda: (a := 1) + a)()", ""),
    ("a and b or c", "a b c"),
    ("(a := 0) and (b := 1); b", "b?"),
    ("(a if c else b)", "a b c"),
    ("(a := 1) if c else (a := 2); a", "c"),
    ("0 < (a := 1) < (b := 2); a, b", "b?"),
]

PATHS = [
    ("if c: a = 1\na", "a? c"),
    ("if c: a = 1\nelse: a = 2\na", "c"),
    ("if c: a = 1\nelif d: a = 2\na", "a? c d"),
    ("if c: a = 1\nelif d: a = 2\nelse: a = 3\na", "c d"),
    ("if c: a = 1\nelse: raise E\na", "E c"),
    ("if c: a\nelse: a = 1", "a c"),
    ("if True: a = 1\na", ""),
    ("if 0: a\nelse: b = 1\nb", "a?"),
    ("for i in a: i", "a"),
    ("for i in a: pass\ni", "a i?"),
    ("for i in a: b = i\nb", "a b?"),
    ("for i in a:\n  b\n  b = 1", "a b"),
    ("for i in a: pass\nelse: b = 1\nb", "a"),
    ("for i in a:\n  if i: break\nelse: b = 1\nb", "a b?"),
    ("for i in a:\n  if i:\n    b = 1; break\nelse: b = 2\nb", "a"),
    ("for a.x in b: a", "a b"),
    ("async def f():\n  async for i in a: i", "a?"),
    ("async for i in a: i", "a"),
    ("while a: b = 1\nb", "a b?"),
    ("while True:\n  a = 1\n  break\na", ""),
    ("while True:\n  if c: break\n  a = 1\na", "a? c"),
    ("while True:\n  a = 1\n  if c: break\na", "c"),
    ("while (a := f()): a\na", "f"),
    ("while a: pass\nelse: b = 1\nb", "a"),
    ("while True:\n  if c:\n    break\n    a = 1\na", "a? c"),
    ("while True:\n  if c: continue\n  a = 1\n  break\na", "c"),
    ("with a as b: c = b\nc", "a"),
    ("with a as (b, c), b as d: c, d", "a"),
    ("async with a as b: b", "a"),
    ("with suppress(NameError): b\n", "NameError b? suppress"),
    ("with contextlib.suppress(E): b = f()\nb", "E b? contextlib f?"),
    ("try: a = f()\nexcept E: pass\na", "E a? f"),
    ("try: a = f()\nexcept E: a = 1\na", "E f"),
    ("try: a = f()\nexcept E: raise\na", "E f"),
    ("try: a\nexcept NameError: a = 1\na", "NameError a?"),
    ("try: a\nexcept (NameError, E): a = 1", "E NameError a?"),
    ("def f():\n try: a\n except NameError: a()\nf()", "NameError a?"),
    ("try: f()\nexcept E as e: e\n", "E f"),
    ("try: f()\nexcept E as e: e\ne", "E e f"),
    ("try: f()\nexcept E: pass\nelse: a = 1\na", "E a? f"),
    ("try: a = f()\nfinally: a", "a? f"),
    ("try: f()\nfinally: a = 1\na", "f"),
    ("try: a = f()\nfinally: b\na", "b f"),
    ("try: import a\nexcept ImportError: a = None\na", "ImportError"),
    ("try: f()\nexcept* E as g: g", "E f"),
    ("match a:\n  case 1: b = 1\n  case _: b = 2\nb", "a"),
    ("match a:\n  case 1: b = 1\nb", "a b?"),
    ("match a:\n  case [x, *y]: x, y\n  case {'k': z, **w}: z, w\n  case C(v, k=u): v, u", "C a"),
    ("match a:\n  case m.X: pass\n  case b if b > c: b", "a c m"),
    ("match a:\n  case None | True | -1 | 'x': b\n  case A(): c", "A a b c"),
    ("match a:\n  case (1 | 2) as b: b\n  case b: b\nb", "a"),
]

SCOPES = [
    ("def f(): a", "a?"),
    ("def f(): a\nf()", "a"),
    ("def f():\n  for i in a: b(i)\nf()", "a b"),
    ("def f():\n  if c: a\nf()", "a? c"),
    ("def f():\n  if c: return\n  a\nf()", "a? c"),
    ("def f():\n  return 1\n  a\nf()", "a?"),
    ("def f():\n  def g(): a\n  g()\nf()", "a?"),
    ("a = 1\ndef f(): a", ""),
    ("def f(): a\na = 1\nf()", "a?"),
    ("if c: a = 1\ndef f(): a\nf()", "a? c"),
    ("def f(): a = 1; return a", ""),
    ("def f():\n  a = 1\n  def g(): return a\n  return g", ""),
    ("def f():\n  def g(): return a\n  a = 1\n  return g", ""),
    ("def f(a, /, b, *c, d, **e): a, b, c, d, e", ""),
    ("def f(a=b, *, c=d): pass", "b d"),
    ("@a.b(c)\ndef f(): pass", "a c"),
    ("def f():\n  global a\n  a += 1\nf()", "a?"),
    ("def f():\n  global a\n  a = 1\nf(); a", "a?"),
    ("def f():\n  a = 1\n  def g():\n    nonlocal a\n    a += 1\n  return g", ""),
    ("def f():\n  a = 1\n  def g():\n    global a\n    return a", "a?"),
    ("def f():\n  import a; from b import c\n  for i in d: i\n  with e as h: a, c, h", "d? e?"),
    ("def f():\n  try: pass\n  except E as e: e\n  del g", "E?"),
    ("def f(): f()", "f?"),
    ("def f(): pass\nf()", ""),
    ("async def f(): await a\nawait f()", "a"),
    ("class A(B, metaclass=C): x = a", "B C a"),
    ("class A:\n  x = 1\n  y = x", ""),
    ("class A:\n  x = x", "x"),
    ("class A:\n  if c: x = 1\n  x", "c x?"),
    ("class A:\n  x = 1\n  def f(self): return x", "x?"),
    ("class A:\n  x = 1\n  y = [x for _ in a]", "a x"),
    ("class A:\n  x = [1]\n  y = [i for i in x]", ""),
    ("class A:\n  def f(self): return super().f(__class__)", "super?"),
    ("class A: __qualname__, __module__", ""),
    ("class A:\n  global x\n  x = 1\nx", "x?"),
    ("class A:\n  def f(self): return A", "A?"),
    ("def f():\n  class A:\n    x = y\n    z = x\n  return A\nf()", "y"),
    ("def f():\n  y = 1\n  class A: x = y", ""),
    ("[i for i in a]", "a"),
    ("[i for i in i]", "i"),
    ("[f(i, j) for i in a for j in i if b]", "a b f"),
    ("{k: v for k, v in a}; k", "a k"),
    ("{(b := i) for i in a}; b", "a b?"),
    ("[[i for i in j] for j in a]", "a"),
    ("[(lambda: i + b)() for i in a]", "a b?"),
    ("sum(f(i) for i in a)", "a f sum"),
    ("g = (f(i) for i in a)\nf = 1", "a f?"),
    ("[i async for i in a]", "a"),
    ("def f(): return [i for i in a if b]\nf()", "a b"),
    ("def f():\n  [(x := i) for i in a]\n  return x", "a?"),
]


@pytest.mark.parametrize(("program", "expected"), STRAIGHT + PATHS + SCOPES)
def test_a_program_needs_what_it_may_read_before_it_binds_it(program: str, expected: str) -> None:
    assert needs(program) == " ".join(sorted(expected.split()))


@pytest.mark.parametrize(
    "program",
    ["def f(a: T, *b: U) -> V: pass", "class A:\n  x: T\n  y: U = V", "x: T\ny: U = V"],
)
def test_annotations_are_read_unless_they_are_lazy(program: str) -> None:
    certain = {need.name: need.certain for need in names(program).needs}
    assert certain["T"] is certain["U"] is not LAZY_ANNOTATIONS
    lazy = {need.name: need.certain for need in names("from __future__ import annotations\n" + program).needs}
    assert lazy["T"] is lazy["U"] is False


def test_annotations_inside_a_function_are_never_read() -> None:
    cell = dedent("""\
        def f():
          a: T = b
          a
        f()""")
    assert needs(cell) == "b"


def test_an_annotation_without_a_value_makes_a_local_in_a_function() -> None:
    cell = dedent("""\
        def f():
          a: int
          return a""")
    assert needs(cell) == ""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def f[T: B](x: T) -> T:\n  y: T\n  return T", "B?"),
        ("class A[T](C[T]):\n  def f(self): return T", "C"),
        ("type X[T] = list[T] | a\nX", "a? list?"),
        ("T\ndef f[T](): pass", "T"),
    ],
)
def test_type_parameters_hide_outer_names(program: str, expected: str) -> None:
    assert needs(program) == expected


@pytest.mark.skipif(sys.version_info < (3, 14), reason="syntax of Python 3.14")
def test_forkserver_strings_are_read_at_once() -> None:
    assert needs("t'{a} {b:{c}}'") == "a b c"


@pytest.mark.parametrize(
    "module",
    [argparse, ast, asyncio.base_events, dataclasses, enum, functools, inspect, logging, subprocess, typing],
    ids=lambda module: module.__name__,
)
def test_a_module_that_works_needs_nothing_for_certain(module: ModuleType) -> None:
    needs_ = names(inspect.getsource(module)).needs
    needed = [need for need in needs_ if need.certain and not hasattr(builtins, need.name)]
    assert [need for need in needed if not need.name.startswith("__")] == []


def test_a_need_tells_the_first_line_that_reads_it() -> None:
    cell = dedent("""\
        x = 1
        def f():
          return (
            a)
        a
    """)
    needs_ = names(cell).needs
    assert [(need.name, need.line, need.certain) for need in needs_] == [("a", 4, True)]


def test_needs_come_in_the_order_of_their_lines() -> None:
    assert [need.name for need in names("def f():\n  z\ny\nx").needs] == ["z", "y", "x"]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("a = b = 1\nimport c.d, e as f\ndef g(): h = 1\nclass I: j = 1", "a b c f g I"),
        ("for a in b: c = 1\nwith d as e: pass", "a c e"),
        ("[x for x in y]; (z := 1)", "z"),
        ("def f():\n  global a\n  a = 1", "a f"),
        ("try: a = 1\nexcept E as e: b = 1", "a b"),
        ("e = 1\ntry: a = 1\nexcept E as e: pass", "e a"),
        ("x: int", ""),
        ("from a import *", ""),
        ("match a:\n  case [b, {'k': c}]: pass", "b c"),
    ],
)
def test_a_program_defines_what_it_binds_at_module_level(program: str, expected: str) -> None:
    assert names(program).defines == tuple(expected.split())


@pytest.mark.parametrize(
    "program",
    [
        " + ".join(["a"] * 3000),
        "a" + ".b()" * 400,
        "if a: b = 1\n" + "elif a: b = 1\n" * 300 + "else: b = 1\nb",
    ],
    ids=["sum", "chain", "elif"],
)
def test_long_chains_do_not_exhaust_the_stack(program: str) -> None:
    try:
        tree = ast.parse(program)
    except (RecursionError, MemoryError):
        pytest.skip("this Python cannot parse it either")
    assert [need.name for need in analyse(tree).needs] == ["a"]
