"""`report` and `progress`: what is sent, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.output import reporting
from tests.worker.feigned_device import FeignedDevice


def test_reports_are_harmless_outside_a_run() -> None:
    assert identity.cell.reporter is None
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


def test_a_loss_with_its_gradient_is_reported_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    reporter = reporting.Reporter("r", 0, sent.append)
    monkeypatch.setattr(identity.cell, "reporter", reporter)
    loss = torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum()
    reporting.report(loss=loss, weight=torch.nn.Parameter(torch.tensor(2.0)), count=torch.tensor([3]))
    reporter.close()
    assert loss.requires_grad
    assert sent[0].values == {"loss": loss.item(), "weight": 2.0, "count": 3.0}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a reporter sends that takes every tensor for one of a device."""
    sent: list[Any] = []
    monkeypatch.setattr(identity.cell, "reporter", reporting.Reporter("r", 0, sent.append))
    monkeypatch.setattr(reporting, "is_on_device", lambda value: isinstance(value, torch.Tensor))
    return sent


def reporter() -> reporting.Reporter:
    assert isinstance(identity.cell.reporter, reporting.Reporter)
    return identity.cell.reporter


def test_a_tensor_of_a_device_is_reported_without_a_wait(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    device, loss = FeignedDevice(monkeypatch), torch.tensor(3.0, requires_grad=True)

    reporting.report(loss=loss)
    with torch.no_grad():
        loss.zero_()
    reporting.report(loss=2.0)
    reporter().flush()
    assert (sent, device.copies, device.waits) == ([], 1, 0)
    device.there = True
    reporter().close()

    assert [(each.step, each.values) for each in sent] == [(0, {"loss": 3.0}), (1, {"loss": 2.0})]
    assert device.waits == 0


def test_what_has_come_is_sent_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    device, arrived = FeignedDevice(monkeypatch), threading.Event()
    reporter()._send = lambda event: (sent.append(event), arrived.set())  # type: ignore[func-returns-value]
    reporting.report(loss=torch.tensor(3.0))

    device.there = True

    assert arrived.wait(10)
    assert sent[0].values == {"loss": 3.0}
    reporter().close()


def test_the_end_of_a_run_does_not_wait_for_a_device_that_hangs(
    monkeypatch: pytest.MonkeyPatch, sent: list[Any]
) -> None:
    monkeypatch.setattr(reporting, "CLOSE_WAIT_S", 0.01)
    device = FeignedDevice(monkeypatch)
    reporting.report(loss=torch.tensor(3.0), learning_rate=0.1)
    reporter().close()
    assert [each.values for each in sent] == [{"learning_rate": 0.1}]
    assert device.waits == 0


def test_a_device_that_has_failed_does_not_fail_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch, sent: list[Any]
) -> None:
    device = FeignedDevice(monkeypatch)

    def query() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "query", query)
    reporting.report(loss=torch.tensor(3.0))
    reporting.report(loss=1.0)
    reporter().close()
    assert [each.values for each in sent] == [{"loss": 1.0}]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_tensor_of_several_numbers_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, sent: list[Any], on_device: bool
) -> None:
    monkeypatch.setattr(reporting, "is_on_device", lambda _: on_device)
    with pytest.raises(TypeError, match=r"report\(loss=\.\.\.\) takes a number, not Tensor"):
        reporting.report(loss=torch.ones(2))
    assert not sent
