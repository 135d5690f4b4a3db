"""What is said beside an exception."""

from __future__ import annotations

import pytest

from jupyter_distrib.worker import failure


@pytest.mark.parametrize(
    "text",
    [
        "Distributed package doesn't have NCCL built in",
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    ],
)
def test_nccl_on_cpu_ranks_is_answered_by_gloo(text: str) -> None:
    described = failure.describe(RuntimeError(text), run="r", by_value=False)

    assert described.notes == (failure._NO_NCCL,)
    assert "ask init_process_group for gloo" in failure._NO_NCCL


def test_another_error_has_no_hint() -> None:
    assert failure.describe(RuntimeError("NCCL is fine"), run="r", by_value=False).notes == ()
