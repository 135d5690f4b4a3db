"""Shortens what torch's C++ code logs about an error: the first line says what is wrong, and the stack of C++ below it
names no line of the user's. Runs in the agent's loop."""

from __future__ import annotations

import re

_FIRST = rb"(?:\[rank\d+\]:)?\[[WEF]\d{4} [\d:.]+ \w+\.(?:cpp|hpp|h|cu):\d+\] |  what\(\):  "
"""The beginning of an entry of the log, or of what a process says that an exception of C++ ends."""
_BETWEEN = (
    rb"(?:(?:Search for `|CUDA kernel errors might |For debugging consider |Compile with `|nccl[A-Z]\w+: )[^\n]*\n"
    rb"|Last error:\n[^\n]*\n|\n)"
)
"""A line that torch puts between the error and the stack; others may be those of the cell."""
_STACK = rb"Exception raised from [^\n]+ \(most recent call first\):\n(?:frame #\d+: [^\n]*\n)*\n?"
_ENTRY = re.compile(rb"^((?:" + _FIRST + rb")[^\n]*\n)" + _BETWEEN + rb"{0,8}" + _STACK, re.MULTILINE)


def without_stacks(data: bytes | bytearray) -> bytes | bytearray:
    """Return what a rank has written, with only the first line of each entry that ends in a stack of C++."""
    return _ENTRY.sub(rb"\1", data) if b"\nframe #" in data else data
