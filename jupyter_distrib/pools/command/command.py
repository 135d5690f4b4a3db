"""The command that gives a pipe to a Python on a host, and what its failures mean. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jupyter_distrib.pools.command import bootstrap

_NO_PYTHON = ("not found", "no such file or directory")
_FULL = ("No space left on device", "Disk quota exceeded")


class HostCommand(Protocol):
    """The way to a Python on each host of a pool."""

    @property
    def engine(self) -> str:
        """Name of the way, for people."""

    @property
    def kind(self) -> str:
        """The pool's kind."""

    def words(self, host: str) -> list[str]:
        """Return the command for a host."""

    def failure(self, host: str, status: int | None, said: str) -> str:
        """Return a sentence on a command that gave no Python.

        Args:
            host: The host that was to be reached.
            status: Exit status; None while it runs.
            said: What it wrote, banners included.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A command of the user's with `{host}` and `{python}` in it; see `HostCommand`."""

    start: str
    python: str
    engine: str = "command"
    kind: str = "command"

    def words(self, host: str) -> list[str]:
        """Return the words of the command: `{python}` becomes the interpreter's words, within a longer word as well."""
        python = [self.python, *bootstrap.WORDS]
        words: list[str] = []
        for word in shlex.split(self.start):
            if word == "{python}":
                words += python
            else:
                words.append(_filled(word, {"{host}": host, "{python}": " ".join(python)}))
        return words

    def failure(self, host: str, status: int | None, said: str) -> str:
        shown = shlex.join(self.words(host)[: -len(bootstrap.WORDS)])
        return sentence(host, self.python, status, said, tried=f"{shown} --version", shown=shown)


def sentence(host: str, python: str, status: int | None, said: str, *, tried: str, shown: str) -> str:
    """Return what any command's failure means, as far as its exit status and words tell.

    `tried` is a command for the user to try, `shown` the one that was used.
    """
    for words in _FULL:
        if words in said:
            return f"there is no space left on host {host} for a worker group ({words}): free some in its /tmp."
    last = last_line(said)
    if status in (126, 127) or (last.lower().endswith(_NO_PYTHON) and python in last):
        return f"there is no Python at {python} on host {host}: set python to one with torch there; try `{tried}`."
    if status is None:
        return f"no Python answered on host {host} in time{_said(last)}: try `{tried}`."
    return f"`{shown}` ended with status {status} before a Python answered{_said(last)}: try `{tried}`."


def last_line(said: str) -> str:
    lines = [line.strip() for line in said.replace("\r", "\n").split("\n") if line.strip(" \0>.")]
    return lines[-1] if lines else ""


def _said(last: str) -> str:
    return f" ({last[:300]})" if last else ""


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def lacking(start: str) -> Sequence[str]:
    """Return the placeholders that a template lacks."""
    return [name for name in ("{host}", "{python}") if name not in start]
