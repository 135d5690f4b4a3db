"""The lines under a cell that waits for its ranks. Kernel side."""

from __future__ import annotations

import sys

from jupyter_distrib.system import terminal_line


class WaitingLine:
    """Prints what is waited for. A text about the same thing, such as the last line of a command, replaces the
    previous text in place: both have the same words before a colon."""

    def __init__(self) -> None:
        self._open = ""
        """The text of the last line, which has no end yet."""

    def say(self, text: str) -> None:
        """Print a text, which is complete by itself."""
        parts = text.split(": ", 2)
        thing = ": ".join(parts[:2]) if len(parts) > 2 else ""
        if self._open and thing and self._open.startswith(f"{thing}: "):
            cleared = terminal_line.replacement(sys.stdout, self._open)
            sys.stdout.write(f"{cleared}{text}" if cleared else f"\r{text.ljust(len(self._open))}")
        else:
            self.end()
            sys.stdout.write(f"{terminal_line.beginning(sys.stdout)}{text}")
        self._open = text
        sys.stdout.flush()

    def end(self) -> None:
        """End the last line."""
        if self._open:
            sys.stdout.write("\n")
            self._open = ""
