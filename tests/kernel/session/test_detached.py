"""Which detached run is meant, among all of this user on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session import detached
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.system import run_list
from jupyter_distrib.system.run_list import ListedRun
from jupyter_distrib.wire import messages as m


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train.ipynb")
    return tmp_path


def begin(folder: Path, run: str, at_s: float, *, notebook: str = "", protocol: int = m.PROTOCOL) -> None:
    run_list.write(
        folder,
        ListedRun(
            run=run,
            label="Cell In[1]",
            holder="b.ipynb (kernel 7)",
            notebook=notebook,
            began_at_s=at_s,
            ended=False,
            server="agent-1",
            pid=os.getpid(),
            protocol=protocol,
        ),
    )


def chosen(name: str | None) -> str:
    run = detached.choose(name, KernelIdentity())
    return "" if run is None else run.run


def test_the_newest_of_this_notebook_comes_before_those_of_others(folder: Path) -> None:
    assert chosen(None) == ""
    begin(folder, "aaa-1", 2.0)
    begin(folder, "bbb-1", 3.0)
    assert chosen(None) == "bbb-1"
    begin(folder, "ccc-1", 1.0, notebook="/home/me/train.ipynb")
    assert chosen(None) == "ccc-1"


def test_a_run_is_named_by_its_id_or_its_number(folder: Path) -> None:
    begin(folder, "aaa-1", 1.0)
    begin(folder, "bbb-2", 2.0)
    assert [chosen("aaa-1"), chosen("1"), chosen("2"), chosen("3")] == ["aaa-1", "aaa-1", "bbb-2", ""]


def test_a_number_that_several_runs_have_is_this_notebooks_or_refused(folder: Path) -> None:
    begin(folder, "aaa-1", 1.0)
    begin(folder, "bbb-1", 2.0)
    with pytest.raises(PoolError, match=r"several detached runs end in 1: name one of aaa-1, bbb-1\."):
        chosen("1")
    begin(folder, "ccc-1", 0.0, notebook="/home/me/train.ipynb")
    assert chosen("1") == "ccc-1"


def test_a_run_of_another_version_is_reported_with_what_to_do(folder: Path) -> None:
    begin(folder, "aaa-1", 1.0, protocol=m.PROTOCOL + 1)
    with pytest.raises(PoolError) as refused:
        chosen(None)
    assert str(refused.value) == (
        "run aaa-1 (Cell In[1] of b.ipynb (kernel 7)) is held by another version of jupyter_distrib: "
        "attach to it in a kernel that has that version."
    )
