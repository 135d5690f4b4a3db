"""Ranks on hosts that a command of the user's reaches: `docker exec -i {host} {python}`, `kubectl exec -i ...`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.options import Option, not_an_option, shown
from jupyter_distrib.pools.command.hosts_pool import HOSTS, MACHINES, SHARED, HostsPool


def template(name: str, text: str) -> str:
    """Read the command that starts a Python on a host; the reader of the option."""
    not_an_option(name, text)
    if missing := [each for each in ("{host}", "{python}") if each not in text]:
        raise OptionsError(
            f"{name} must be a command with {{host}} and {{python}} in it; {shown(text)} has no {missing[0]}"
        )
    return text


class CommandPool(HostsPool):
    """The pool of hosts that a command reaches."""

    kind = "command"
    options: ClassVar = (
        HOSTS,
        Option(
            flag="--start",
            metavar="COMMAND",
            meaning="the command that runs {python} on {host} with its input and output as pipes",
            read=template,
            main=True,
        ),
        *SHARED,
        *MACHINES,
    )
    needed: ClassVar = {"hosts": "a,b", "start": '"docker exec -i {host} {python}"'}

    def command(self, host: str, python: Sequence[str]) -> list[str]:
        """Return the words of the command; `{python}` is replaced by the interpreter's words, also within a longer
        word."""
        words: list[str] = []
        for word in shlex.split(self.given["start"]):
            words += python if word == "{python}" else [_filled(word, {"{host}": host, "{python}": " ".join(python)})]
        return words


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
