"""`report` and `progress` outside a run."""

from __future__ import annotations

import threading

from jupyter_distrib.worker import reporting


def test_reports_are_harmless_outside_a_run() -> None:
    assert reporting.current is None
    reporting.report(loss=1)
    assert list(reporting.progress(range(3))) == [0, 1, 2]


def test_what_one_thread_is_sending_comes_before_what_another_sends_later() -> None:
    """The timer's thread may be in the midst of it when the cell ends."""
    sent: list[int] = []
    sending, go_on = threading.Event(), threading.Event()

    def send(event: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            sending.set()
            assert go_on.wait(10)
        sent.append(event.step)  # type: ignore[attr-defined]

    reporter = reporting.Reporter("r", 0, send)
    for step in range(5):
        reporter.measured({"loss": 1.0}, step)
    thread = threading.Thread(target=reporter.flush)
    thread.start()
    assert sending.wait(10)
    reporter.measured({"loss": 1.0}, 5)
    threading.Timer(0.05, go_on.set).start()
    reporter.close()
    assert sent == [0, 1, 2, 3, 4, 5], "all of it, before the rank says that it has returned"
    thread.join()


def test_a_report_in_the_midst_of_sending_is_sent_too() -> None:
    sent: list[int] = []

    def send(event: object) -> None:
        sent.append(event.step)  # type: ignore[attr-defined]
        if len(sent) == 1:
            reporter.measured({"last": 1.0}, None)  # as a finalizer would

    reporter = reporting.Reporter("r", 0, send)
    reporter.measured({"loss": 1.0}, None)
    reporter.close()
    assert sent == [0, 1]
