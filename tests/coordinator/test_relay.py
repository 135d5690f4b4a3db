"""The relay of a node: what it adds to commands on their way to the agent."""

from __future__ import annotations

import pytest

from jupyter_distrib.coordinator import relay
from jupyter_distrib.wire.link import decode_frame, encode
from jupyter_distrib.wire.messages import OpenWorkerGroup


@pytest.mark.parametrize(
    ("assigned", "variable", "visible"),
    [
        (None, "4,5", ("4", "5")),
        (None, None, None),
        (["2", "3"], None, ("2", "3")),
        (["2"], "2", ("2",)),
    ],
)
def test_ranks_see_the_gpus_that_the_engine_has_assigned(
    monkeypatch: pytest.MonkeyPatch, assigned: list[str] | None, variable: str | None, visible: tuple[str, ...] | None
) -> None:
    """Also where it sets no variable, as Ray does if it is told so: without one, all GPUs of the node are to be seen."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    node = object.__new__(relay.Relay)
    node._gpus = assigned
    asked = encode(OpenWorkerGroup(group="c1", size=2, gpus=True, visible=("0",)), 0)

    given, _ = decode_frame(node._localized(asked))
    assert isinstance(given, OpenWorkerGroup)
    assert given.visible == visible
