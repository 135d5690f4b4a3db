"""Whose files are."""

from __future__ import annotations

import json
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
