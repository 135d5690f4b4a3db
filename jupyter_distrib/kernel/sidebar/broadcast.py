"""The news for front ends: messages on one comm with a fixed id, sent only when something has changed.

Only the kernel sends on this comm, and it is never opened, so that a front end without our sidebar does not notice it.
A front end finds it with `comm_info_request`, listens on the kernel's iopub channel, and sends its requests in another
way (`kernel/sidebar/bridge.py`): a comm on which both sides send is served only when the running cell has ended
(ipykernel 6, and 7.4).

The overview of an idle kernel does not change, so nothing is sent, and the server may end a kernel that is idle. Runs
in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

COMM = "jupyter_distrib-events"
GATHER_S = 0.1
"""The time in which changes are sent together, so that there are at most ten messages a second."""
LOOK_S = 1.0
"""The interval of reading the progress of a run."""
BEAT_S = 2.0
"""The most seconds until a page that was reloaded gets news from a kernel that is busy with a cell."""


class Broadcast:
    """The sender of the overview that `look` returns, to front ends, whenever it has changed.

    Args:
        look: Returns the present overview.
        active: Returns whether something runs, so that the overview changes by itself.
    """

    def __init__(self, look: Callable[[], dict[str, Any]], active: Callable[[], bool]) -> None:
        from comm import create_comm, get_comm_manager

        self._look, self._active = look, active
        self._comm = create_comm(target_name=COMM, comm_id=COMM, primary=False)
        get_comm_manager().register_comm(self._comm)
        self._news, self._closing = threading.Event(), threading.Event()
        self._last: Mapping[str, Any] = {}
        self._sent_s = 0.0
        threading.Thread(target=self._tell, name="jupyter_distrib-news", daemon=True).start()

    def changed(self) -> None:
        """Request that the overview be sent soon; from any thread."""
        if not self._news.is_set():
            self._news.set()

    def send(self, kind: str, content: Mapping[str, Any], now_s: float | None = None) -> None:
        """Send another message at once; from any thread. `now_s` is a time since the epoch, by default the present."""
        # Never under the key "state": nbclient would take it for a widget's state and save it in the notebook.
        self._comm.send({"kind": kind, kind: content, "now_s": time.time() if now_s is None else now_s})

    def close(self) -> None:
        from comm import get_comm_manager

        self._closing.set()
        self._news.set()
        self.send("closed", {})
        get_comm_manager().unregister_comm(self._comm)

    def _tell(self) -> None:
        while not self._closing.is_set():
            self._news.wait(LOOK_S if self._active() else None)
            self._closing.wait(GATHER_S)
            self._news.clear()
            if self._closing.is_set():
                return
            with suppress(Exception):  # it reads pools of other packages; the next change is sent all the same
                self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        at_s, now_s, overview = time.time(), time.monotonic(), self._look()
        if overview == self._last and not (self._active() and now_s - self._sent_s >= BEAT_S):
            return
        self._last, self._sent_s = overview, now_s
        self.send("overview", overview, at_s)
