"""`jupyter_distrib.runtime`: the place of a process among the ranks, before any group exists and outside a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from jupyter_distrib import runtime
from jupyter_distrib.interfaces import identity
from jupyter_distrib.libraries import known
from jupyter_distrib.system import process_environment
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook

GETTERS = (
    "get_global_rank",
    "get_local_rank",
    "get_node_rank",
    "get_world_size",
    "get_local_world_size",
    "get_num_nodes",
)
ASK = f"[getattr(jupyter_distrib.runtime, name)() for name in {GETTERS!r}]"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


def answers() -> list[int]:
    return [getattr(runtime, name)() for name in GETTERS]


def test_the_getters_are_all_that_the_module_has() -> None:
    assert sorted(runtime.__all__) == sorted(GETTERS)


@pytest.mark.parametrize("rank", range(4))
def test_each_of_two_ranks_on_two_nodes_knows_its_place(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    node, local = divmod(rank, 2)
    identity.assume(
        m.WorkerOrder(
            group="g", worker="w", agent_pid=0, rank=rank, world_size=4, local_rank=local, local_world_size=2,
            node_rank=node,
        )
    )  # fmt: skip
    try:
        set_here = identity.environment()
        for name, value in set_here.items():
            monkeypatch.setenv(name, value)
        ours = set_here.keys() - known.cpu_environment().keys()
    finally:
        identity._order = None

    assert answers() == [rank, local, node, 4, 2, 2]
    assert ours <= process_environment.SET_ON_RANKS, "--env is refused"


def test_outside_a_run_ranks_are_0_and_sizes_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "3")  # somebody's own

    assert answers() == [0, 0, 0, 1, 1, 1]


@pytest.mark.slow
def test_the_getters_answer_on_a_rank_before_and_in_a_group(book: Notebook) -> None:
    body = f"""
import subprocess, sys
import jupyter_distrib
before = {ASK}
import torch.distributed
torch.distributed.init_process_group("gloo")
inside = {ASK}
torch.distributed.destroy_process_group()
code = "import jupyter_distrib.runtime as r; print(r.get_global_rank(), r.get_world_size())"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
before, before == inside, child
"""
    outcome = book.ok("%%distributed --ranks 2\n" + body)

    assert outcome.result == (
        "rank 0: ([0, 0, 0, 2, 2, 1], True, ['0', '2'])\nrank 1: ([1, 1, 0, 2, 2, 1], True, ['1', '2'])"
    )
    assert book.ok(f"import jupyter_distrib\n{ASK}").result == "[0, 0, 0, 1, 1, 1]"
    assert book.ok(f"%%distributed --pool inline --ranks 2\n{ASK}[::3]").result == "rank 0: [0, 2]\nrank 1: [1, 2]"


def test_asking_loads_the_standard_library_only() -> None:
    code = "import sys, jupyter_distrib.runtime; print(*(n for n in sys.modules if n.startswith('jupyter_distrib.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["jupyter_distrib.runtime"]
