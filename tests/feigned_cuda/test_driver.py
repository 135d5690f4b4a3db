"""A driver that is too old, refuses its library, or hangs: one sentence, and cells on the CPU run."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook

OLD = "the GPU driver is too old"
HANGS = "the GPU driver has not answered for "
LATER_S = 8.0
"""Less than the time for which the first cell waits for the driver."""


def cpu_ranks_run(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 2
        import torch
        torch.ones(2).sum().item()""")
    assert book.ok(cell).result == "ranks 0-1: 2.0"


def one_sentence(text: str) -> bool:
    return text.count(". ") == 0 and text.endswith(".")


@pytest.mark.parametrize("told", [True, False])
def test_a_torch_whose_cuda_is_newer_than_the_driver(told: bool) -> None:
    """Whether or not the driver tells its version: else it is the CUDA runtime that refuses."""
    with FeignedCuda(FEIGNED_CUDA_DRIVER="12020") as machine, machine.notebook() as book:
        machine.refuse(on=not told)
        refused = book.fails("%%distributed --gpus 2\nrank")
        assert OLD in refused.evalue
        assert ("supports CUDA 12.2" in refused.evalue) is told
        assert "--ranks N" in refused.evalue
        assert one_sentence(refused.evalue)
        if told:
            assert f"CPU ranks: {OLD}" in book.ok("%%distributed --fresh\nrank").view
        cpu_ranks_run(book)
        assert not any(machine.contexts().values())


@pytest.mark.parametrize("error", [4, 18])
def test_a_driver_that_refuses_its_library(error: int) -> None:
    """No permission, or a library of another version than the driver."""
    with FeignedCuda(FEIGNED_CUDA_NVML=str(error)) as machine, machine.notebook() as book:
        refused = book.fails("%%distributed --gpus 2\nrank")
        assert refused.evalue.startswith("--gpus 2, but the GPU driver does not work (")
        assert "driver does not work (" in book.ok("%%distributed --fresh\nrank").view
        cpu_ranks_run(book)


def test_a_driver_that_hangs_in_its_library() -> None:
    """From the beginning, and later: no signal ends its functions."""
    training = trainings.cell("--strategy ddp --fresh")
    with FeignedCuda() as machine:
        machine.hang()
        with machine.notebook() as book:
            refused = book.fails("%%distributed --gpus 2\nrank")
            assert refused.evalue.startswith(f"--gpus 2, but {HANGS}")
            assert one_sentence(refused.evalue)
            assert HANGS in book.fails("%%distributed --gpus 2\nrank").evalue
            cpu_ranks_run(book)
            report = book.ok("%distributed_status --doctor")
            assert "has not answered for 5 s" in report.text
            machine.hang(on=False)
            book.ok(training)

            machine.hang()
            first = book.ok(training)
            assert HANGS in first.view
            again = book.ok(training)
            assert HANGS in again.view
            assert again.wall_s < min(first.wall_s, LATER_S)
            machine.hang(on=False)
