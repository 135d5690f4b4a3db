"""Sends to all nodes of a placement what they need once: large values, the notebook's files, remarks. Runs in the
loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from jupyter_distrib.coordinator import file_sync
from jupyter_distrib.coordinator.engine import Receive, Reservation, Transfer
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire import messages as m


class Delivery:
    """The deliveries to the nodes of one reservation.

    Args:
        calls: Calls functions of other threads in the loop.
    """

    def __init__(self, calls: CallSoon, reservation: Reservation) -> None:
        self.calls, self.reservation = calls, reservation
        self.given_back = threading.Event()
        """Set when the worker group that has the nodes now gives them back."""
        self.remark = ""
        """Remark on the nodes that a kernel gets with its first cell."""
        self.shared_folder = ""
        """The notebook's folder, if all nodes share it."""
        self._told: set[str] = set()
        self._transfer: Transfer | None = None
        self._project_files = file_sync.ProjectFiles()
        self._files: tuple[str, file_sync.Found] | None = None
        """The run for which the notebook's files were looked through, and what was found."""

    def renew(self) -> None:
        """Serve the next worker group."""
        self.given_back = threading.Event()

    def put(self, run: str, fds: Sequence[int], receive: Receive) -> None:
        """Bring a content (`shared_memory.Arriving`) to a further node of a run, and through the engine only once."""
        if self._transfer is None or self._transfer.run != run:
            self._transfer = self.reservation.transfer(run, fds, self.given_back, self.shared_folder)
        self._transfer.add(receive)

    def files_for(self, command: m.Execute) -> file_sync.Found:
        """Look through the notebook's files, once for all nodes of a run."""
        if self._files is None or self._files[0] != command.run:
            self._files = command.run, self._project_files.look(command.setting.directory, command.setting.path)
        return self._files[1]

    def tell_once(self, run: str, text: str, tell: Callable[[m.Event], None]) -> None:
        """Send a kernel a note, if it is not empty and was not sent for another node or run."""
        if text and text not in self._told:
            self._told.add(text)
            tell(m.Noted(run=run, rank=None, text=text))

    def forget_told(self) -> None:
        """Forget the remarks, because another kernel has the nodes now."""
        self._told.clear()
