"""What this process tells of itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jupyter_distrib.interfaces import identity
from jupyter_distrib.system import process_environment
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import rank_environment


class Refusing:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["train.py", "--lr", "1"], ("train.py", "--lr", "1")),
        (["train.py", 2, Path("data")], ("train.py", "2", "data")),
        (["", "--lr"], ("", "--lr")),
        ([""], ()),
        ([], ()),
        (None, ()),
        ("train.py", ()),
        (["train.py", Refusing()], ()),
    ],
)
def test_arguments_are_texts_or_there_are_none(
    monkeypatch: pytest.MonkeyPatch, given: object, found: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", given)
    assert process_environment.argv() == found


def test_arguments_may_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "argv")
    assert process_environment.argv() == ()


@pytest.mark.parametrize("left", [None, "train.py"])
def test_the_next_cell_has_arguments_whatever_the_last_one_has_left(
    monkeypatch: pytest.MonkeyPatch, left: object
) -> None:
    monkeypatch.setattr(sys, "argv", left)
    monkeypatch.setattr(sys, "path", list(sys.path))
    order = m.WorkerOrder(group="", worker="", agent_pid=0, rank=0, world_size=1, local_rank=0, local_world_size=1)
    with identity.assumed(order):
        rank_environment.apply(m.Setting(argv=("a.py",), path=tuple(sys.path)), dict(os.environ))
        assert sys.argv == ["a.py"]
        monkeypatch.delattr(sys, "argv")
        rank_environment.apply(m.Setting(path=tuple(sys.path)), dict(os.environ))
    assert sys.argv == [rank_environment.PROGRAM]
