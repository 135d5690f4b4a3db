"""`--gpus 1:4`: a run begins with the GPUs that are free, and grows when other notebooks give theirs back."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook
from tests.processes import wait_until
from tests.product.growth_cells import counting

pytestmark = pytest.mark.slow  # each test starts an agent of its own


def hold(book: Notebook, gpus: int) -> None:
    """Let a run that does not end use GPUs."""
    book.ok(
        dedent(f"""\
            %%distributed --gpus {gpus} --detach
            import threading
            threading.Event().wait()""")
    )


def give_back(book: Notebook) -> None:
    book.ok("%distributed_pool stop")


def folder_of(book: Notebook) -> Path:
    return Path(book.ok("import os\nos.getcwd()").result.strip("'"))


def test_a_run_begins_with_what_there_is_and_grows_when_another_notebook_gives_gpus_back(bed: GpuBed) -> None:
    with bed.notebook() as book, bed.notebook() as other:
        hold(other, 6)
        end = folder_of(book) / "end"
        book.start(counting("--gpus 1:4 --grow-after 0.5"))
        book.until("has 2")
        give_back(other)
        book.until("grown from 2 to 4 ranks at step ", 30)
        book.until("has 4")
        end.touch()
        ended = book.finish()

        assert ended.result == "ranks 0-3: (4, True)", ended.text
        assert "and resumes from its checkpoint of " in ended.view
        assert "the global batch is 4/2 of what it was" in ended.view
        assert "attempt" not in ended.view
        assert not bed.violations()
        assert book.ok("%%distributed --gpus 4\nworld_size").result == "ranks 0-3: 4"


def test_a_run_waits_for_its_minimum(bed: GpuBed) -> None:
    with bed.notebook() as book, bed.notebook() as other:
        hold(other, 6)
        book.start("%%distributed --gpus 3:8\nworld_size")
        book.until("Waiting: --gpus 3:8, but only 2 of 8 GPUs are free")
        give_back(other)

        assert book.finish().result == "ranks 0-7: 8"


def test_growth_takes_only_what_nobody_waits_for(bed: GpuBed) -> None:
    """Two notebooks with all GPUs as their maximum: the second waits for what the first holds, the first keeps it, and
    neither is started again for the other."""
    with bed.notebook() as book, bed.notebook() as other, bed.notebook() as third:
        hold(third, 6)
        ends = folder_of(book) / "one-end", folder_of(other) / "two-end"
        book.start(counting("--gpus 1:8 --grow-after 0.2", "one", "one-end"))
        book.until("has 2")
        other.start(counting("--gpus 4:8 --grow-after 0.2", "two", "two-end"))
        other.until("Waiting: --gpus 4:8, but only 0 of 8 GPUs are free")
        give_back(third)
        other.until("has 6")
        ends[0].touch()
        first = book.finish()
        give_back(book)
        other.until("grown from 6 to 8 ranks")
        ends[1].touch()
        second = other.finish()

        assert first.result == "ranks 0-1: (2, True)", first.text
        assert "grown" not in first.view
        assert second.result == "ranks 0-7: (8, True)", second.text
        assert second.view.count("grown") == 1


def test_stop_during_a_change_ends_the_run_and_gives_the_gpus_back(bed: GpuBed) -> None:
    with bed.notebook() as book, bed.notebook() as other:
        hold(other, 6)
        book.start(counting("--gpus 1:8 --grow-after 0.5"))
        book.until("has 2")
        give_back(other)
        book.until("grown from 2 to 8 ranks")
        book.interrupt()
        ended = book.finish()

        assert ended.ename == "KeyboardInterrupt", ended.text
        other.ok("%distributed_pool stop")
        book.ok("%distributed_pool stop")
        assert other.ok("%%distributed --gpus 8\nworld_size").result == "ranks 0-7: 8"


def test_a_run_without_a_checkpoint_says_that_it_cannot_grow_and_goes_on(bed: GpuBed) -> None:
    with bed.notebook() as book, bed.notebook() as other:
        hold(other, 6)
        end = folder_of(book) / "end"
        book.start(counting("--gpus 1:8 --grow-after 0.3").replace('jupyter_distrib.resume("ckpt", ', "dict("))
        book.until("cannot grow from 2 to 8 ranks so far: the cell has made no checkpoint")
        give_back(other)
        wait_until(lambda: all(not gpu.holder for gpu in bed.status()[0].gpus[2:]))
        end.touch()
        ended = book.finish()

        assert ended.result == "ranks 0-1: (2, True)", ended.text
        assert ended.view.count("cannot grow") == 1


def test_a_detached_run_grows_without_its_kernel_and_its_history_says_so(bed: GpuBed) -> None:
    with bed.notebook() as other:
        hold(other, 6)
        with bed.notebook() as book:
            end = folder_of(book) / "end"
            book.ok(counting("--gpus 1:8 --grow-after 0.5 --detach"))
            name = book.ok("_.id").result.strip("'")
        give_back(other)
        other.ok(f"job = get_ipython().run_line_magic('distributed_attach', '{name}')")
        other.start(
            dedent("""\
                import time
                while not job.record.restarts: time.sleep(0.01)
                print('grown to', job.record.world_size)""")
        )
        other.until("grown to 8")
        other.finish()
        end.touch()

        assert other.ok("job.result(timeout_s=60)").result == "ranks 0-7: (8, True)"
        assert "grown from 2 to 8 ranks" in other.ok("[note.text for note in job.record.notes]").result
