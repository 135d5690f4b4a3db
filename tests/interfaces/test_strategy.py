"""How a file of `strategies/` gives a strategy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.interfaces import strategy

ONE = """\
from jupyter_distrib.extend import Strategy, TrainingStrategy

class Whatever(Strategy):
    summary = 'ours'
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in place of `strategies/`."""
    package = tmp_path / "some_strategies"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(strategy, "BUILT_IN", package.name)
    caches = strategy._built_in, strategy._class_of, strategy._known
    for each in caches:
        each.cache_clear()
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]
    for each in caches:
        each.cache_clear()


def test_it_is_the_one_class_of_the_file_under_the_name_of_the_file(folder: Path) -> None:
    (folder / "logged.py").write_text(ONE)

    assert strategy.load("logged").summary == "ours"
    assert "logged" in strategy.declared()


@pytest.mark.parametrize(("more", "number"), [("class Other(Strategy): pass", 2), ("Whatever = None", 0)])
def test_a_file_with_none_or_two_is_an_error_that_names_it(folder: Path, more: str, number: int) -> None:
    (folder / "logged.py").write_text(f"{ONE}\n{more}\n")

    with pytest.raises(TypeError, match=rf"logged\.py must define one strategy, not {number}\."):
        strategy.load("logged")
