"""The crash table on two nodes of a real Slurm: each place and each cause; tests/ssh has all pairs over the same pipe.
And cells that are started again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.product import crash_cases, restart_cases
from tests.ray.conftest import write_trusted
from tests.slurm.bed import SlurmBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def book(bed: SlurmBed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook whose default pool is the cluster: two ranks on two nodes."""
    folder = tmp_path_factory.mktemp("notebook")
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', "nodes = 2", "ranks = 2", 'interface = "lo"']
    write_trusted(folder, "\n".join([*lines, f"python = {sys.executable!r}", ""]))
    with Notebook(folder) as one:
        one.ok("%load_ext jupyter_distrib")
        assert one.cell("%%distributed\nrank;", timeout_s=60).status == "ok"
        yield one


@pytest.mark.parametrize(("where", "how"), [pytest.param(*case, id=" ".join(case)) for case in crash_cases.FEW])
def test_the_rank_at_fault_is_named_and_the_next_cell_is_good(book: Notebook, where: str, how: str) -> None:
    crash_cases.run(book, where, how, 1, line="%%distributed --strategy ddp")
    good = dedent("""\
        %%distributed --strategy ddp
        import torch, torch.distributed as dist
        t = torch.ones(1)
        dist.all_reduce(t)
        int(t)""")
    assert book.cell(good, timeout_s=60).result == "ranks 0-1: 2"


@pytest.mark.parametrize("victim", restart_cases.VICTIMS)
def test_a_cell_that_loses_a_rank_or_a_node_is_started_again(book: Notebook, victim: str) -> None:
    restart_cases.check(book, victim, ranks=2)
