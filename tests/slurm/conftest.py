"""A real Slurm of two nodes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.bed import SlurmBed, missing


@pytest.fixture(autouse=True, scope="session")
def slurm_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def bed(slurm_is_here: None) -> Iterator[SlurmBed]:
    one = SlurmBed()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in one.environment.items():
            patch.setenv(name, value)
        yield one
    one.close()
