"""Whether a cell uses MLflow, as far as that depends on the files beside the notebook; `tests/trackers` has the rest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jupyter_distrib.kernel.capture import mlflow_use


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").touch()
    return tmp_path / "theirs"


def uses() -> bool:
    return mlflow_use.of("import theirs", b"", (), {}) is not None


def test_a_module_beside_the_notebook_that_names_it_counts(folder: Path) -> None:
    assert not uses()
    (folder / "a.py").write_text("def f():\n    import mlflow\n")
    assert uses()


def test_what_is_no_file_in_a_package_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "a.py")
    (folder / "b.py").symlink_to("/dev/zero")
    assert not uses()


def test_a_module_of_empty_lines_takes_no_time(folder: Path) -> None:
    (folder / "a.py").write_text("\n" * 300_000)
    began_s = time.perf_counter()
    assert not uses()
    assert time.perf_counter() - began_s < 5
