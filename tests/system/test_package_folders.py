"""Packages that have changed in folders, and folders of packages that come first on the path."""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.system import package_folders
from jupyter_distrib.system.package_folders import PackageFolders


def add(folder: Path, *records: str) -> None:
    for record in records:
        (folder / record).mkdir(parents=True)
        (folder / record / "METADATA").write_text("")


def again(folder: Path) -> None:
    """Install the same version of a package again."""
    shutil.rmtree(folder / "here-1.0.dist-info")
    add(folder, "here-1.0.dist-info")
    os.utime(folder / "here-1.0.dist-info", (1, 1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: add(folder, "new-2.0.dist-info"), "new 2.0"),
        (lambda folder: add(folder, "old_style-2.0-py3.11.egg-info"), "old_style 2.0"),
        (lambda folder: (folder / "here-1.0.dist-info").rename(folder / "here-1.1.dist-info"), "here 1.1"),
        (again, "here 1.0"),
        (lambda folder: shutil.rmtree(folder / "here-1.0.dist-info"), "here (removed)"),
        (lambda folder: (folder / "editable.pth").write_text("/src"), "editable"),
        (lambda folder: add(folder, "a-1.dist-info", "b-2.dist-info"), "a 1 and b 2"),
        (lambda folder: add(folder, *(f"p{n}-1.dist-info" for n in range(9))), "p0 1, p1 1, p2 1 and 6 others"),
        (lambda folder: (folder / "__pycache__").mkdir(), ""),
        (lambda folder: (folder / "module.py").write_text(""), ""),
        (shutil.rmtree, "here (removed)"),
    ],
)
def test_what_has_changed_is_named(tmp_path: Path, change: Callable[[Path], object], told: str) -> None:
    folder = tmp_path / "site-packages"
    add(folder, "here-1.0.dist-info")
    before = PackageFolders([str(folder)])
    assert before.changes == ""

    change(folder)

    assert before.changes == before.changes == told


def test_what_is_as_it_was_has_not_changed(tmp_path: Path) -> None:
    add(tmp_path, "here-1.0.dist-info")
    before = PackageFolders([str(tmp_path)])
    add(tmp_path, "new-1.0.dist-info")
    assert before.changes
    shutil.rmtree(tmp_path / "new-1.0.dist-info")
    assert not before.changes


def test_folders_without_changes_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = PackageFolders([str(tmp_path)])
    monkeypatch.setattr(os, "scandir", lambda folder: pytest.fail(f"{folder} was listed"))
    assert before.changes == ""


def test_folders_of_packages_count_that_come_before_those_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path / "target", "here-1.0.dist-info")
    add(tmp_path / "last", "here-1.0.dist-info")
    (tmp_path / "sources").mkdir()
    own = site.getsitepackages()[0]
    path = [
        "",
        str(tmp_path / "sources"),
        str(tmp_path / "target"),
        str(tmp_path / "gone"),
        own,
        str(tmp_path / "last"),
    ]
    monkeypatch.setattr(sys, "path", path)

    assert package_folders.added_first() == (str(tmp_path / "target"),)
    assert own in package_folders.on_path()
