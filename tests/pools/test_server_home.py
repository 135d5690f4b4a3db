"""Files and folders in the way of an agent that is to be started, and the packages that it finds first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools import server_home
from jupyter_distrib.pools.server_home import Home


@pytest.mark.parametrize("kind", ["sock", "lock", "log"])
def test_a_folder_in_place_of_a_file_of_the_agent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / f"agent-x.{kind}"
    path.mkdir()
    with pytest.raises(PoolError, match=f"^the agent could not be started: {path} is in the way"):
        Home(name="agent-x").reach()


@pytest.mark.parametrize("kind", ["lock", "log"])
def test_files_of_the_agent_are_not_opened_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(folder))
    (folder / f"agent-x.{kind}").symlink_to(precious)
    with pytest.raises(PoolError, match="is in the way"):
        Home(name="agent-x").reach()
    assert precious.read_text() == "text"


def test_an_interpreter_that_was_deleted_since_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path))
    python = str(tmp_path / "venv" / "bin" / "python")
    with pytest.raises(PoolError, match=f"^there is no interpreter at {python} any more"):
        Home(name="agent-x", python=python).reach()


def test_packages_of_a_lower_layer_do_not_come_before_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this package is installed in a base environment, with another torch beside it."""
    lower = tmp_path / "base" / "site-packages"
    (lower / "jupyter_distrib" / "pools").mkdir(parents=True)
    (lower / "torch").mkdir()
    monkeypatch.setattr(server_home, "__file__", str(lower / "jupyter_distrib" / "pools" / "server_home.py"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "venv" / "site-packages"), str(lower)])
    run = tmp_path / "run"
    run.mkdir(mode=0o700)

    first = Path(Home(name="agent-x")._environment(run)["PYTHONPATH"].split(os.pathsep)[0])

    assert [each.name for each in first.iterdir()] == ["jupyter_distrib"]
    assert (first / "jupyter_distrib").resolve() == lower / "jupyter_distrib"
    monkeypatch.setattr(sys, "path", [str(lower), str(tmp_path / "other" / "site-packages")])
    assert Home(name="agent-x")._environment(run)["PYTHONPATH"].split(os.pathsep)[0] == str(lower)
