"""Ranks on hosts that a command of the user's reaches: `docker exec -i {host} {python}`, `kubectl exec -i ...`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.options import Option, count
from jupyter_distrib.pools.base import IDLE, PACKAGES, Capabilities, Lost, Sink
from jupyter_distrib.pools.command.command import lacking
from jupyter_distrib.pools.command.hosts import checked_hosts
from jupyter_distrib.pools.server_home import Home, fingerprint
from jupyter_distrib.pools.server_link import LocalNode, greeted
from jupyter_distrib.wire import messages as m

HOSTS = Option(flag="--hosts", metavar="HOSTS", meaning="the hosts: a,b:2 is up to 2 ranks on b", read=checked_hosts)
PYTHON_THERE = Option(
    flag="--python", metavar="COMMAND", meaning="the interpreter there, with torch", default="python3"
)
NODES = Option(
    flag="--nodes", metavar="N", meaning="spread the ranks over N nodes", read=count, default="as few as can be"
)
INTERFACE = Option(
    flag="--interface",
    metavar="NAME",
    meaning="the network interface by which hosts reach one another",
    default="the one that the connection came by",
)
COPY_FILES = Option(
    flag="--copy-files",
    meaning="give the nodes copies of the notebook's files",
    default="where they do not share its folder",
)


def template(name: str, text: str) -> str:
    """Read the command that starts a Python on a host; the reader of the option."""
    if missing := lacking(text):
        raise OptionsError(f"{name} wants a command with {{host}} and {{python}} in it; {text!r} has no {missing[0]}")
    return text


class CommandPool:
    """The pool of hosts that a command reaches."""

    kind = "command"
    options: ClassVar = (
        HOSTS,
        Option(
            flag="--start",
            metavar="COMMAND",
            meaning="the command that runs {python} on {host} with its input and output as pipes",
            read=template,
        ),
        PYTHON_THERE,
        NODES,
        INTERFACE,
        IDLE,
        *PACKAGES,
        COPY_FILES,
    )
    capabilities: ClassVar = Capabilities(streams_content=True)

    def __init__(self, **options: str) -> None:
        self._options = {"python": "python3", **options}

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        check_given(self._options, hosts="a,b", start='"docker exec -i {host} {python}"')
        return connected(self.kind, self._options, hello, sink, lost)


def check_given(options: Mapping[str, str], **examples: str) -> None:
    """Raise `PoolError` for the first of these options that is missing, with its example."""
    for name, example in examples.items():
        if name not in options:
            raise PoolError(f"this pool needs {name}: say --{name} {example}, or {name} = ... in a settings file.")


def connected(
    kind: str, options: Mapping[str, str], hello: m.Hello, sink: Sink, lost: Lost, *environment: object
) -> LocalNode:
    """Reach the coordinator of a pool of hosts, and start it if need be. It has `environment` in common with the
    kernel, besides what all coordinators have."""
    told = json.dumps(dict(options), sort_keys=True)
    home = Home(name=f"{kind}-{fingerprint(told, *environment)}", module=f"jupyter_distrib.pools.{kind}", told=told)
    return greeted(
        home.reach(), hello, sink, lambda reason: lost("the process that holds the hosts' connections has ended")
    )
