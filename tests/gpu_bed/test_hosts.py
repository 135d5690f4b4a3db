"""GPUs of hosts that a command reaches: they are leased there, against whoever else uses them. Both hosts of the pool
are this machine, so they have the same GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook
from tests.processes import wait_until

pytestmark = pytest.mark.slow

WHERE = "import os\n(os.environ['CUDA_VISIBLE_DEVICES'], str(device))"


def add_pool(book: Notebook, hosts: str = "a,b", more: str = "") -> None:
    start = "env HOST={host} {python}"
    book.ok(
        f"%distributed_pool add far --kind command --hosts {hosts} --start '{start}' --python {sys.executable} --interface lo {more}"
    )


@pytest.fixture
def book(bed: GpuBed) -> Iterator[Notebook]:
    with bed.notebook() as one:
        add_pool(one, more="--nodes 2")
        yield one


def test_hosts_lease_different_gpus(book: Notebook, bed: GpuBed) -> None:
    outcome = book.ok(f"%%distributed --pool far --gpus 4\n{WHERE}")
    found = [line.partition(": ")[2] for line in outcome.result.splitlines()]
    assert len(set(found)) == 4, outcome.result
    seen = {line.split("'")[1] for line in found}
    assert len({number for words in seen for number in words.split(",")}) == 4, "each host has two of its own"
    assert wait_until(lambda: not bed.violations(), 5)


def test_gpus_that_others_have_are_not_planned_with_and_their_holder_is_named(book: Notebook, bed: GpuBed) -> None:
    with bed.notebook() as other:
        other.ok("%%distributed --gpus 6\nrank;")
        assert len(book.ok(f"%%distributed --pool far --gpus 2\n{WHERE}").result.splitlines()) == 2
        refused = book.fails("%%distributed --pool far --gpus 6\nrank")
        assert "6 ranks on 2 hosts are asked for, but the hosts have room for" in refused.traceback, refused.traceback
        assert "Others have GPUs there (a: " in refused.traceback, refused.traceback


def test_a_type_that_no_host_has_is_refused(book: Notebook) -> None:
    refused = book.fails("%%distributed --pool far --gpus 2 --gpu-type A10\nrank")
    assert "--gpu-type A10, but the hosts have NVIDIA H100 80GB HBM3" in refused.traceback, refused.traceback


def test_ranks_wait_for_gpus_of_hosts(book: Notebook, bed: GpuBed) -> None:
    with bed.notebook() as other:
        other.ok("%%distributed --gpus 8\nrank;")
        book.start(f"%%distributed --pool far --gpus 2 --wait 60\n{WHERE}")
        book.until("Others have GPUs there")
        other.ok("%distributed_pool stop")
        outcome = book.finish()
        assert len(outcome.result.splitlines()) == 2, outcome.text


@pytest.mark.parametrize("how", ["hangs", "broken", "old"])
def test_hosts_whose_driver_does_not_work_say_so(bed: GpuBed, how: str) -> None:
    bed.state["hangs"] = how == "hangs"
    bed.state["init"]["error"] = "LIB_RM_VERSION_MISMATCH" if how == "broken" else ""
    bed.state["cuda_driver"] = 11080 if how == "old" else 13000
    bed.write()
    why = {"hangs": "has not answered for 15 s", "broken": "does not work (", "old": "is too old: "}[how]
    with bed.notebook() as book:
        add_pool(book)
        refused = book.fails("%%distributed --pool far --gpus 2\n1")
        assert refused.evalue.startswith(f"--gpus 2, but on hosts a, b the GPU driver {why}"), refused.evalue
        assert refused.wall_s < 40
        unasked = book.ok("%%distributed --pool far\nstr(device)")
        assert "'cpu'" in unasked.result
        assert f"on hosts a, b the GPU driver {why}" in unasked.view
        assert book.ok("%%distributed --pool far --ranks 2\n1").result == "ranks 0-1: 1"
