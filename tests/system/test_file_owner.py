"""Whose files are."""

from __future__ import annotations

import importlib
import importlib.abc
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import jupyter_distrib
from jupyter_distrib.system import file_owner


def test_this_package_python_and_installed_packages_are_libraries() -> None:
    own = str(Path(jupyter_distrib.__file__).parent / "worker" / "main.py")
    assert file_owner.is_own(own)
    assert not file_owner.is_own(json.__file__)
    assert all(map(file_owner.is_library, (own, json.__file__, pytest.__file__)))
    assert not any(map(file_owner.is_users, (own, json.__file__, pytest.__file__)))


def test_files_beside_the_notebook_are_the_users_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "theirs.py").symlink_to(json.__file__)
    assert file_owner.is_users(str(tmp_path / "mine.py"))
    assert not file_owner.is_users(str(tmp_path / "theirs.py"))


def test_a_cell_is_the_users_and_code_without_a_file_is_nobodys() -> None:
    assert file_owner.is_users("Cell In[3]")
    assert not file_owner.is_users("<string>")
    assert not file_owner.is_library("None")


@pytest.mark.parametrize(("origin", "expected"), [(json.__file__, True), ("/home/me/mine.py", False), (None, False)])
def test_an_import_goes_on_until_its_module_is_kept(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, expected: bool
) -> None:
    seen = []

    class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            return ModuleSpec(name, self, origin=origin) if name == "just_executed" else None

        def exec_module(self, module: types.ModuleType) -> None:  # no code of the module is on the stack any more
            seen.append(file_owner.importing_library(sys._getframe()))

    monkeypatch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])
    importlib.import_module("just_executed")
    del sys.modules["just_executed"]
    assert seen == [expected]
