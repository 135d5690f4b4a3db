"""`log_to_driver` of `sparkdl`: lines that a rank shows in the notebook. On ranks; loads nothing of the kernel."""

from __future__ import annotations

MOST_CHARACTERS = 4000
"""Longest message, as in sparkdl."""
MARK = "[log_to_driver] "


def log_to_driver(message: str) -> None:
    """Show a message in the notebook; called on a rank."""
    if not isinstance(message, str):
        raise TypeError(f"log_to_driver takes a string; got {type(message).__name__}")
    for line in message[:MOST_CHARACTERS].splitlines():
        print(MARK + line, flush=True)
