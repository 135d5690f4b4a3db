"""Starts the forkserver and has it fork ranks. Runs in the agent's loop.

The agent forks nothing itself: a forkserver (see `worker/process/forkserver.py`) is exec'd as soon as the agent is up,
and orders wait until it has imported torch.
"""

from __future__ import annotations

import errno
import itertools
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jupyter_distrib.agent.ranks import exit_info
from jupyter_distrib.server.watched_link import WatchedLink
from jupyter_distrib.system import open_files, package_folders
from jupyter_distrib.system.control_groups import OutOfMemoryKills
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.system.launch import Launched, launch, new_log
from jupyter_distrib.system.package_folders import PackageFolders
from jupyter_distrib.system.process import TOO_MANY_PROCESSES
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

ATTEMPTS = 2
"""Number of forkservers that may die while executing one order."""
_numbers = itertools.count(1)
PRELOAD_AFTER_S = 0.2
"""Seconds to leave the processor to the first ranks and their first cell, and to ranks that start soon after them."""
PRELOAD_BY_S = 2.0
"""Seconds after which preloading waits no longer for a pause between ranks: fresh ones in a loop leave none."""
SAID_CHARACTERS = 2000
"""Number of characters shown from the end of a forkserver's log."""


@dataclass(slots=True, kw_only=True, eq=False)
class ForkOrder:
    """Ranks to be forked together."""

    orders: tuple[m.WorkerOrder, ...]
    descriptors: Descriptors
    """Descriptors of the ranks, four for each."""
    on_forked: Callable[[tuple[int, ...]], None]
    on_failed: Callable[[str], None]
    number: int = field(default_factory=lambda: next(_numbers))
    attempts: int = 0

    def fail(self, reason: str) -> None:
        self.descriptors.close()
        self.on_failed(reason)


class ForkOrders:
    """The orders of one agent."""

    def __init__(self) -> None:
        self._waiting: deque[ForkOrder] = deque()
        self._sent: dict[int, tuple[WatchedLink, ForkOrder]] = {}
        """Unanswered orders by number, with the forkservers that execute them."""

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def sent(self) -> bool:
        """Return whether any forkserver is executing an order."""
        return bool(self._sent)

    def add(self, order: ForkOrder) -> None:
        self._waiting.append(order)

    def send(self, link: WatchedLink) -> None:
        """Send all waiting orders to this forkserver."""
        while self._waiting:
            order = self._waiting.popleft()
            order.attempts += 1
            self._sent[order.number] = (link, order)
            try:
                link.post(m.Fork(number=order.number, orders=order.orders), tuple(order.descriptors))
            except OSError as error:
                del self._sent[order.number]
                order.fail(f"the ranks could not be started: {open_files.reason(error)}.")

    def are_with(self, link: WatchedLink) -> bool:
        """Return whether this forkserver is executing an order."""
        return any(other is link for other, _ in self._sent.values())

    def answer(self, answer: m.Forked | m.ForkFailed) -> None:
        """Complete the answered order, unless it was given up."""
        _, order = self._sent.pop(answer.number, (None, None))
        if order is None:
            return
        match answer:
            case m.Forked():
                order.descriptors.close()
                order.on_forked(answer.pids)
            case m.ForkFailed():
                order.fail(answer.reason)

    def requeue(self, link: WatchedLink, ended: str) -> None:
        """Requeue the orders of a dead forkserver; orders that were tried before fail, with a message on how it
        `ended`."""
        cut = [order for other, order in self._sent.values() if other is link]
        for order in reversed(cut):
            del self._sent[order.number]
            if order.attempts < ATTEMPTS:
                self._waiting.appendleft(order)
        for order in cut:
            if order.attempts >= ATTEMPTS:
                reason = (
                    f"the process that starts them {ended} while it started them, as did the one before: try again."
                )
                order.fail(f"the ranks could not be started: {reason}")

    def fail_all(self, reason: str) -> None:
        orders = [*(order for _, order in self._sent.values()), *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        for order in orders:
            order.fail(reason)


class _Generation:
    """A forkserver that was exec'd, and the preloaded one that it forks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        process.returncode = 0  # the loop reaps it, not subprocess
        self.serving: WatchedLink | None = None
        self.coming: list[WatchedLink] = []
        self.preloaded = False
        self.proved = False
        """Whether any forkserver has ever been ready, which shows that torch can be imported: if it dies, start
        another."""
        self._pids: dict[WatchedLink, int] = {}
        """The processes at the other ends of the links; that of the preloaded one is known once it is ready."""
        self._codes: dict[int, int] = {}
        """The exit codes that the system has already reported."""
        self._oom_kills = OutOfMemoryKills()

    @property
    def links(self) -> list[WatchedLink]:
        return [*([self.serving] if self.serving else ()), *self.coming]

    def record_ready(self, link: WatchedLink, pid: int) -> None:
        self._pids[link] = pid

    def record_end(self, pid: int, code: int) -> None:
        if pid == self.pid or pid in self._pids.values():
            self._codes[pid] = code

    def end_of(self, link: WatchedLink | None) -> tuple[int | None, str]:
        """Return the exit code of the forkserver that had this link, None if it is unknown, and the end of a sentence
        on it."""
        pid = self._pids.get(link, self.pid) if link is not None else self.pid
        code = self._codes.get(pid)
        if code is None:
            code = exit_info.code_of_child(pid)
        out_of_memory = code == -signal.SIGKILL and self._oom_kills.grown
        return code, exit_info.describe_end(code, out_of_memory=out_of_memory)

    def remove(self, link: WatchedLink) -> None:
        if link in self.coming:
            self.coming.remove(link)
        if link is self.serving:
            self.serving = None


class Forkservers:
    """The forkservers, at most two: the base one, and the preloaded one that replaces it.

    Args:
        on_preloaded: Called when the preloaded forkserver has replaced the base one.
        launched: The first forkserver, if it is starting already.
    """

    def __init__(self, loop: Loop, on_preloaded: Callable[[], None], launched: Launched | None = None) -> None:
        self._loop, self._on_preloaded, self._launched = loop, on_preloaded, launched
        self._log = launched[2] if launched else new_log()
        self._packages = PackageFolders(package_folders.on_path())
        """The packages as they were when the forkserver began to import some of them."""
        self._orders = ForkOrders()
        self._generation: _Generation | None = None
        self._failures = 0
        """Number of consecutive forkservers that ended before they were ready while ranks waited for them."""
        self._preload_timer: Timer | None = None
        self._preload_by_s = 0.0
        self.growing = True
        """Whether a preloaded forkserver is wanted."""
        self.session = 0
        """Session of the forkservers and of what they have just forked."""

    @property
    def busy(self) -> bool:
        """Return whether ranks are being forked: some children may not be registered yet."""
        return self._orders.sent

    @property
    def preloaded(self) -> bool:
        """Return whether the preloaded forkserver serves."""
        return self._generation is not None and self._generation.preloaded

    @property
    def ready(self) -> bool:
        """Return whether a forkserver serves, so that torch is imported."""
        return self._generation is not None and self._generation.serving is not None

    @property
    def state(self) -> str:
        if self._generation is None:
            return "not running"
        if self._generation.serving is None:
            return "importing torch"
        importing = self.growing and not self.preloaded and self._generation.coming
        return "ready (still importing)" if importing else "ready"

    def start(self) -> None:
        """Exec the forkserver, unless one is running or starting that has begun with the present packages."""
        if self._packages.changes:
            self._packages = PackageFolders(package_folders.on_path())
            self._leave()
        if self._generation is not None:
            return
        try:
            process, socks, _ = self._launched or launch(self._log)
        except OSError as error:
            reason = TOO_MANY_PROCESSES if error.errno == errno.EAGAIN else open_files.reason(error)
            return self._orders.fail_all(f"the process that starts ranks could not be started: {reason}.")
        self._launched = None
        self.session = process.pid
        self._generation = _Generation(process)
        self._generation.coming += [self._watched(sock) for sock in socks]

    def stop(self) -> None:
        """Stop the forkserver, and fail its orders; the next order, or `start`, makes another one."""
        if self._generation is not None:
            self._close(self._generation)
        self._orders.fail_all("the process that starts ranks was stopped.")

    def fork(
        self,
        orders: tuple[m.WorkerOrder, ...],
        descriptors: Descriptors,
        on_forked: Callable[[tuple[int, ...]], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Fork ranks, now or when the forkserver is ready; one of the two callbacks follows."""
        self._orders.add(ForkOrder(orders=orders, descriptors=descriptors, on_forked=on_forked, on_failed=on_failed))
        self.start()
        self._send()

    def on_child_ended(self, pid: int, code: int) -> None:
        """Handle the end of any child process: if the first forkserver ends before it was ready, torch may not be
        importable."""
        if self._generation is None:
            return
        self._generation.record_end(pid, code)
        if pid == self._generation.pid and not self._generation.proved:
            self._fail(self._generation)

    def _watched(self, sock: socket.socket) -> WatchedLink:
        link: WatchedLink = WatchedLink(
            self._loop,
            sock,
            on_message=lambda message, _: self._on_message(link, message),
            on_end=lambda: self._on_end(link),
        )
        return link

    def _send(self) -> None:
        if self._generation is not None and self._generation.serving is not None:
            self._orders.send(self._generation.serving)

    def _on_message(self, link: WatchedLink, message: m.Message) -> None:
        match message:
            case m.ForkserverReady():
                self._on_ready(link, message)
            case m.Forked() | m.ForkFailed():
                self._on_answer(link, message)

    def _on_ready(self, link: WatchedLink, message: m.ForkserverReady) -> None:
        generation = self._generation
        if generation is None or link not in generation.coming:
            return
        before = generation.serving
        generation.remove(link)
        generation.serving, generation.proved = link, True
        generation.record_ready(link, message.pid)
        self._failures = 0
        self._send()
        if message.early:
            self._preload_by_s = time.monotonic() + PRELOAD_BY_S
            return self._preload_soon()
        generation.preloaded = True
        if before is not None:
            self._close_unless_forking(before)
        self._on_preloaded()

    def _on_answer(self, link: WatchedLink, answer: m.Forked | m.ForkFailed) -> None:
        self._orders.answer(answer)
        if self._generation is not None and link is not self._generation.serving:
            self._close_unless_forking(link)
        elif self._preload_timer is not None:
            self._preload_soon()

    def _preload_soon(self) -> None:
        if self._preload_timer is not None:
            self._preload_timer.cancel()
        left_s = self._preload_by_s - time.monotonic()
        self._preload_timer = self._loop.later(min(PRELOAD_AFTER_S, max(left_s, 0.0)), self._preload)

    def _preload(self) -> None:
        self._preload_timer = None
        generation = self._generation
        if generation is not None and generation.serving is not None and generation.coming and self.growing:
            generation.serving.post(m.Preload())

    def _close_unless_forking(self, link: WatchedLink) -> None:
        if not self._orders.are_with(link):
            link.close()

    def _on_end(self, link: WatchedLink) -> None:
        """Handle the end of a forkserver: its orders go to the other one, or to a new one."""
        link.close()
        generation = self._generation
        ended = generation.end_of(link)[1] if generation is not None and self._orders.are_with(link) else ""
        self._orders.requeue(link, ended)
        if generation is None:
            return
        generation.remove(link)
        if generation.links:
            return self._send()
        if not generation.proved:
            return self._fail(generation)
        self._generation = None
        if self._orders.waiting:
            self.start()

    def _fail(self, generation: _Generation) -> None:
        """Handle the end of a forkserver that was never ready: try once more, since the kill may have been meant for
        something else; fail all waiting orders with the reason after that, or if Python said why it cannot start.
        The next order starts anew."""
        code, ended = generation.end_of(None)
        self._close(generation)
        said = self._pop_log()
        explained = code == 1 and bool(said)
        if not self._orders.waiting:
            return
        self._failures += 1
        if not explained and self._failures < ATTEMPTS:
            return self.start()
        again = f", {self._failures} times" if self._failures > 1 else ""
        reason = f"the process that starts them {ended} before it was ready{again}: try again."
        if explained:
            *before, reason = said.splitlines()
            said = said if before else ""
            if "start new thread" in reason:
                reason, said = f"{TOO_MANY_PROCESSES}.", ""
        self._failures = 0
        self._orders.fail_all("\n".join(filter(None, [f"the ranks could not be started: {reason}", said])))

    def _pop_log(self) -> str:
        """Return the end of the forkserver's log, and clear it."""
        self._log.seek(0)
        said = self._log.read().decode("utf-8", "replace").strip()
        if len(said) > SAID_CHARACTERS:
            said = said[-SAID_CHARACTERS:]
            said = said.partition("\n")[2] or said
        self._log.seek(0)
        self._log.truncate()
        return said

    def _leave(self) -> None:
        """Give up the forkserver once it has executed its orders, because packages that it has imported have changed
        since."""
        if self._generation is not None:
            for link in self._generation.links:
                self._close_unless_forking(link)
            self._generation = None

    def _close(self, generation: _Generation) -> None:
        for link in generation.links:
            link.close()
        self._generation = None
