"""`--profile` on a GPU whose driver has no profiler: what runs on the host is recorded, and the cell goes on."""

from __future__ import annotations

import pytest

from tests.gpu_bed import GpuBed
from tests.product.test_profile import training

pytestmark = pytest.mark.slow  # each test starts an agent of its own


def test_a_gpu_without_a_profiler_leaves_a_trace_of_the_host(bed: GpuBed) -> None:
    with bed.notebook() as book:
        shown = book.ok(f"%%distributed --gpus 1 --profile 4\n{training()}")

        assert "trace.json.gz shows steps 4-7 on rank 0" in shown.text
        assert "[0!]" not in shown.text  # nothing in standard error
