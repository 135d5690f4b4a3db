"""The observer that notifies the user of the end of each run, if the user's own settings say how (`notify`). It
returns at once; a thread of its own notifies. The process that holds a detached run notifies of its end. Kernel side.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.settings.settings import Settings
from jupyter_distrib.system import notification
from jupyter_distrib.system.notification import Notification
from jupyter_distrib.wire import messages as m

FLUSH_S = 4.0
"""Maximum seconds that kernel shutdown waits for the notifications of the last runs."""


class Notifier:
    """Notifies the user of the ends of one kernel's runs.

    Args:
        notebook: Returns the path of the notebook.
    """

    def __init__(self, notebook: Callable[[], str]) -> None:
        self._notebook = notebook
        self._threads: list[threading.Thread] = []
        atexit.register(self.flush)

    def of(self, run: ObservedRun, settings: Settings) -> Observer:
        """Return the observer of a run."""
        return _AtEnd(self, run, settings)

    def notify(self, run: ObservedRun, record: RunRecord, settings: Settings) -> None:
        """Notify the user of a run that has ended."""
        from jupyter_distrib.kernel.history import saved_run

        elapsed_s = time.time() - run.began_at_s
        if elapsed_s < settings.notify_after:
            return
        saved = saved_run.of(run, record, self._notebook())
        news = Notification(
            run=run.id,
            label=run.label,
            notebook=saved.notebook,
            state=saved.state,
            began_at_s=run.began_at_s,
            elapsed_s=elapsed_s,
            metrics=saved.last,
            error=without_secrets(saved.error),
        )
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(notification.send_later(settings.notify, news, run.note))

    def flush(self) -> None:
        """Wait, for a bounded time, for the notifications of all runs that have ended."""
        until_s = time.monotonic() + FLUSH_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))


class _AtEnd(Observer):
    __slots__ = ("_notifier", "_run", "_settings")

    def __init__(self, notifier: Notifier, run: ObservedRun, settings: Settings) -> None:
        self._notifier, self._run, self._settings = notifier, run, settings

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if type(event) is m.Ended:
            self._notifier.notify(self._run, record, self._settings)
