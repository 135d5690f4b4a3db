"""Fixtures of the tests on feigned GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook
from tests.processes import wait_until


@pytest.fixture
def bed() -> Iterator[GpuBed]:
    """A machine with 8 GPUs of its own, all alike."""
    with GpuBed(count=8) as machine:
        yield machine


@pytest.fixture(scope="module")
def shared_bed() -> Iterator[GpuBed]:
    """One machine for the tests of a module; `shared_book` has it as it was before each test."""
    with GpuBed(count=8) as machine:
        yield machine


@pytest.fixture(scope="module")
def _book(shared_bed: GpuBed) -> Iterator[Notebook]:
    with shared_bed.notebook() as book:
        yield book


@pytest.fixture
def shared_book(shared_bed: GpuBed, _book: Notebook) -> Notebook:
    """One kernel on that machine, without ranks, and with all GPUs to be seen."""
    shared_bed.reset()
    _book.ok("import os; os.environ['CUDA_VISIBLE_DEVICES'] = 'none yet'")
    _book.ok("%distributed_pool stop")
    _book.ok("del os.environ['CUDA_VISIBLE_DEVICES']")
    assert shared_bed.ranks_gone()
    assert wait_until(lambda: all(gpu.holder == "" for server in shared_bed.status() for gpu in server.gpus))
    return _book
