"""The contract suite over hosts that a command reaches: here they are all this machine, behind two pipes."""

from __future__ import annotations

import sys

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.command.pool import CommandPool

ON_ONE_NODE = ("gives_values_in_rank_order", "sets_torchruns_variables", "numbers_ranks_from_the_first")
"""What these say of local ranks is so if all ranks are on one host."""


def pool(nodes: int) -> CommandPool:
    start = "env HOST={host} {python}"
    return CommandPool(hosts="a,b", start=start, python=sys.executable, interface="lo", nodes=str(nodes))


@pytest.mark.slow
@pytest.mark.parametrize("check", testing.checks(detached=True), ids=lambda check: check.__name__)
def test_two_hosts(check: testing.Check) -> None:
    check(lambda: pool(1 if check.__name__ in ON_ONE_NODE else 2))
