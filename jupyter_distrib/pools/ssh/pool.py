"""Ranks on hosts that ssh reaches, with the user's own configuration, keys, agent and known hosts."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import ClassVar

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import Option
from jupyter_distrib.pools.base import IDLE, PACKAGES, Capabilities, Lost, Sink
from jupyter_distrib.pools.command.pool import COPY_FILES, HOSTS, INTERFACE, NODES, PYTHON_THERE, check_given, connected
from jupyter_distrib.pools.server_link import LocalNode
from jupyter_distrib.wire import messages as m

DEFAULTS = {"ssh": "ssh", "python": "python3"}


def words(name: str, text: str) -> str:
    """Read a command line; the reader of the option."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise OptionsError(f"{name} wants a command such as 'ssh -F FILE'; {text!r} is none ({error})") from None
    return text


class SshPool:
    """The pool of hosts that ssh reaches."""

    kind = "ssh"
    options: ClassVar = (
        HOSTS,
        PYTHON_THERE,
        Option(
            flag="--ssh",
            metavar="COMMAND",
            meaning="the command for ssh, with options if need be: 'ssh -F FILE'",
            read=words,
            default="ssh",
        ),
        NODES,
        INTERFACE,
        IDLE,
        *PACKAGES,
        COPY_FILES,
    )
    capabilities: ClassVar = Capabilities(streams_content=True)

    def __init__(self, **options: str) -> None:
        self._options = {**DEFAULTS, **options}

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        check_given(self._options, hosts="a,b")
        if shutil.which(program := shlex.split(self._options["ssh"])[0]) is None:
            raise PoolError(f"the ssh pool needs {program}, which is not installed here: install OpenSSH's client.")
        # A new login has another agent, which the coordinator of an earlier one does not know.
        return connected(self.kind, self._options, hello, sink, lost, os.environ.get("SSH_AUTH_SOCK"))
