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


@pytest.mark.parametrize(
    "text",
    ["module 'torch._C' has no attribute '_cuda_setDevice'", "Torch not compiled with CUDA enabled"],
)
def test_a_cuda_device_on_cpu_ranks_is_answered_by_the_device_to_take(text: str) -> None:
    (note,) = failure.describe(AssertionError(text), run="r", by_value=False).notes

    assert note.startswith("These ranks have no GPU: use torch.device(")


def test_another_error_has_no_hint() -> None:
    assert failure.describe(RuntimeError("NCCL is fine"), run="r", by_value=False).notes == ()
