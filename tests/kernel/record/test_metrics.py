"""The numbers of a run as a table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.analysis.metrics import Metrics
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m


def a_run() -> RunRecord:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(2), world_size=2)
    for rank in range(2):
        record.apply(m.Started(run="r-7", rank=rank, pid=1, device="cpu", at_s=10.0))
    for step in range(2):
        for rank in range(2):
            values = {"loss": step + rank / 10, **({"accuracy": 0.5} if step else {})}
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values=values, at_s=11.0 + step))
    return record


def test_a_row_is_one_report_of_one_rank() -> None:
    metrics = Metrics.of(a_run())
    assert metrics.names == ("loss", "accuracy")
    assert len(metrics) == 4
    assert metrics[0] == {"rank": 0, "step": 0, "seconds": 1.0, "loss": 0.0, "accuracy": None}
    assert [row["loss"] for row in metrics] == [0.0, 1.0, 0.1, 1.1]
    assert repr(metrics) == "Metrics(loss, accuracy; 4 reports of 2 ranks)"


def test_a_metric_by_its_name_has_the_points_of_each_rank() -> None:
    metrics = Metrics.of(a_run())
    assert metrics["loss"] == {0: [(0, 0.0), (1, 1.0)], 1: [(0, 0.1), (1, 1.1)]}
    assert metrics["accuracy"] == {0: [(1, 0.5)], 1: [(1, 0.5)]}
    with pytest.raises(KeyError, match="no rank has reported 'lr'; reported: loss, accuracy"):
        metrics["lr"]


def test_the_table_goes_into_a_file_that_others_read(tmp_path: Path) -> None:
    Metrics.of(a_run()).to_csv(tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {"rank": "0", "step": "1", "seconds": "2.0", "loss": "1.0", "accuracy": "0.5"}
    assert rows[0]["accuracy"] == ""


def test_without_pandas_the_other_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DistributedError, match=r"pip install pandas, or use to_csv\(path\)"):
        Metrics.of(a_run()).to_pandas()


def test_a_run_without_reports_has_an_empty_table() -> None:
    metrics = Metrics.of(RunRecord(run="r-7", label="x", ranks=range(2), world_size=2))
    assert list(metrics) == []
    assert repr(metrics) == "Metrics(nothing reported; 0 reports of 0 ranks)"
