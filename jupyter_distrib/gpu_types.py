"""The types of GPUs by name, for `gpu_type`, which also takes a string; and their memory. Kernel and ranks; standard
library only, no state."""

from __future__ import annotations

from enum import StrEnum


class GPUType(StrEnum):
    """The types of GPUs that machines and clusters usually have; `gpu_type` takes any other type as a string."""

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


MEMORY_BYTES = {
    "T4": 15_640_000_000,
    "V100": 16_930_000_000,
    "A10": 23_600_000_000,
    "A100-40": 42_400_000_000,
    "A100": 85_000_000_000,
    "L4": 23_600_000_000,
    "L40S": 47_700_000_000,
    "H100": 85_000_000_000,
    "H200": 150_000_000_000,
    "B200": 191_000_000_000,
    "GB200": 197_000_000_000,
}
"""Memory of each type as programs see it, a little less than its name says."""


def memory_bytes(name: str) -> int | None:
    """Return the memory of a GPU by its type or its full name, such as `NVIDIA A100-SXM4-40GB`; None if unknown."""
    wanted = name.upper()
    if "A100" in wanted and "40" in wanted.replace("A100", ""):
        return MEMORY_BYTES["A100-40"]
    found = [each for each in MEMORY_BYTES if each in wanted]
    return MEMORY_BYTES[max(found, key=len)] if found else None
