"""The contract suite: checks that every pool must pass, which authors of pools run on theirs. Kernel side; standard
library and asserts only.

    @pytest.mark.parametrize("check", testing.checks(), ids=lambda check: check.__name__)
    def test_my_pool(check):
        check(MyPool)

Each check opens the pool anew and leaves nothing open. `PoolClient` is the kernel's side, for checks of your own.
"""

from __future__ import annotations

from jupyter_distrib.testing.pool_checks import CHECKS, DETACHED, Check, OpenPool
from jupyter_distrib.testing.pool_client import LIMIT_S, Outcome, PoolClient

__all__ = ["LIMIT_S", "Check", "OpenPool", "Outcome", "PoolClient", "checks"]


def checks(*, detached: bool = False) -> tuple[Check, ...]:
    """Return all checks; with `detached` also the checks of pools whose runs can outlive the kernel's link."""
    return (*CHECKS, *(DETACHED if detached else ()))
