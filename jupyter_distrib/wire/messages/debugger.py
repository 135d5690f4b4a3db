"""Messages between the kernel and the debugger of one rank: lines that the user has typed, and the text that answers
them. They pass agent and coordinator unchanged.

    kernel  --Debug-->  agent  --Debug-->  rank
    kernel  <--DebuggerPrompted, DebuggerLeft--  rank
"""

from __future__ import annotations

from jupyter_distrib.wire.messages.shared import Command, RunEvent, message


@message
class Debug(Command):
    """Control the debugger of one rank."""

    run: str
    group: str
    rank: int
    action: str
    """The action: `examine` the failure that the rank has kept; `read` the line, which answers a prompt; `end` the
    input; `interrupt` the running line of an examination; `drop` the kept failure."""
    line: str = ""
    """The line that was typed, for `read`."""


@message
class DebuggerPrompted(RunEvent):
    """A rank is stopped in its debugger, and waits for `Debug`."""

    run: str
    rank: int
    text: str
    """The text that the debugger has printed since the last prompt."""
    prompt: str
    line: int | None
    """Line of the cell at which the rank is; None if it is in none."""
    at_s: float


@message
class DebuggerLeft(RunEvent):
    """A rank has left its debugger and goes on, or there is nothing to debug."""

    run: str
    rank: int
    text: str
    """The text that the debugger has printed since the last prompt, or the reason why there is nothing to debug."""
    quit: bool = False
    """Whether the user has quit the debugger, so that the run has to be stopped."""
    at_s: float = 0.0
