"""The front end's ability to ask its user for a line, for the debugger of a rank. From the thread that begins a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from jupyter_distrib.system.terminal_line import is_terminal


def terminal() -> str:
    """Return the reason why nobody can answer in this program's terminal; empty if somebody can."""
    return "" if is_terminal(sys.stdin) else "this program has no terminal"


front_end: Callable[[], str] = terminal
"""A function that returns the reason why the user of the running cell cannot be asked; empty if that is possible. The
extension replaces it by its front end's."""


def missing() -> str:
    """Return the reason why nobody can answer a prompt now; empty if somebody can."""
    if threading.current_thread() is not threading.main_thread():
        return "it was started in a thread other than the notebook's"
    return front_end()
