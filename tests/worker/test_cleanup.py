"""What a rank does when no cell comes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment.cleanup import Cleanup


class Cyclic:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def released() -> list[str]:
    return []


def cleanup(released: list[str], *, has_gpu: bool) -> Cleanup:
    framework: Any = SimpleNamespace(
        finish=list,
        preload=lambda: iter(()),
        warm_device=lambda: released.append("warm"),
        release_memory=lambda: released.append("memory"),
    )
    return Cleanup(framework, has_gpu=has_gpu)


def command() -> m.Execute:
    setting = m.Setting()
    inputs = m.Parcel(data=b"")
    return m.Execute(
        run="r", group="g", ranks=(0,), cell=m.Cell(source="", filename="c"), inputs=inputs, setting=setting
    )


def test_a_gpu_rank_collects_before_the_next_cell_and_gives_memory_back_when_idle(released: list[str]) -> None:
    cleaning, value = cleanup(released, has_gpu=True), Cyclic()
    alive = weakref.ref(value)
    cleaning.after(command(), {"value": value})
    del value

    assert cleaning.is_urgent
    cleaning.collect()
    assert alive() is None
    for _, clean in cleaning.when_idle():
        clean()
    assert released == ["memory"]
    assert not cleaning.is_urgent
    assert list(cleaning.when_idle()) == []


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_gpu_is_warmed_once_and_only_before_the_first_cell(released: list[str], has_gpu: bool) -> None:
    """A workspace that a cell's CUDA graphs use must stay."""
    idle, used = cleanup(released, has_gpu=has_gpu), cleanup(released, has_gpu=has_gpu)
    for _ in range(2):
        for _, do in idle.when_idle():
            do()
    assert released == ["warm"] * has_gpu
    used.after(command(), {})
    for _, do in used.when_idle():
        do()
    assert "warm" not in released[1:]


def test_a_cpu_rank_collects_when_it_is_idle(released: list[str]) -> None:
    cleaning, value = cleanup(released, has_gpu=False), Cyclic()
    alive = weakref.ref(value)
    cleaning.after(command(), {"value": value})
    del value

    assert not cleaning.is_urgent
    for _, clean in cleaning.when_idle():
        clean()
    assert alive() is None
    assert released == []


def test_a_rank_imports_one_library_after_another_once_it_has_run_a_cell(released: list[str]) -> None:
    """It is not replaced by one that was forked with them, since the cell may have left state in the process."""

    def preload() -> Iterator[None]:
        for name in ("first", "second"):
            released.append(name)
            yield
        raise ImportError("a module of the user hides it")

    framework: Any = SimpleNamespace(finish=list, preload=preload)
    cleaning = Cleanup(framework, has_gpu=False)
    assert list(cleaning.when_idle()) == []
    cleaning.after(command(), {})

    for number, (_, do) in enumerate(cleaning.when_idle()):
        do()
        assert len(released) <= number
    assert released == ["first", "second"]
    assert list(cleaning.when_idle()) == []
