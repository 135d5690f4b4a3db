"""The functions that `torch.compile` traces in a model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jupyter_distrib.worker.autoparallel import traced
from jupyter_distrib.worker.autoparallel.patches import Patches


@pytest.mark.slow
def test_compiled_code_that_sets_a_mode_is_noticed_at_each_call_and_compiled_once() -> None:
    compilations: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        compilations.append(graph)
        return graph.forward

    model, patches = torch.nn.Linear(2, 2), Patches()

    @torch.compile(fullgraph=True, backend=backend)
    def evaluate(x: torch.Tensor) -> Any:
        model.eval()
        return model(x)

    patches.replace(torch.nn.Module, "train", traced.setting_mode)
    try:
        for _ in range(2):  # the model was in training mode at the first call, for which there is a graph of its own
            evaluate(torch.ones(1, 2))
        first = len(compilations)
        for _ in range(10):
            mark = traced.modes.mark()
            assert traced.modes.mark() is mark
            evaluate(torch.ones(1, 2))
            assert traced.modes.mark() is not mark
    finally:
        patches.undo()
    assert not model.training
    assert len(compilations) == first
