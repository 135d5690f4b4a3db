"""The command that reaches a Python on a host, and the meaning of its failures. Pure."""

from __future__ import annotations

from typing import Protocol

_NO_PYTHON = ("not found", "no such file or directory")
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
    if status in (126, 127) or (last.lower().endswith(_NO_PYTHON) and python in last):
        return (
            f"there is no Python at {python} on host {host}: set python to an interpreter with torch there; "
            f"try `{tried}`."
        )
    if status is None:
        return f"no Python answered on host {host} in time{_said(last)}: try `{tried}`."
    return f"`{shown}` ended with status {status} before a Python answered{_said(last)}: try `{tried}`."


def last_line(said: str) -> str:
    lines = [line.strip() for line in said.replace("\r", "\n").split("\n") if line.strip(" \0>.")]
    return lines[-1] if lines else ""


def _said(last: str) -> str:
    return f" ({last[:300]})" if last else ""
