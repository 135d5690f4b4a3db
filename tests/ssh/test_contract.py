"""The contract suite over two hosts by ssh, but for `attaches`: it speaks to ranks by a file in /tmp, which these hosts
do not share. tests/pools/command runs it over the same pipe."""

from __future__ import annotations

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.ssh.pool import SshPool
from tests.ssh.bed import Bed

pytestmark = pytest.mark.slow

ON_ONE_NODE = ("gives_values_in_rank_order", "sets_torchruns_variables", "numbers_ranks_from_the_first")
"""What these say of local ranks is so if all ranks are on one host."""


@pytest.mark.parametrize("check", testing.checks(), ids=lambda check: check.__name__)
def test_two_hosts(check: testing.Check, bed: Bed) -> None:
    check(lambda: SshPool(**bed.options, nodes="1" if check.__name__ in ON_ONE_NODE else "2"))
