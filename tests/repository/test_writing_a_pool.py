"""The pool of docs/writing-a-pool.md is run as it stands there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jupyter_distrib import testing
from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.settings.available import POOLS
from jupyter_distrib.pools import base
from jupyter_distrib.pools.base import Pool
from tests.notebook import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "writing-a-pool.md").read_text("utf-8"), re.DOTALL)
(CODE,) = (block for block in BLOCKS if "class WrappedPool" in block)


@pytest.fixture(scope="module")
def wrapped() -> Any:
    namespace: dict[str, Any] = {}
    exec(CODE, namespace)
    return namespace["WrappedPool"]


def test_it_is_about_a_hundred_lines() -> None:
    assert len(CODE.splitlines()) < 110


SOME = ("gives_values_in_rank_order", "sends_output_in_order", "stops", "moves_big_values")


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [pytest.param(each, id=each.__name__) for each in testing.checks() if each.__name__ in SOME]
)
def test_it_keeps_the_contract(check: testing.Check, wrapped: Any) -> None:
    check(wrapped)


def test_it_says_what_it_cannot_start(wrapped: Any) -> None:
    with pytest.raises(
        PoolError, match=r"no-such-command cannot be started: (No such file or directory|Permission denied)"
    ):
        testing.PoolClient(wrapped(through="no-such-command"))


class _Entry:
    """An entry point as an installed package brings it."""

    name, value = "wrapped", "somewhere:WrappedPool"

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def load(self) -> Any:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Any:
    def bring(loaded: Any) -> None:
        monkeypatch.setattr(base.entry_points, "of_group", lambda group: [_Entry(loaded)])
        base._brought.cache_clear()

    yield bring
    base._brought.cache_clear()


def test_a_package_brings_it_by_an_entry_point(wrapped: Any, brought: Any) -> None:
    brought(wrapped)
    known = base.kinds()
    assert [option.flag for option in known["wrapped"]] == ["--through"]
    pool: Pool = base.open_pool("wrapped", {"through": "nice"})
    assert pool.through == ["nice"]  # type: ignore[attr-defined]


def test_one_that_is_broken_does_not_take_the_others_along(brought: Any) -> None:
    brought(ImportError("no module named engine"))
    with pytest.warns(UserWarning, match="the pool kind wrapped .* cannot be loaded: no module named engine"):
        assert set(base.kinds()) == set(POOLS)
