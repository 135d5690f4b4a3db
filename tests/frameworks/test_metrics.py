"""The reported numbers of a run in pandas."""

from __future__ import annotations

import pytest

from jupyter_distrib.kernel.analysis.metrics import Metrics
from tests.kernel.record.test_metrics import a_run

pytest.importorskip("pandas")


def test_the_reported_numbers_are_a_data_frame() -> None:
    frame = Metrics.of(a_run()).to_pandas()
    assert list(frame.columns) == ["rank", "step", "seconds", "loss", "accuracy"]
    assert frame.groupby("rank").loss.max().to_dict() == {0: 1.0, 1: 1.1}
    assert frame.accuracy.isna().sum() == 2
