"""Every pool keeps the contract of `jupyter_distrib.testing`; what only one pool promises is below."""

from __future__ import annotations

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.inline import InlinePool
from jupyter_distrib.pools.local import LocalPool


@pytest.mark.parametrize("check", testing.checks(detached=True), ids=lambda check: check.__name__)
def test_local(check: testing.Check) -> None:
    check(LocalPool)


@pytest.mark.parametrize("check", testing.checks(), ids=lambda check: check.__name__)
def test_inline(check: testing.Check) -> None:
    check(InlinePool)
