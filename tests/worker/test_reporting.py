"""`report` and `progress` outside a run."""

from __future__ import annotations

from jupyter_distrib.worker import reporting


def test_reports_are_harmless_outside_a_run() -> None:
    assert reporting.current is None
    reporting.report(loss=1)
    assert list(reporting.progress(range(3))) == [0, 1, 2]
