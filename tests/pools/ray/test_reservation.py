"""Calls of the actor on a node. No Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_distrib.pools.ray.reservation import RayChannel, holders


@pytest.mark.parametrize("soon", [True, False])
def test_a_cluster_that_has_gone_is_reported_whichever_of_rays_calls_raises(soon: bool) -> None:
    """Ray Client: the first, or when one asks for what came of it."""

    def gone(*_: object) -> SimpleNamespace:
        raise ConnectionError("cut")

    class Actor:
        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(remote=gone if soon else lambda *_: SimpleNamespace(future=gone))

    channel = RayChannel(Actor())
    assert str(channel.ask("receive").exception()) == "cut"
    assert (channel.order("send", b"") is None) == soon


def test_who_has_the_ranks_is_reported_and_how_to_free_them() -> None:
    assert holders([]) == ""
    assert holders(["train.ipynb"]).startswith(
        " train.ipynb has ranks in it: `%distributed_pool stop` in that notebook"
    )
    assert "`%distributed_attach r-12` shows a detached run of it" in holders(["train.ipynb"], ["r-12"])
    assert holders(["b.ipynb", "a.ipynb"]).startswith(" a.ipynb, b.ipynb have ranks in it: ")
