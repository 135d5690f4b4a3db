"""GPUs change hands between cells and notebooks, while ranks use memory on them as real contexts do."""

from __future__ import annotations

import ast
import os
import re
import signal
from textwrap import dedent

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Outcome
from tests.processes import wait_until, wait_until_gone

pytestmark = pytest.mark.slow  # each test starts an agent of its own

WHERE = "import os, torch\n(os.getpid(), str(device))"


def pids(outcome: Outcome) -> list[int]:
    assert outcome.status == "ok", outcome.text
    return [ast.literal_eval(line.partition(": ")[2])[0] for line in outcome.result.splitlines()]


def test_a_rank_has_a_context_on_its_own_gpu_only(bed: GpuBed) -> None:
    with bed.notebook() as book:
        found = pids(book.cell(f"%%distributed --gpus 3\n{WHERE}"))

        assert bed.numbers() == {found[0]: [0], found[1]: [1], found[2]: [2]}


def test_the_first_ranks_with_gpus_are_not_replaced_by_preloaded_ones(bed: GpuBed) -> None:
    """CPU ranks are, after their first cell; a second context would need memory beside the first."""
    preloaded = dedent("""\
        %%distributed --ranks 1 --fresh
        import sys
        'torch._dynamo' in sys.modules""")
    bed.state["compiler"] = False
    bed.write()
    with bed.notebook() as book, bed.notebook() as other:
        first = dedent("""\
            %%distributed --gpus 2
            import os, sys
            assert 'torch._dynamo' not in sys.modules
            (os.getpid(),)""")
        before = pids(book.cell(first))
        bed.state["compiler"] = True
        bed.write()
        assert wait_until(lambda: "True" in other.ok(preloaded).result)
        for _ in range(2):
            assert pids(book.cell(f"%%distributed --gpus 2\n{WHERE}")) == before


def test_more_gpus_are_given_where_idle_ranks_are(bed: GpuBed) -> None:
    with bed.notebook() as book:
        before = pids(book.cell(f"%%distributed --gpus 2\n{WHERE}"))
        after = pids(book.cell(f"%%distributed --gpus 8\n{WHERE}"))

        assert len(after) == 8
        assert not set(before) & set(after)
        assert bed.numbers() == {pid: [number] for number, pid in enumerate(after)}


def test_fresh_ranks_get_the_gpus_of_those_that_leave(bed: GpuBed) -> None:
    with bed.notebook() as book:
        before = pids(book.cell(f"%%distributed --gpus 8\n{WHERE}"))
        after = pids(book.cell(f"%%distributed --gpus 8 --fresh\n{WHERE}"))

        assert not set(before) & set(after)


def test_resize_and_restart_reuse_the_gpus(bed: GpuBed) -> None:
    with bed.notebook() as book:
        pids(book.cell(f"%%distributed --gpus 8\n{WHERE}"))
        book.ok("%distributed_pool resize 7")
        assert len(pids(book.cell(f"%%distributed\n{WHERE}"))) == 7
        book.ok("%distributed_pool restart")
        assert len(pids(book.cell(f"%%distributed\n{WHERE}"))) == 7


def test_idle_ranks_of_another_notebook_yield(bed: GpuBed) -> None:
    with bed.notebook() as first, bed.notebook() as second:
        pids(first.cell(f"%%distributed --gpus 8\n{WHERE}"))
        taken = pids(second.cell(f"%%distributed --gpus 8\n{WHERE}"))

        assert bed.ranks_are(taken)


def test_ranks_that_are_still_starting_are_left_to_their_notebook(bed: GpuBed) -> None:
    bed.state["set_device"]["seconds"] = 1.0
    bed.write()
    with bed.notebook() as first, bed.notebook() as second:
        first.start(f"%%distributed --gpus 8\nprint('it has begun')\nimport signal\nsignal.pause()\n{WHERE}")
        assert wait_until(lambda: [server for server in bed.status() if server.groups])
        refused = second.fails("%%distributed --gpus 8\n1")
        first.until("it has begun")
        first.interrupt()

        assert "(run " in refused.evalue
        assert first.finish().ename == "KeyboardInterrupt"


def test_ranks_that_leave_and_idle_ones_of_another_notebook_make_room_together(bed: GpuBed) -> None:
    with bed.notebook() as first, bed.notebook() as second:
        pids(first.cell(f"%%distributed --gpus 4\n{WHERE}"))
        pids(second.cell(f"%%distributed --gpus 4\n{WHERE}"))
        assert len(pids(second.cell(f"%%distributed --gpus 8\n{WHERE}"))) == 8


def test_a_refusal_names_what_the_holder_keeps(bed: GpuBed) -> None:
    with bed.notebook() as first, bed.notebook() as second:
        first.ok("%%distributed --gpus 8 --keep w\nw = 1")
        refused = second.fails("%%distributed --gpus 1\n1")

        assert refused.evalue.startswith("--gpus 1, but only 0 of 8 GPUs are free. GPUs 0-7: ")
        assert re.search(
            r"GPUs 0-7: .*kernel \d+.* since \d\d:\d\d \(keeps w\)\. Wait for them with --wait S", refused.evalue
        )


def test_a_refusal_names_the_run_of_the_holder(bed: GpuBed) -> None:
    with bed.notebook() as first, bed.notebook() as second:
        first.start(
            dedent("""\
                %%distributed --gpus 8
                print('holding')
                import signal
                signal.pause()""")
        )
        first.until("holding")
        refused = second.fails("%%distributed --gpus 1\n1")
        first.interrupt()
        first.finish()

        assert "(run " in refused.evalue
        assert "In[" in refused.evalue
        assert refused.evalue.endswith("or free them: `%distributed_pool stop` in that notebook does it.")
        assert second.ok("%%distributed --gpus 8\nlocal_rank").result


def test_idle_ranks_give_their_gpus_back_after_a_time(bed: GpuBed) -> None:
    """Unless they keep something."""
    with bed.notebook() as book:
        book.ok("%%distributed --gpus 2 --idle 1 --keep w\nw = 1")
        kept = bed.contexts().keys()
        with bed.notebook() as other:
            other.ok("%%distributed --gpus 3 --idle 1\n1")
            assert len(bed.contexts()) == 5
            assert bed.ranks_are(kept)
            assert len(pids(other.cell(f"%%distributed --gpus 3 --idle 1\n{WHERE}"))) == 3
        book.ok("w = None")
        assert bed.ranks_gone()


def test_the_end_of_a_kernel_frees_its_gpus(bed: GpuBed) -> None:
    with bed.notebook() as second:
        with bed.notebook() as first:
            first.ok("%%distributed --gpus 8 --keep w\nw = 1")
        assert len(pids(second.cell(f"%%distributed --gpus 8 --wait 10\n{WHERE}"))) == 8


def test_a_rank_that_cannot_start_again_fails_the_cell_with_the_cause_and_no_more_are_started(bed: GpuBed) -> None:
    with bed.notebook() as book:
        (pid,) = pids(book.cell(f"%%distributed --gpus 1\n{WHERE}"))
        bed.state["set_device"]["error"] = "CUDA error: uncorrectable ECC error encountered"
        bed.write()
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone([pid]) == []

        refused = book.fails("%%distributed --gpus 1\n1")
        assert "uncorrectable ECC error" in refused.text
        bed.state["set_device"]["error"] = ""
        bed.write()

        assert book.ok("%%distributed --gpus 1\nlocal_rank").result == "rank 0: 0"


def test_a_cell_begins_on_the_gpu_of_its_rank_whichever_the_last_one_chose(bed: GpuBed) -> None:
    with bed.notebook() as book:
        book.ok(
            dedent("""\
                %%distributed --gpus 2
                import torch
                torch.cuda.set_device(1 - rank)""")
        )
        begun = book.ok(
            dedent("""\
                %%distributed --gpus 2
                import torch
                torch.cuda.current_device() == rank""")
        )
        assert begun.result == "ranks 0-1: True"
