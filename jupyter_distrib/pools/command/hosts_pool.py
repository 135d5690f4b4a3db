"""The base of pools of hosts that a command reaches by its standard input and output: ssh, Slurm, docker ...

    kernel:       HostsPool.connect --> starts, or finds, `python -m jupyter_distrib.pools.command`
    coordinator:  makes the same pool again; HostsPool.words and .failure, for each host

A subclass names its kind and its options, and gives the command for a host.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option, at_least_zero, not_an_option
from jupyter_distrib.pools.base import IDLE, NODES, PACKAGES, Capabilities, Lost, Sink
from jupyter_distrib.pools.command import bootstrap
from jupyter_distrib.pools.command.command import sentence
from jupyter_distrib.pools.command.hosts import RECONNECT_S, checked_hosts, read_hosts
from jupyter_distrib.pools.machines import options as machine_options
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.pools.command.reservation import Engine
    from jupyter_distrib.pools.server_link import LocalNode
    from jupyter_distrib.system.call_soon import CallSoon
    from jupyter_distrib.system.event_loop import Loop

MODULE = "jupyter_distrib.pools.command"
"""The program of the coordinator."""
HOSTS = Option(
    flag="--hosts", metavar="HOSTS", meaning="the hosts: a,b:2 is up to 2 ranks on b", read=checked_hosts, main=True
)
SHARED = (
    Option(
        flag="--python",
        metavar="COMMAND",
        meaning="the interpreter there, with torch",
        read=not_an_option,
        default="python3",
        main=True,
    ),
    NODES,
    Option(
        flag="--interface",
        metavar="NAME",
        meaning="the network interface by which hosts reach one another",
        read=not_an_option,
        default="that of the connection",
    ),
    Option(
        flag="--reconnect",
        metavar="S",
        meaning="take up a broken connection again within S seconds",
        read=at_least_zero,
        default=f"{RECONNECT_S:g}",
    ),
    IDLE,
    *PACKAGES,
    Option(
        flag="--copy-files",
        meaning="give the nodes copies of the notebook's files",
        default="where they do not share its folder",
    ),
)
"""The options of all these pools."""
MACHINES = machine_options.MACHINES
"""The options of pools whose hosts may be started on demand."""


class HostsPool:
    """A pool of hosts that a command reaches. Instances are made in the kernel, and in the process that holds the
    connections, which imports the class by its name.

    Args:
        given: The options that were given, by `Option.name`, as checked texts.
    """

    kind: ClassVar[str]
    """The name of the kind: a word."""
    engine: str = ""
    """The name of the connection method, for users: `SSH`. Empty: the kind."""
    options: ClassVar[tuple[Option, ...]] = (HOSTS, *SHARED, *MACHINES)
    """A subclass with options of its own adds them: `options = (*HostsPool.options, Option(...))`."""
    needed: ClassVar[Mapping[str, str]] = {"hosts": "a,b"}
    """Examples of the options that must be given, by name."""
    capabilities: ClassVar[Capabilities] = Capabilities(streams_content=True)
    shows_its_end: ClassVar[bool] = False
    """Whether the command closes the input of the process on the host, and leaves its output open, only if its own
    input was closed: ssh does. Then ranks end at once when the process that holds the connections is killed."""

    def __init_subclass__(cls) -> None:
        if not re.fullmatch(r"[A-Za-z][\w-]*", getattr(cls, "kind", "later")):
            raise TypeError(f"the kind of {cls.__name__} has to be a word, not {cls.kind!r}.")

    def __init__(self, **given: str) -> None:
        self.given: dict[str, str] = {"python": "python3", **given}
        self.engine = self.engine or self.kind

    def command(self, host: str, python: Sequence[str]) -> list[str]:
        """Return the command, as words, that runs the words `python` on a host, with its input and output as pipes."""
        raise NotImplementedError

    def explain(self, host: str, status: int | None, said: str) -> str:
        """Return a sentence on a command that did not start a Python: what is wrong, and what to do. Empty if the
        cause is unknown; then the exit status, the last line and a command to try are shown.

        Args:
            host: The host that was to be reached.
            status: Exit status; None while it runs.
            said: What it wrote, banners included.
        """
        return ""

    def is_final(self, said: str) -> bool:
        """Return whether a command that failed with this output cannot succeed later, because the host is gone for
        good. Then a broken connection is not re-established."""
        return False

    def is_turned_away(self, said: str) -> bool:
        """Return whether a command that failed with this output was one of too many at the same time, and is to be
        repeated for a few seconds."""
        return False

    def check(self) -> dict[str, str]:
        """Return the options for the process that holds the connections, in the kernel, before a connection is made.

        Raise `PoolError` here for anything that is missing on this machine. Notebooks share that process if they
        give it the same options: a subclass may add parts of the notebook's environment on which it depends.
        """
        return self.given

    def check_complete(self) -> None:
        """Raise `PoolError` for options that are missing, or that make no sense together."""
        machine_options.check(self.given)
        for name, example in self.needed.items():
            if name not in self.given and not (name == "hosts" and "hosts_from" in self.given):
                raise PoolError(
                    f"this pool needs {name}: write --{name} {example}, or {name} = ... in a settings file."
                )

    def try_out(self) -> str:
        """Return a sentence on the Pythons that answer on the hosts. Raises `PoolError` for a host without one."""
        from jupyter_distrib.pools.command import host_answers

        self.check_complete()
        self.check()
        if "up" in self.given:
            return "The options fit together. The first cell starts the machines; until then there is nothing to reach."
        return host_answers.try_out(self, [host.name for host in read_hosts("hosts", self.given["hosts"])])

    # ------------------------------------------------------------------------------------------ in the kernel

    def connect(self, hello: m.Hello, sink: Sink, lost: Lost) -> LocalNode:
        """See `Pool.connect`."""
        from jupyter_distrib.pools.server_home import Home, fingerprint  # here, for ranks that read a strategy's class
        from jupyter_distrib.pools.server_link import greeted

        self.check_complete()
        folder, version = self._home()
        given = {
            "folder": folder,
            "pool": f"{type(self).__module__}:{type(self).__qualname__}",
            "options": self.check(),
        }
        text = json.dumps(given, sort_keys=True)
        home = Home(name=f"{self.kind}-{fingerprint(text, *version)}", module=MODULE, stdin_text=text)
        return greeted(
            home.reach(), hello, sink, lambda reason: lost("the process that holds the hosts' connections has ended")
        )

    def _home(self) -> tuple[str, tuple[int, ...]]:
        """Return the folder from which the class is imported, and a value that changes whenever its file does. Raises
        `PoolError`."""
        name, cls = type(self).__module__, type(self).__qualname__
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if name == "__main__" or "<locals>" in cls or not path.is_file():
            raise PoolError(
                f"the class {cls} of the {self.kind} pool cannot be imported by the process that holds the hosts' "
                "connections: put it at the top of a module."
            )
        info = path.stat()
        return str(path.parents[name.count(".") + (path.name == "__init__.py")]), (info.st_mtime_ns, info.st_size)

    # ------------------------------------------------------------------------------------------ in the coordinator

    @property
    def title(self) -> str:
        """The name of the hosts, for users."""
        if "hosts" not in self.given:
            return f"{self.engine} to machines on demand"
        return f"{self.engine} to {', '.join(host.name for host in read_hosts('hosts', self.given['hosts']))}"

    def reach(self, loop: Loop, calls: CallSoon, archive: Future[bytes]) -> Engine:
        """Return the engine that reserves the hosts; `archive` is this package as a file, for them."""
        if "up" in self.given:
            from jupyter_distrib.pools.command.machine_hosts import MachineHosts

            return MachineHosts(self, self.given, loop, calls, archive)
        from jupyter_distrib.pools.command.reservation import HostOptions, Hosts

        return Hosts(self, HostOptions.of(self.given), loop, calls, archive)

    def words(self, host: str) -> list[str]:
        """See `HostCommand`."""
        return self.command(host, (self.given["python"], *bootstrap.WORDS))

    def failure(self, host: str, status: int | None, said: str) -> str:
        """See `HostCommand`."""
        if found := self.explain(host, status, said):
            return found
        python = self.given["python"]
        shown, tried = self.command(host, (python,)), self.command(host, (python, "--version"))
        return sentence(host, python, status, said, tried=shlex.join(tried), shown=shlex.join(shown))
