"""The names in code, however deep they are nested, and the functions that decorated ones wrap."""

from __future__ import annotations

from types import CodeType

from jupyter_distrib.system.nested_code import codes_in, names_in

SOURCE = """
def outer(x):
    class Inner:
        def method(self):
            return [lambda: deep.attribute for _ in shallow]
    return Inner
"""


def outer() -> CodeType:
    (code,) = (each for each in compile(SOURCE, "cell", "exec").co_consts if isinstance(each, CodeType))
    return code


def test_a_code_object_comes_first_and_each_nested_one_once() -> None:
    names = [code.co_name for code in codes_in(outer()) if code.co_name != "<listcomp>"]  # inlined since Python 3.12
    assert names == ["outer", "Inner", "method", "<lambda>"]


def test_names_and_attributes_of_all_of_them_are_found() -> None:
    assert {"deep", "attribute", "shallow"} <= names_in(outer())
    assert "x" not in names_in(outer()), "a local variable"
