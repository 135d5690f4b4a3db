"""Variables that CUDA and torch read once, changed in a notebook whose ranks are up, on feigned GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

import pytest

from jupyter_distrib.kernel.session.pools.gpu_variables import not_in_force
from jupyter_distrib.system import process_environment
from tests.gpu_bed import GpuBed
from tests.notebook import Notebook

SEEN = (
    "%%distributed --gpus 1{flags}\nimport os\n"
    "began = dict(line.split('=', 1) for line in open('/proc/self/environ').read().split('\\0') if '=' in line)\n"
    "os.getpid(), began.get('PYTORCH_ALLOC_CONF', '')"
)
SET = "import os; os.environ['PYTORCH_ALLOC_CONF'] = {value!r}"


@pytest.fixture(scope="module")
def bed() -> Iterator[GpuBed]:
    with GpuBed(count=1) as machine:
        yield machine


@pytest.fixture
def book(bed: GpuBed) -> Iterator[Notebook]:
    with bed.notebook() as one:
        yield one


def seen(book: Notebook, flags: str = "") -> tuple[str, str, str]:
    """The rank's pid, the variable as its process began with it, and the view."""
    outcome = book.ok(SEEN.format(flags=flags))
    pid, value = outcome.result.removeprefix("rank 0: (").removesuffix(")").split(", ")
    return pid, value.strip("'"), outcome.view


@pytest.mark.slow
def test_ranks_that_keep_nothing_are_replaced(book: Notebook) -> None:
    before, value, _ = seen(book)
    assert value == ""

    book.ok(SET.format(value="expandable_segments:True"))

    after, value, _ = seen(book)
    assert after != before
    assert value == "expandable_segments:True"
    assert seen(book)[:2] == (after, value)


@pytest.mark.slow
def test_on_ranks_that_keep_something_they_are_told_to_be_not_in_force(book: Notebook) -> None:
    before = seen(book, " --keep began")[0]

    book.ok(SET.format(value="expandable_segments:True"))

    pid, value, view = seen(book)
    assert (pid, value) == (before, "")
    assert "PYTORCH_ALLOC_CONF: set after these ranks were started, and not in force on them" in view
    assert "not in force" not in seen(book)[2]
    assert book.ok("%%distributed --gpus 1\nlen(began) > 3").result == "rank 0: True"


@pytest.mark.slow
def test_on_cpu_ranks_nothing_is_replaced(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 1
        import os
        os.getpid()""")
    before = book.ok(cell).result

    book.ok(SET.format(value="expandable_segments:True"))

    assert book.ok(cell).result == before


@pytest.mark.slow
def test_on_a_machine_without_gpus_the_first_ranks_stay(notebook: Notebook) -> None:
    groups = "[group.name for group in _s.current().pools.groups()]"
    notebook.ok(SET.format(value="expandable_segments:True"))

    notebook.ok("%%distributed\nrank")
    first = notebook.ok(groups).result
    notebook.ok("%%distributed\nrank")
    assert notebook.ok(groups).result == first


@pytest.mark.parametrize(
    "name",
    ["PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUDNN_LOGLEVEL_DBG", "NVIDIA_TF32_OVERRIDE", "NVTE_DEBUG"],
)
def test_given_for_a_cell_they_start_a_new_process(name: str) -> None:
    assert process_environment.load_time_changes({name: "1"}) == {name: "1"}


def test_the_sentence_names_what_differs() -> None:
    changed = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO"}

    assert not_in_force(changed, {"NCCL_DEBUG": "INFO"}).startswith("CUDA_LAUNCH_BLOCKING: set after")
    assert not_in_force(changed, changed) == ""
