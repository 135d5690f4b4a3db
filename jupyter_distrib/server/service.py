"""The part in which agent and coordinator differ, as their server calls it. In the server's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jupyter_distrib.server.client import Client, G
from jupyter_distrib.wire import messages as m


class Service(Protocol[G]):
    """The methods in which the agent and the coordinator differ. Each is called in the loop, and returns at once."""

    def welcome(self, client: Client[G]) -> None:
        """Prepare for a kernel that has just been welcomed."""

    def open(self, client: Client[G], command: m.OpenWorkerGroup) -> None:
        """Open a worker group, refuse it, or have it wait; an opened one is given to `Server.add`."""

    def close_waiting(self, group: str) -> None:
        """Forget a worker group that waits to be opened."""

    def closed(self, group: G, *, force: bool) -> None:
        """Give back the resources of a worker group that is closed now."""

    def gone(self, client: Client[G]) -> None:
        """Forget the requests of a kernel that has gone."""

    def obey(self, client: Client[G], command: m.Message) -> None:
        """Follow a command that the server does not know."""

    def before_cell(self) -> None:
        """Record all that has happened to ranks, before they get a cell."""

    def answer(self, tell: Callable[[m.ServerStatus], None]) -> None:
        """Report the status, soon; the server adds its process and its worker groups."""

    def rest(self) -> None:
        """Free memory: no kernel is connected, and only records of detached runs are left."""
