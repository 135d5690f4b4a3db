"""Which warm ranks fit what a cell asks for."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_distrib.kernel.session.pools import selection
from jupyter_distrib.kernel.session.pools.connection import GroupRequest, GroupState, WorkerGroup
from jupyter_distrib.kernel.settings.cell_options import GroupSize
from jupyter_distrib.wire import messages as m

TWO_CPUS = GroupSize(count=2, gpus=False)


def fits(ranks: WorkerGroup, wanted: GroupRequest) -> bool:
    return selection.fitting([ranks], wanted) == ([ranks], [])


def request(size: GroupSize, **more: Any) -> GroupRequest:
    return GroupRequest(**{"size": size, "load_env": {}, **more})


def group(
    asked: GroupRequest, *, ranks: int = 0, gpus: bool = False, state: GroupState = GroupState.OPEN
) -> WorkerGroup:
    workers = tuple(m.WorkerInfo(rank=rank, pid=1, device="cpu") for rank in range(ranks))
    return WorkerGroup(name="g", connection=None, asked=asked, workers=workers, gpus=gpus, state=state)  # type: ignore[arg-type]


def test_a_pool_without_gpus_gives_two_ranks_by_itself() -> None:
    assert GroupSize().on_cpus() == TWO_CPUS
    assert GroupSize(count=5, gpu_type="A10").on_cpus() == GroupSize(count=5, gpus=False, gpu_type="A10")


@pytest.mark.parametrize(
    ("asked", "fitting"),
    [
        (TWO_CPUS, True),
        (GroupSize(count=3, gpus=False), False),
        (GroupSize(count=2), False),
        (GroupSize(), False),
    ],
)
def test_cpu_ranks_that_are_up_fit_by_their_number(asked: GroupSize, fitting: bool) -> None:
    assert fits(group(request(GroupSize()), ranks=2), request(asked)) is fitting


@pytest.mark.parametrize(
    ("asked", "fitting"),
    [
        (GroupSize(), True),
        (GroupSize(count=4), True),
        (GroupSize(count=3), False),
        (GroupSize(gpu_type="a10"), True),
        (GroupSize(gpu_type="H100"), False),
        (GroupSize(count=4, gpus=False), False),
    ],
)
def test_gpu_ranks_that_are_up_fit_by_number_and_type(asked: GroupSize, fitting: bool) -> None:
    up = group(request(GroupSize(count=4, gpu_type="A10")), ranks=4, gpus=True)
    assert fits(up, request(asked)) is fitting


def test_ranks_that_are_starting_fit_what_they_were_asked_for() -> None:
    starting = group(request(TWO_CPUS), state=GroupState.OPENING)
    assert fits(starting, request(TWO_CPUS))
    assert not fits(starting, request(GroupSize()))


def test_gpu_ranks_do_not_fit_a_notebook_that_sees_other_devices() -> None:
    up = group(request(GroupSize(), visible=("0",)), ranks=1, gpus=True)
    assert fits(up, request(GroupSize(), visible=("0",)))
    assert not fits(up, request(GroupSize(), visible=("1",)))


def test_ranks_of_another_loading_environment_or_closed_ones_do_not_fit() -> None:
    assert not fits(group(request(TWO_CPUS), ranks=2), request(TWO_CPUS, load_env={"OMP_NUM_THREADS": "1"}))
    assert not fits(group(request(TWO_CPUS), ranks=2, state=GroupState.CLOSED), request(TWO_CPUS))
