"""Fixtures on the feigned CUDA runtime. Its tests skip themselves without torch's CUDA build: `sh .ci/cuda` has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
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


@pytest.fixture(scope="module")
def asks_for_gpus(machine: FeignedCuda) -> Iterator[None]:
    """Have this process start its agents on the machine, and ask for ranks with GPUs."""
    send = PoolClient.send

    def asking(client: PoolClient, command: Any, *more: Any) -> Any:
        if isinstance(command, m.OpenWorkerGroup):
            command = replace(command, gpus=True)
        return send(client, command, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolClient, "send", asking)
        for name, value in machine.environment.items():
            patch.setenv(name, value)
        yield
