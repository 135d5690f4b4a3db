"""The command that reaches a Python on a host, and the meaning of its failures. Pure."""

from __future__ import annotations

import re
from typing import Protocol

from jupyter_distrib.pools.command import bootstrap

_NO_PYTHON = ("not found", "no such file or directory")
_STARTED = "(InteractiveConsole)"
"""The end of Python's own banner, printed before it reads the program."""
_READ_BY_A_SHELL = "import os, shutil, sys, tempfile"
"""The beginning of the program, which a shell that reads it quotes in its error."""
_FULL = ("No space left on device", "Disk quota exceeded")


class HostCommand(Protocol):
    """The command that reaches a Python on each host of a pool."""

    @property
    def engine(self) -> str:
        """Name of the connection method, for users."""

    @property
    def kind(self) -> str:
        """The pool's kind."""

    @property
    def shows_its_end(self) -> bool:
        """Return whether the input of the process on the host ends before its output does only if this side has closed
        it. A broken connection ends both."""

    def words(self, host: str) -> list[str]:
        """Return the command for a host."""

    def is_final(self, said: str) -> bool:
        """Return whether a command that failed with this output cannot succeed later."""

    def is_turned_away(self, said: str) -> bool:
        """Return whether a command that failed with this output was one of too many at the same time."""

    def failure(self, host: str, status: int | None, said: str) -> str:
        """Return a sentence on a command that did not start a Python.

        Args:
            host: The host that was to be reached.
            status: Exit status; None while it runs.
            said: The command's output, banners included.
        """


def sentence(host: str, python: str, status: int | None, said: str, *, tried: str, shown: str) -> str:
    """Return the meaning of a command's failure, as far as its exit status and output show.

    `tried` is a command for the user to try, `shown` the command that was used.
    """
    for words in _FULL:
        if words in said:
            return f"there is no space left on host {host} for a worker group ({words}): free some space in its /tmp."
    last = last_line(said)
    if refused := re.search(f"^{bootstrap.DOES_NOT_RUN}(.*)", said, re.MULTILINE):
        return (
            f"{python} on host {host} cannot import this package{quoted(refused[1].strip())}: correct what the "
            "start-up files there set, or set python to another interpreter."
        )
    if status in (126, 127) or _is_missing(python, said, last):
        return (
            f"there is no Python at {python} on host {host}: set python to an interpreter with torch there; "
            f"try `{tried}`."
        )
    if status is None and _STARTED in said:
        return (
            f"Python has started on host {host}, but what was sent to it has not arrived: the start-up files there "
            f"(~/.bashrc) must not read or ask anything unless their shell is interactive; try `{tried}`."
        )
    if _READ_BY_A_SHELL in said:
        return (
            f"a shell on host {host} read what was meant for Python: the start-up files there (~/.bashrc) must not "
            f"start another shell unless theirs is interactive; try `{tried}`."
        )
    if status is None:
        return (
            f"no Python answered on host {host} in time{quoted(last)}: try `{tried}`, and see what the start-up files "
            "there (~/.bashrc) wait for."
        )
    return f"`{shown}` ended with status {status} before a Python answered{quoted(last)}: try `{tried}`."


def _is_missing(python: str, said: str, last: str) -> bool:
    """Return whether a shell says last, or Slurm's daemon on any line, that there is no such interpreter."""
    name = python.removeprefix("~")
    lines = [last if name in last else "", *(line for line in said.splitlines() if f" {name}: " in line)]
    return any(line.lower().strip(" \r.").endswith(_NO_PYTHON) for line in lines)


def last_line(said: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in said.replace("\r", "\n").split("\n") if line.strip(" \0>.")]
    return lines[-1] if lines else ""


def quoted(last: str) -> str:
    """Return a line in brackets, to be put into a sentence; nothing if it is empty."""
    return f" ({last[:300]})" if last else ""
