"""The contract of pools holds for ranks on GPUs, of this machine and of two hosts that a command reaches."""

from __future__ import annotations

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.local import LocalPool
from tests.feigned_cuda import FeignedCuda
from tests.pools.command import test_contract as of_hosts

OF_CPU_RANKS = ("opens_and_closes", "chooses_a_size")
"""Checks that expect ranks without GPUs, and so two by default."""


def on_gpus_hold(checks: tuple[testing.Check, ...] | list[testing.Check]) -> pytest.MarkDecorator:
    own = [each for each in checks if each.__name__ not in OF_CPU_RANKS]
    return pytest.mark.parametrize("check", own, ids=lambda check: check.__name__)


@on_gpus_hold(testing.checks(detached=True))
def test_of_local_ranks(check: testing.Check, asks_for_gpus: None, machine: FeignedCuda) -> None:
    check(LocalPool)
    assert all(len(gpus) <= 1 for gpus in machine.contexts().values())


@on_gpus_hold(of_hosts.CHECKS)
def test_of_two_hosts(check: testing.Check, asks_for_gpus: None, machine: FeignedCuda) -> None:
    """Both hosts are this machine, so that they lease different GPUs of it."""
    check(lambda: of_hosts.pool(1 if check.__name__ in of_hosts.ON_ONE_NODE else 2))
    assert all(len(gpus) <= 1 for gpus in machine.contexts().values())
