"""The prompt of the debugger in the notebook: the user's lines go to the rank that is stopped, its answers are printed
below the cell. Kernel's main thread, which waits for the run.

    DebuggerPrompted -> RankRecord.prompt -> input() -> Debug(read) -> the rank -> DebuggerPrompted | DebuggerLeft

One rank is spoken to at a time. `input()` is the kernel's: every front end with a keyboard answers it, while the cell
waits.
"""

from __future__ import annotations

import re
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system import interrupts
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

POLL_S = 0.01
BACK_S = 0.3
"""Seconds for which the rank that made the last step is preferred over other stopped ranks."""
NEWS_S = 0.5
"""Seconds for which a view keeps being notified of a change, since it draws only at intervals."""
_OTHER_RANK = re.compile(r"\s*rank\s+(\d+)\s*")
_ALL_RANKS = re.compile(r"\s*all\s+(?=[\w!])(.+)")
HELP = (
    "c: go on, n: next line, w: where, p NAME: a value, q: stop the run, h: all commands; rank N: another rank that is "
    "stopped, all COMMAND: to each of them"
)


class Withdrawn(Exception):
    """The rank no longer waits for a line, since its run is over."""


class DebuggerLink(Protocol):
    """The part of a run's `PoolLink` that a conversation uses."""

    @property
    def debug(self) -> Callable[[int, str, str], object]: ...


class DebuggedRun(Protocol):
    """The part of a run that a conversation uses."""

    record: RunRecord

    @property
    def link(self) -> DebuggerLink: ...

    def done(self) -> bool: ...

    def cancel(self) -> None: ...


def converse(run: DebuggedRun, meanwhile: Callable[[], object]) -> None:
    """Converse with the ranks of a run that are stopped in the debugger, until none is.

    Args:
        run: The run.
        meanwhile: Called in another thread when there is news of the run, while this one waits for the user.
    """
    conversation = Conversation(run, HELP, is_over=run.done, meanwhile=meanwhile)
    rank: int | None = None
    while not run.done() and (rank := conversation.next_rank(rank)) is not None:
        rank = conversation.answer(rank)


class Conversation:
    """The conversation about one run.

    Args:
        advice: The commands, in one line above the first prompt.
        is_over: Returns whether no rank will answer any more.
        meanwhile: Called when there is news of the run while the user is asked.
    """

    def __init__(
        self,
        run: DebuggedRun,
        advice: str,
        *,
        is_over: Callable[[], bool],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self._run, self._advice, self._is_over, self._meanwhile = run, advice, is_over, meanwhile
        self._changes, self._changed_at_s = 0, 0.0
        """Number of events so far, and the time at which the last was noticed."""
        self._shown: dict[int, m.DebuggerPrompted] = {}
        """The prompt last printed for each rank."""

    @property
    def _stopped(self) -> tuple[int, ...]:
        return self._run.record.in_debugger

    def next_rank(self, last: int | None) -> int | None:
        """Return the rank to ask: the last one if it stops again soon, else the first stopped one; None if there is
        none."""
        until_s = time.monotonic() + (BACK_S if last is not None else 0.0)
        while time.monotonic() < until_s and last not in self._stopped and not self._is_over():
            time.sleep(POLL_S)
        stopped = self._stopped
        return last if last in stopped else min(stopped, default=None)

    def answer(self, rank: int) -> int:
        """Ask for one line and act on it. Return the rank to ask next, if it is stopped."""
        prompt = self._run.record.ranks[rank].prompt
        if prompt is None:
            return rank
        self._show(rank, prompt)
        try:
            line = _read(f"rank {rank} {prompt.prompt}", lambda: self._is_wanted(rank, prompt))
        except Withdrawn:
            self._wait(rank, prompt)
            return rank
        except EOFError:
            self._run.link.debug(rank, "end", "")
            self._wait(rank, prompt)
            return rank
        except KeyboardInterrupt:
            self._leave(rank, prompt)
            return rank
        if other := _OTHER_RANK.fullmatch(line):
            return self._switch(rank, int(other[1]))
        if several := _ALL_RANKS.fullmatch(line):
            for number in self._stopped:
                self._send(number, several[1])
                self._show_answer(number)
        else:
            self._send(rank, line)
        return rank

    def _is_wanted(self, rank: int, prompt: m.DebuggerPrompted) -> bool:
        """Notify of news, and return whether the rank still waits for its line. Called while the user is being
        asked."""
        if self._changes != self._run.record.changes:
            self._changes, self._changed_at_s = self._run.record.changes, time.monotonic()
        if time.monotonic() < self._changed_at_s + NEWS_S:
            self._meanwhile()
        return self._is_waiting(rank, prompt)

    def _is_waiting(self, rank: int, prompt: m.DebuggerPrompted) -> bool:
        return self._run.record.ranks[rank].prompt is prompt

    def _show(self, rank: int, prompt: m.DebuggerPrompted) -> None:
        if self._shown.get(rank) is prompt:
            return
        if rank not in self._shown:
            print(f"rank {rank} is stopped{_at(prompt)}. {self._advice}")
        self._shown[rank] = prompt
        print(prompt.text, end="")

    def _switch(self, rank: int, other: int) -> int:
        stopped = self._stopped
        if other in stopped:
            self._shown.pop(other, None)
            return other
        print(
            f"rank {other} is not stopped in the debugger; {rank_list(stopped)} {'is' if len(stopped) == 1 else 'are'}."
        )
        return rank

    def _show_answer(self, rank: int) -> None:
        """Print the answer of one of several ranks."""
        prompt = self._run.record.ranks[rank].prompt
        if prompt is not None:
            self._shown[rank] = prompt
            print("".join(f"[{rank}] {line}" for line in prompt.text.splitlines(keepends=True)), end="")

    def _send(self, rank: int, line: str) -> None:
        """Send a line to a rank, and wait until it has answered or resumed."""
        prompt = self._run.record.ranks[rank].prompt
        if prompt is not None:
            self._wait(rank, prompt, first=lambda: self._run.link.debug(rank, "read", line))

    def _wait(self, rank: int, prompt: m.DebuggerPrompted, first: Callable[[], object] = lambda: None) -> None:
        """Call `first`, and wait until the rank has answered or resumed; stop the run if the user has quit. An
        interrupt at any point of the wait is for the rank."""
        is_told = False
        while True:
            try:
                if not is_told:
                    with interrupts.Uninterrupted():
                        is_told = True
                        first()
                while self._is_waiting(rank, prompt) and not self._is_over():
                    time.sleep(POLL_S)
                break
            except KeyboardInterrupt:
                self._run.link.debug(rank, "interrupt", "")
        left = self._run.record.ranks[rank].left_debugger
        if left is not None and self._run.record.ranks[rank].prompt is None:
            print(left.text, end="")
            if left.quit and not self._run.done():
                self._run.cancel()

    def _leave(self, rank: int, prompt: m.DebuggerPrompted) -> None:
        """Handle an interrupt at the prompt, which has stopped the run; an examination ends."""
        if self._run.done():
            self._run.link.debug(rank, "end", "")
        self._wait(rank, prompt)


def _at(prompt: m.DebuggerPrompted) -> str:
    return "" if prompt.line is None else f" at line {prompt.line}"


# ------------------------------------------------------------------------------------------------ one line


def _read(prompt: str, is_wanted: Callable[[], bool]) -> str:
    """Return the line typed by the user.

    Raises:
        Withdrawn: `is_wanted` has become false meanwhile.
        KeyboardInterrupt: The user has pressed Stop; the handlers of interrupts have been called.
    """
    with _interruptible() as question:
        watcher = threading.Thread(
            target=question.withdraw_unless, args=[is_wanted], name="jupyter_distrib-prompt", daemon=True
        )
        watcher.start()
        try:
            return input(prompt)
        except KeyboardInterrupt:
            if question.withdrawn:
                raise Withdrawn from None
            raise
        finally:
            question.close()
            watcher.join()


class _Question:
    """A question in the main thread that another thread can withdraw."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.withdrawn = False

    def withdraw_unless(self, is_wanted: Callable[[], bool]) -> None:
        """Interrupt the main thread as soon as nobody waits for the answer any more."""
        while not self._closed.wait(5 * POLL_S):
            if is_wanted():
                continue
            with self._lock:
                if not self._closed.is_set():
                    self.withdrawn = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return

    def close(self) -> None:
        with self._lock:
            self._closed.set()


@contextmanager
def _interruptible() -> Iterator[_Question]:
    """Raise interrupts within the block, after notifying the previous handler."""
    question, before = _Question(), signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: types.FrameType | None) -> None:
        if not question.withdrawn and before == signal.SIG_IGN:
            return  # whoever has started this program does not want interrupts
        if not question.withdrawn and callable(before):
            before(signum, frame)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield question
    finally:
        signal.signal(signal.SIGINT, before)
