"""The names in code, however deep they are nested, and the functions that decorated ones wrap."""

from __future__ import annotations

import functools
from types import CodeType

import pytest

from jupyter_distrib.system.nested_code import codes_in, names_in, undecorated

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


def around(function: object) -> object:
    @functools.wraps(function)  # type: ignore[arg-type]  # any object will do
    def wrapper() -> None: ...

    return wrapper


def test_the_function_below_all_decorators_is_found() -> None:
    assert undecorated(around(around(outer))) is outer
    assert undecorated(staticmethod(around(outer))) is outer
    assert undecorated(3) == 3


class Wrapped:
    def __init__(self) -> None:
        self.__wrapped__ = self


class Proxy:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [Wrapped, Proxy])
def test_an_object_that_wraps_itself_or_refuses_every_name_is_its_own_function(kind: type) -> None:
    value = kind()
    assert undecorated(value) is value
