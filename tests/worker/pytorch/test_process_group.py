"""`init_process_group` when a strategy has already made the group: the same backend, or one exact sentence. And groups that
are aborted."""

import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from jupyter_distrib.worker.pytorch import process_group
from jupyter_distrib.worker.pytorch.process_group import FALLBACK, check_backend, falls_back
from tests.processes import wait_until

CPU = "cpu:gloo,cuda:gloo"
GPU = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("made", "have"),
    [("gloo", CPU), ("cpu:gloo,cuda:nccl", GPU), ("nccl", "cuda:nccl"), ("cpu:gloo", "cpu:gloo")],
)
def test_torch_tells_a_groups_backends_as_pairs(made: str, have: str) -> None:
    assert str(BackendConfig(dist.Backend(made))) == have
    check_backend(made, have)


@pytest.mark.parametrize(
    ("asked", "have"),
    [
        (None, CPU),
        (None, GPU),
        ("undefined", GPU),
        (dist.Backend.UNDEFINED, CPU),
        ("gloo", CPU),
        ("GLOO", CPU),
        (dist.Backend("gloo"), CPU),
        (dist.Backend.GLOO, CPU),
        ("cpu:gloo", CPU),
        ("CPU:Gloo,CUDA:Gloo", CPU),
        ("nccl", GPU),
        ("NCCL", GPU),
        (dist.Backend.NCCL, GPU),
        ("gloo", GPU),
        ("cuda:nccl", GPU),
        ("cuda:nccl,cpu:gloo", GPU),
        (dist.Backend("cpu:gloo,cuda:nccl"), GPU),
        ("nccl", "cuda:nccl"),
    ],
)
def test_a_backend_that_the_group_has_is_fine(asked: str | None, have: str) -> None:
    check_backend(asked, have)


@pytest.mark.parametrize(
    ("asked", "have"),
    [
        ("nccl", CPU),
        ("NCCL", CPU),
        (dist.Backend.NCCL, CPU),
        ("cpu:gloo,cuda:nccl", CPU),
        ("cuda:gloo", GPU),
        ("cpu:nccl", GPU),
        ("xpu:gloo", GPU),
        ("mpi", GPU),
        ("gloo", "cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cuda:nccl"),
        ("", CPU),
        ("glo", CPU),
        ("cpu:", CPU),
    ],
)
def test_another_backend_is_refused(asked: str, have: str) -> None:
    with pytest.raises(ValueError, match="has already made"):
        check_backend(asked, have)


def test_the_error_names_both_and_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="init_process_group") as caught:
        check_backend("NCCL", CPU)
    assert str(caught.value) == (
        "init_process_group('NCCL'): the cell's strategy has already made the process group, with gloo. "
        "Leave out the call, ask for 'gloo', or run the cell with --strategy none."
    )
    with pytest.raises(ValueError, match=r"with cpu:gloo,cuda:nccl.*ask for 'cpu:gloo,cuda:nccl'"):
        check_backend("mpi", GPU)


@pytest.mark.parametrize(
    ("asked", "device", "wanted"),
    [
        ("nccl", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cpu", True),
        (dist.Backend.NCCL, "cpu", True),
        ("gloo", "cpu", False),
        (None, "cpu", False),
        ("nccl", "cuda:0", False),
    ],
)
def test_gloo_takes_the_place_of_nccl_on_cpu_ranks_if_it_may(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, device: str, wanted: bool
) -> None:
    assert not falls_back(asked, torch.device(device))

    monkeypatch.setenv(FALLBACK, "1")

    assert falls_back(asked, torch.device(device)) == wanted


def test_groups_that_are_aborted_are_freed_after_the_next_run_and_not_by_a_reducer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Group:
        """A group of torch, which forgets its groups when it aborts them."""

    known, aborted = [("0", Group(), (0,))], threading.Event()
    reference = weakref.ref(known[0][1])
    monkeypatch.setattr(process_group.private, "known_groups", lambda: iter(known))
    monkeypatch.setattr(process_group.private, "backends", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(process_group.private, "abort_groups", known.clear)
    rendezvous = process_group.Rendezvous(0, 1)
    rendezvous.abort(aborted.set)
    assert aborted.wait(5)
    assert reference() is not None
    rendezvous.tidy()
    assert reference() is not None
    rendezvous.tidy()
    assert reference() is None


def test_an_abort_keeps_errors_out_of_the_log_of_torch_until_the_watchdogs_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level, ends, during = process_group.private._log_level(), threading.Event(), list[int]()
    assert level is not None
    monkeypatch.setattr(process_group.private, "known_groups", lambda: iter([("0", object(), (0,))]))
    monkeypatch.setattr(process_group.private, "backends", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(process_group.private, "abort_groups", lambda: during.append(level.value))
    monkeypatch.setattr(process_group.private, "_watchdogs", lambda: set() if ends.is_set() else {"17"})
    for lowest, meanwhile in ((2, 3), (0, 0)):  # as ranks have it, and as a user has who wants to read all
        ends.clear()
        before, level.value = level.value, lowest
        try:
            done = threading.Event()
            process_group.Rendezvous(0, 1).abort(done.set)
            assert done.wait(5)
            assert (during.pop(), level.value) == (meanwhile, meanwhile)
            ends.set()
            assert wait_until(lambda lowest=lowest: level.value == lowest, 5)  # type: ignore[misc]
        finally:
            level.value = before


def test_errors_are_logged_again_though_a_watchdog_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    level = process_group.private._log_level()
    assert level is not None
    monkeypatch.setattr(process_group.private, "_watchdogs", lambda: {"17"})
    monkeypatch.setattr(process_group.private, "_WATCHDOGS_S", 0.2)
    before, level.value = level.value, 2
    try:
        with process_group.private.no_errors_of_watchdogs():
            assert level.value == 3
        assert level.value == 2
    finally:
        level.value = before
