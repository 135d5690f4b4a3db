"""The contract of pools holds for ranks on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.feigned_cuda import FeignedCuda

OF_CPU_RANKS = ("opens_and_closes", "chooses_a_size")
"""Checks that expect ranks without GPUs, and so two by default."""
CHECKS = [each for each in testing.checks(detached=True) if each.__name__ not in OF_CPU_RANKS]


@pytest.fixture(scope="module")
def on_gpus(machine: FeignedCuda) -> Iterator[None]:
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


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_of_local_ranks(check: testing.Check, on_gpus: None, machine: FeignedCuda) -> None:
    check(LocalPool)
    assert all(len(gpus) <= 1 for gpus in machine.contexts().values())
