"""Hides the frames of native code, some thirty lines, that torch's c10d prints when a peer has gone: its first line
says all that a user can use, and the log has the rest. Kernel side; standard library only."""

from __future__ import annotations

import re

_HEAD = re.compile(r"Exception raised from .+ \(most recent call first\):")
_FRAME = re.compile(r"frame #\d+: .*|<omitting python frames>|")


class NativeFrames:
    """The frames in one stream of a rank."""

    def __init__(self) -> None:
        self._after_c10d = self._inside = False

    def without(self, lines: list[str]) -> list[str]:
        """Return the next lines of the stream without such frames."""
        kept = []
        for line in lines:
            if self._inside and _FRAME.fullmatch(line):
                self._inside = bool(line)  # an empty line ends them
                continue
            self._inside = self._after_c10d and _HEAD.fullmatch(line) is not None
            self._after_c10d = "[c10d]" in line
            if not self._inside:
                kept.append(line)
        return kept
