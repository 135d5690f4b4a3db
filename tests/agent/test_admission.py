"""What a cell says while it waits for devices, in a real kernel on a machine with one feigned GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.agent.gpus.devices import Gpu
from tests.agent.lease_holder import Holder
from tests.gpu_bed import GpuBed
from tests.notebook import Notebook


@pytest.fixture
def bed() -> Iterator[GpuBed]:
    with GpuBed(count=1) as machine:
        yield machine


@pytest.fixture
def book(bed: GpuBed, tmp_path: Path) -> Iterator[Notebook]:
    with bed.notebook() as one:
        one.ok(f"import os; os.chdir({str(tmp_path)!r})")
        yield one


@pytest.mark.slow
def test_fresh_ranks_get_the_gpus_of_those_that_leave(book: Notebook, tmp_path: Path) -> None:
    """Which may take their time: they have exit handlers."""
    cell = dedent("""\
        import atexit, os, pathlib, time
        def leave():
            time.sleep(0.3)
            pathlib.Path(f'left {os.getpid()}').touch()
        atexit.register(leave)
        os.getpid(), os.environ['CUDA_VISIBLE_DEVICES']""")
    pids = []
    for line in ("", "%distributed_pool restart", "%distributed_pool resize --gpus 1"):
        book.ok(line)
        for option in ("", " --fresh"):
            outcome = book.ok(f"%%distributed --gpus 1{option}\n{cell}")
            found = re.fullmatch(r"rank 0: \((\d+), '0'\)", outcome.result)
            assert found, outcome.text
            assert "Waiting" not in outcome.text
            pids.append(found[1])
    assert len(set(pids)) == len(pids)
    assert {path.name for path in tmp_path.glob("left *")} == {f"left {pid}" for pid in pids[:-1]}


@pytest.mark.slow
def test_a_cell_sees_the_gpus_that_the_notebook_wants_seen_now(book: Notebook) -> None:
    cell = "import os\nos.environ['CUDA_VISIBLE_DEVICES']"
    played = "rank 0: '0'"
    assert book.ok(f"%%distributed\n{cell}").result == played
    book.ok("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''")
    assert book.ok(f"%%distributed --gpus 1\n{cell}").result == "rank 0: ''"
    assert book.ok(f"%%distributed\n{cell}").result == "ranks 0-1: ''"
    book.ok("os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    assert book.ok(f"%%distributed --gpus 1\n{cell}").result == played
    source = dedent("""\
        %%distributed
        import os
        os.getpid()""")
    pid = book.ok(source).result
    source = dedent("""\
        %%distributed
        import os
        os.getpid()""")
    assert book.ok(source).result == pid
    book.ok("del os.environ['CUDA_VISIBLE_DEVICES']")
    assert book.ok(f"%%distributed\n{cell}").result == played


def test_a_gpu_that_another_cell_uses_is_still_refused(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --gpus 1 --detach --out run
            import time
            time.sleep(300)""")
    )
    refused = book.fails("%%distributed --gpus 1 --fresh\nrank")
    assert "only 0 of 1 GPUs are free" in refused.traceback
    run = book.ok("run.id").result.strip("'")
    assert refused.evalue.endswith(f"`%distributed_attach {run}` shows the detached run.")
    book.ok("run.cancel()")


def test_a_cell_that_waits_for_a_gpu_says_at_once_who_has_it(bed: GpuBed, book: Notebook, holder: Holder) -> None:
    assert holder.hold(Gpu(index=0, uuid=bed.gpus[0]["uuid"], name="", memory_bytes=1, used_bytes=0))
    book.start("%%distributed --gpus 1 --wait 100\nrank", cell_id="c-1")
    told = book.until("Waiting: ").stdout  # the cell goes on
    book.manager.interrupt_kernel()
    outcome = book.finish()

    assert "other.ipynb (kernel 7)" in told
    assert outcome.ename == "KeyboardInterrupt"
