"""The types of GPUs by name, for `gpu_type`: a text does as well. Kernel and ranks; standard library only, no state."""

from __future__ import annotations

from enum import StrEnum


class GPUType(StrEnum):
    """The types of GPUs that machines and clusters usually have; `gpu_type` takes any other as a text."""

    T4 = "T4"
    V100 = "V100"
    A10 = "A10"
    A100 = "A100"
    L4 = "L4"
    L40S = "L40S"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"
    GB200 = "GB200"
