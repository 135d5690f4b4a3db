"""Ranks and dry runs import what a user's file holds now, whatever was compiled from it before."""

from __future__ import annotations

import importlib
import os
import py_compile
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.system import file_owner
from jupyter_distrib.worker.environment import bytecode
from tests.notebook import Notebook

AT_NS = 1_700_000_000_000_000_000


def write(path: Path, value: int) -> None:
    """Write a module whose size and second of modification are always the same."""
    path.write_text(f"VALUE = {value}\n")
    os.utime(path, ns=(AT_NS + value, AT_NS + value))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that can be imported as `edited_often`."""
    monkeypatch.setattr(SourceFileLoader, "path_stats", SourceFileLoader.path_stats)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "edited_often.py"
    write(path, 1)
    py_compile.compile(str(path))
    write(path, 2)
    bytecode.distrust_old()
    yield path
    sys.modules.pop("edited_often", None)


def imported() -> int:
    sys.modules.pop("edited_often", None)
    importlib.invalidate_caches()
    return int(importlib.import_module("edited_often").VALUE)


def test_old_bytecode_of_a_users_module_is_compiled_again(module: Path) -> None:
    assert imported() == 2
    (compiled,) = module.parent.rglob("*.pyc")
    before = compiled.stat().st_mtime_ns
    assert imported() == 2
    assert compiled.stat().st_mtime_ns == before


def test_old_bytecode_that_cannot_be_removed_is_not_used(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "unlink", refuse)
    assert imported() == 2


def test_bytecode_of_a_library_is_left_alone(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_owner, "is_library", lambda path: True)
    assert imported() == 1


@pytest.mark.slow
def test_a_module_that_is_edited_twice_in_a_second_is_imported_again(tmp_path: Path) -> None:
    with Notebook(tmp_path, {"PYTHONDONTWRITEBYTECODE": ""}) as book:
        book.ok("%load_ext jupyter_distrib")
        for value in (1, 2, 3):
            write(tmp_path / "edited_often.py", value)
            found = book.ok(
                dedent("""\
                    %%distributed --ranks 2
                    import edited_often
                    edited_often.VALUE""")
            )
            assert found.result == f"ranks 0-1: {value}"
            dry = book.ok(
                dedent(f"""\
                    %%distributed --ranks 2 --dry-run
                    import edited_often
                    assert edited_often.VALUE == {value}""")
            )
            assert "did not train" in dry.result  # and did not fail
        assert list(tmp_path.rglob("*.pyc"))
