"""Whose files are."""

from __future__ import annotations

import importlib
import importlib.abc
import json
import os
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


@pytest.mark.parametrize("folder", ["lib/python3.11/site-packages", "lib/python3/dist-packages"])
def test_packages_of_another_environment_are_libraries(tmp_path: Path, folder: str) -> None:
    package = tmp_path / folder / "theirs"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert file_owner.is_library(str(package / "__init__.py"))


def test_what_pip_has_put_into_a_folder_is_a_library_and_what_is_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "theirs").mkdir(parents=True)
    (tmp_path / "cache" / "theirs" / "__init__.py").touch()
    folder = tmp_path / "packages"
    (folder / "theirs-1.0.dist-info").mkdir(parents=True)
    (folder / "theirs-1.0.dist-info" / "RECORD").write_text("theirs/__init__.py,,\n../bin/theirs,,\nalone.py,,\n")
    (folder / "theirs").symlink_to(tmp_path / "cache" / "theirs")  # as uv does with --link-mode symlink
    for name in ("alone.py", "mine.py"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(folder)

    assert file_owner.is_library(str(folder / "theirs" / "__init__.py"))
    assert file_owner.is_library(str(folder / "alone.py"))
    assert file_owner.is_users(str(folder / "mine.py"))


def test_a_list_of_installed_files_that_is_no_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in (("a", os.mkfifo), ("b", lambda path: path.symlink_to("/dev/zero"))):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        make(tmp_path / f"{name}-1.0.dist-info" / "RECORD")
    (tmp_path / "mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert file_owner.is_users(str(tmp_path / "mine.py"))


def test_a_cell_is_the_users_and_code_without_a_file_is_nobodys() -> None:
    assert file_owner.is_users("Cell In[3]")
    assert not file_owner.is_users("<string>")
    assert not file_owner.is_library("None")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [pytest.param(json.__file__, True, id="of Python"), ("/home/me/mine.py", False), (None, False)],
)
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
