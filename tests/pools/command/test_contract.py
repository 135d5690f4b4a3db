"""The contract suite over hosts that a command reaches: here they are all this machine, behind two pipes."""

from __future__ import annotations

import sys

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.command.pool import CommandPool

ON_ONE_NODE = ("gives_values_in_rank_order", "sets_torchruns_variables", "numbers_ranks_from_the_first")
"""What these say of local ranks is so if all ranks are on one host."""

OF_A_RANK = (
    "closes_twice", "chooses_a_size", "gives_no_value_for_a_statement", "runs_where_the_kernel_is", "writes_logs",
    "reports_progress_and_numbers", "tells_a_syntax_error", "lets_cells_exit", "runs_one_after_another",
    "ends_the_run_of_a_group_that_is_closed", "knows_no_such_run",
)  # fmt: skip
"""Checks whose answer does not hang on the way to the ranks; tests/ssh/ has them all on two hosts, each of which takes
seconds to start."""
CHECKS = [check for check in testing.checks(detached=True) if check.__name__ not in OF_A_RANK]


def pool(nodes: int) -> CommandPool:
    start = "env HOST={host} {python}"
    return CommandPool(hosts="a,b", start=start, python=sys.executable, interface="lo", nodes=str(nodes))


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_hosts(check: testing.Check) -> None:
    check(lambda: pool(1 if check.__name__ in ON_ONE_NODE else 2))
