"""Which versions may be used, and which together."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from jupyter_distrib.wire import versions
from tests.installed_package import old_torch
from tests.notebook import ROOT, Notebook


@pytest.mark.parametrize("torch", ["2.6.0", "2.8.1+cu128", "1.13", "2.0.0a0+gitabc"])
def test_an_older_torch_is_refused(torch: str) -> None:
    assert versions.too_old(torch).startswith(f"torch {torch.partition('+')[0]} is too old for jupyter_distrib")


@pytest.mark.parametrize("torch", ["2.9.0", "2.13.0+cpu", "3.0", "2.10.0a0+git1", "", "unknown"])
def test_a_newer_one_and_one_of_which_nothing_is_known_are_not(torch: str) -> None:
    assert versions.too_old(torch) == ""


def test_the_package_declares_the_same_minimum() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={versions.OLDEST_TORCH}" in declared
    assert f"torch {versions.OLDEST_TORCH} or newer" in (ROOT / "docs/install.md").read_text()


def test_load_ext_with_an_older_torch_is_one_sentence(tmp_path: Path) -> None:
    with Notebook(tmp_path, old_torch(tmp_path)) as book:
        refused = book.fails("%load_ext jupyter_distrib")
        assert refused.evalue.startswith("torch 2.6.0 is too old for jupyter_distrib, which needs")
        assert len(refused.traceback.splitlines()) <= 3, refused.traceback
        book.fails("%%distributed --ranks 2\n1")
