"""Ranks on hosts that ssh reaches, with the user's own configuration, keys, agent and known hosts."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from typing import ClassVar

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import Option
from jupyter_distrib.pools.command.hosts_pool import HOSTS, SHARED, HostsPool
from jupyter_distrib.pools.ssh import command


def words(name: str, text: str) -> str:
    """Read a command line; the reader of the option."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise OptionsError(f"{name} wants a command such as 'ssh -F FILE'; {text!r} is none ({error})") from None
    return text


class SshPool(HostsPool):
    """The pool of hosts that ssh reaches."""

    kind = "ssh"
    engine = "SSH"
    options: ClassVar = (
        HOSTS,
        Option(
            flag="--ssh",
            metavar="COMMAND",
            meaning="the command for ssh, with options if need be: 'ssh -F FILE'",
            read=words,
            default="ssh",
        ),
        *SHARED,
    )

    def __init__(self, **given: str) -> None:
        super().__init__(**{"ssh": "ssh", **given})

    def check(self) -> dict[str, str]:
        if shutil.which(program := shlex.split(self.given["ssh"])[0]) is None:
            raise PoolError(f"the ssh pool needs {program}, which is not installed here: install OpenSSH's client.")
        # A new login has another agent, which the coordinator of an earlier one does not know.
        return self.given | {"agent": os.environ.get("SSH_AUTH_SOCK", "")}

    def command(self, host: str, python: Sequence[str]) -> list[str]:
        return command.words(self.given["ssh"], host, python)

    def explain(self, host: str, status: int | None, said: str) -> str:
        return command.meaning(self.given["ssh"], self.given["python"], host, status, said)
