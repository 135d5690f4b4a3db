"""The detached runs of an agent: their records outlive the kernels that started them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.server.journal import Journal
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import confinement, confinement_report, last_seen, notification, run_list
from jupyter_distrib.system.notification import Notification
from jupyter_distrib.system.run_list import ListedRun
from jupyter_distrib.wire import messages as m

KEEP_S = 24 * 3600
"""Seconds for which the record of a run that has ended stays."""
KEPT_READ = 20
"""Number of such records to keep, the newest ones, of runs that a kernel has followed to the end."""
KEPT_READ_BYTES = 1 << 30
"""Maximum size of the values in such records: above it the oldest are removed; the newest record stays."""

_WORST = ("lost", "failed", "interrupted", "done")
"""The ways in which a rank can end, worst first: a run's outcome is the worst of its ranks'."""

Send = Callable[[Client[Any], m.Event, tuple[int, ...]], None]


class DetachedRuns:
    """The detached runs of one agent, by name, the newest last.

    Args:
        send: Sends an event to a kernel.
        directory: The folder in which the runs are listed for all kernels of this user.
        server: The name of this process in that list.
    """

    def __init__(self, send: Send, directory: Path, server: str) -> None:
        self._send, self._directory, self._server = send, directory, server
        self._journals: dict[str, Journal] = {}

    def __len__(self) -> int:
        return len(self._journals)

    @property
    def going_on(self) -> bool:
        return any(not journal.ended for journal in self._journals.values())

    def start_record(
        self, client: Client[Any], command: m.Execute, workers: tuple[m.WorkerInfo, ...], world_size: int, *, gpus: bool
    ) -> Callable[[m.Event, tuple[int, ...]], None]:
        """Start recording a run that this kernel follows; call the returned function with each event."""
        assert client.hello is not None
        journal = Journal(command, workers, world_size, gpus=gpus, notebook=client.hello.notebook)
        self._journals[command.run] = journal
        journal.listeners.append(client)
        listed = ListedRun(
            run=command.run,
            label=command.label,
            holder=client.hello.label,
            notebook=client.hello.notebook,
            began_at_s=time.time(),
            ended=False,
            server=self._server,
            pid=os.getpid(),
            protocol=m.PROTOCOL,
            pid_namespace=confinement.pid_namespace(),
            where=confinement_report.where(),
        )
        run_list.write(self._directory, listed)
        seen = last_seen.of(listed, self._directory)
        last_seen.write(seen)
        folders: list[str] = []
        outcome = Outcome()

        def emit(event: m.Event, fds: tuple[int, ...]) -> None:
            journal.add(event, fds)
            outcome.follow(event)
            if isinstance(event, m.Saving) and event.folder not in folders:
                folders.append(event.folder)
                last_seen.write(replace(seen, checkpoints=folders))
            if journal.ended:
                run_list.write(self._directory, replace(listed, ended=True, state=outcome.state))
                _notify(command, listed, outcome)
                last_seen.write(replace(seen, checkpoints=folders, ended=True))
                self._prune_read()
            for listener in list(journal.listeners):
                self._send(listener, event, fds)

        return emit

    def touch(self) -> None:
        """Record that each running run was alive just now."""
        for run, journal in self._journals.items():
            if not journal.ended:
                last_seen.touch(run)

    def attach(self, client: Client[Any], command: m.Attach) -> None:
        """Send a kernel everything recorded of a run, given by the end of its id (or the newest one), and keep it up to
        date."""
        run = command.run or self._newest(client)
        matches = [name for name in self._journals if name == run or name.endswith(f"-{run}")] if run else []
        if len(matches) != 1:
            known = ", ".join(self._journals) or "none"
            reason = f"there is no detached run {run!r} here." if run else "there is no detached run here."
            return self._send(client, m.NotAttached(run=command.run, reason=f"{reason} Detached runs: {known}."), ())
        journal = self._journals[matches[0]]
        followed = any(each is not client for each in journal.listeners)
        self._send(client, journal.attached(followed=followed), ())
        for event, descriptors in journal.entries():
            self._send(client, event, tuple(descriptors))
        if not journal.ended and client not in journal.listeners:
            journal.listeners.append(client)

    def remove_listener(self, client: Client[Any]) -> None:
        """Record that a kernel is gone and follows no run any more."""
        for journal in self._journals.values():
            journal.listeners = [each for each in journal.listeners if each is not client]

    def prune(self) -> None:
        """Remove runs that ended long ago."""
        for run, journal in list(self._journals.items()):
            if journal.ended and time.monotonic() - journal.ended_s > KEEP_S:
                self._remove(run)

    def _prune_read(self) -> None:
        """Remove surplus runs that a kernel has received: each holds memory and descriptors."""
        read = [run for run, journal in self._journals.items() if journal.ended and journal.is_read]
        size_bytes = 0
        for place, run in enumerate(reversed(read)):
            size_bytes += self._journals[run].value_bytes
            if place >= KEPT_READ or (place and size_bytes > KEPT_READ_BYTES):
                self._remove(run)

    def _remove(self, run: str) -> None:
        self._journals.pop(run).close()
        run_list.remove(self._directory, run)
        last_seen.remove(run)

    def _newest(self, client: Client[Any]) -> str:
        """Return the newest run of the client's notebook, or else of any notebook; empty if there is none."""
        assert client.hello is not None
        notebook, newest_first = client.hello.notebook, [*reversed(self._journals)]
        return next(
            (run for run in newest_first if notebook and self._journals[run].notebook == notebook),
            next(iter(newest_first), ""),
        )


class Outcome:
    """The outcome of one run so far, from the few events that matter for it."""

    def __init__(self) -> None:
        self.error = ""
        """The first failure, in one line."""
        self._states = {"done"}
        self._metrics: dict[int, dict[str, float]] = {}

    @property
    def state(self) -> str:
        """The way in which the run has ended: `done`, `failed`, `lost` or `interrupted`."""
        return next(each for each in _WORST if each in self._states)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, on the first rank that reported it."""
        last: dict[str, float] = {}
        for rank in sorted(self._metrics):
            last = {**self._metrics[rank], **last}
        return last

    def follow(self, event: m.Event) -> None:
        """Handle an event; a restart cancels earlier failures."""
        match event:
            case m.Measured():
                self._metrics[event.rank] = {**self._metrics.get(event.rank, {}), **event.values}
            case m.Failed():
                self._states.add("failed")
                self.error = self.error or f"{event.failure.type_name}: {event.failure.message}"
            case m.Interrupted() | m.Exited(asked=True):
                self._states.add("interrupted")
            case m.Exited():
                self._states.add("lost")
                self.error = self.error or f"rank {event.rank} was lost"
            case m.Restarted():
                self._states, self.error = {"done"}, ""
            case _:
                pass


def _notify(command: m.Execute, listed: ListedRun, outcome: Outcome) -> None:
    """Notify the user of the end of a run, whose kernel may have gone, if the user's settings say how."""
    elapsed_s = time.time() - listed.began_at_s
    if command.notify and elapsed_s >= command.notify_after_s:
        news = Notification(
            run=listed.run,
            label=listed.label,
            notebook=listed.notebook,
            state=outcome.state,
            began_at_s=listed.began_at_s,
            elapsed_s=elapsed_s,
            metrics=outcome.metrics,
            error=without_secrets(outcome.error),
        )
        notification.send_later(
            command.notify, news, lambda problem: print(problem, flush=True)
        )  # in the process's log
