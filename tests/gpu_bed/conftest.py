"""Fixtures of the tests on feigned GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu_bed import GpuBed


@pytest.fixture
def bed() -> Iterator[GpuBed]:
    """A machine with 8 GPUs of its own, all alike."""
    with GpuBed(count=8) as machine:
        yield machine


@pytest.fixture(scope="module")
def shared_bed() -> Iterator[GpuBed]:
    """One machine for the tests of a module, which leave it as they found it."""
    with GpuBed(count=8) as machine:
        yield machine
