"""Fixtures on the feigned CUDA runtime. Its tests skip themselves without torch's CUDA build: `sh .ci/cuda` has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.feigned_cuda import FeignedCuda, build
from tests.notebook import Notebook

WHY_NOT = build.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT))


@pytest.fixture(scope="module")
def machine() -> Iterator[FeignedCuda]:
    with FeignedCuda(gpus=8) as found:
        yield found


@pytest.fixture(scope="module")
def the_book(machine: FeignedCuda) -> Iterator[Notebook]:
    with machine.notebook() as found:
        yield found


@pytest.fixture
def book(the_book: Notebook) -> Notebook:
    """A kernel on the machine of this module, without the names of the tests before."""
    the_book.forget()
    return the_book
