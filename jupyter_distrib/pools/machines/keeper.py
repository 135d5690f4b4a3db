"""The process that holds machines: it runs `up`, measures how long nobody has needed them, and runs `down` until
that succeeds. `machine.py` starts it; it outlives kernels and coordinators, and ends with the machines.

    starting --> up --> ending --> ended
        |                  ^
        +------------------+   `up` has failed, takes too long, or nobody waits for it any more

Standard input is JSON: the folder, and for a new life its name and plan. Without a plan it takes over the machines
that a killed keeper has left. Single-threaded; looks at the locks a few times a second."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib.pools.machines import commands
from jupyter_distrib.pools.machines.commands import Command
from jupyter_distrib.pools.machines.record import ENDED, ENDING, STARTING, UP, Place, Record, Use
from jupyter_distrib.system import signals
from jupyter_distrib.system.formatting import duration

LOOK_S = 0.25
"""Seconds between looks at the locks."""
LINE_S = 1.0
"""Seconds between two lines of `up` that are kept."""
HOSTS_S = 120.0
STATUS_S = 120.0
DOWN_S = 1800.0
"""Seconds after which these commands are given up."""
LEAVE_S = 1.0
"""Seconds in which coordinators notice that the machines are about to end, and end their ranks."""
AGAIN_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
"""Seconds until `down` is tried again; the last value applies from then on."""
LATE_S = 20.0
"""Seconds after which `down` is run again for an `up` that was cut off: its request may have arrived late."""


def main() -> None:
    given = json.load(sys.stdin)
    signals.reset()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    place = Place(Path(given["folder"]))
    if (lock := place.hold()) is None:
        return  # another keeper was first
    left = place.record()
    if left is not None and left.alive:
        Keeper(place, left).take_over(wanted=bool(given.get("wanted")))
    elif plan := given.get("plan"):
        place.asked_for_end()  # files of an earlier life
        path, now_s = os.environ.get("PATH", os.defpath), time.time()
        fresh = Record(life=given["life"], state=STARTING, plan=plan, path=path, began_at_s=now_s)
        Keeper(place, fresh).live()
    lock.close()


class Keeper:
    """The keeper of one life."""

    def __init__(self, place: Place, record: Record) -> None:
        self._place, self._record = place, replace(record, keeper=os.getpid())
        self._use = Use(place)
        self._must_end = False
        self._cut_off = False
        """Whether `up` was ended early, so that machines may still come up."""
        self._used_s = time.time()
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: Any) -> None:
        self._must_end = True

    def live(self) -> None:
        """Start the machines, hold them, and end them."""
        self._write()
        self._end(self._start() or self._hold())

    def take_over(self, *, wanted: bool) -> None:
        """Continue with the machines that another keeper has left: hold them if somebody needs them, else end them."""
        record = self._record
        self._write()
        if record.state == UP and (wanted or not self._is_free()):
            self._used_s = self._use.last_s()
            return self._end(self._hold())
        if record.state == STARTING:
            commands.end_left(record.up_pid, record.up_began)
            self._cut_off = True
        return self._end(record.reason or "nobody looked after it any more")

    # ------------------------------------------------------------------------------------------------ starting

    def _start(self) -> str:
        """Run `up` and find the hosts; return why there are none, or an empty text."""
        with self._command("up") as up:
            self._write(up_pid=up.pid, up_began=up.began)
            if reason := self._follow(up, self._record.seconds("up_within"), needed=True):
                self._cut_off = True
                return reason
            if status := up.status:
                return f"`up` ended with status {status}{_said(up.last_line())}"
        hosts = self._record.plan.get("hosts", "")
        if not hosts:
            with self._command("hosts_from", reads=True) as asked:
                if reason := self._follow(asked, HOSTS_S, needed=True):
                    return reason
                if status := asked.status:
                    return f"`hosts_from` ended with status {status}{_said(asked.last_line())}"
                hosts = ",".join(re.split(r"[\s,]+", asked.output().strip()))
            if not hosts:
                return "`hosts_from` has printed no hosts"
        now_s = time.time()
        self._write(state=UP, hosts=hosts, up_at_s=now_s, up_pid=0)
        self._used_s = now_s
        return ""

    def _follow(self, command: Command, limit_s: float, *, needed: bool) -> str:
        """Wait for the end of a command; return why it was ended early, or an empty text.

        Args:
            command: The command.
            limit_s: The time after which it is ended.
            needed: Whether it is ended when nobody needs the machines.
        """
        began_s = shown_s = time.monotonic()
        while not command.wait(LOOK_S):
            now_s = time.monotonic()
            if needed and (reason := self._asked()):
                return reason
            if needed and self._is_free():
                return "nobody waited for it any more"
            if now_s > began_s + limit_s:
                return f"`{command.name}` had not ended after {duration(limit_s)}"
            if now_s > shown_s + LINE_S and (line := command.last_line()) != self._record.line:
                shown_s = now_s
                self._write(line=line)
        return ""

    # ------------------------------------------------------------------------------------------------ holding

    def _hold(self) -> str:
        """Wait until the machines should be ended; return why."""
        down_after_s = self._record.seconds("down_after")
        while True:
            time.sleep(LOOK_S)
            now_s = time.time()
            if reason := self._asked():
                return reason
            if (ends_at_s := self._record.ends_at_s) and now_s > ends_at_s:
                return f"at_most = {self._record.plan['at_most']} was over"
            if not self._is_free():
                self._used_s = now_s
                continue
            idle_s = now_s - max(self._used_s, self._use.last_s())
            if idle_s > down_after_s and self._use.claim():
                if now_s - self._use.last_s() > down_after_s:  # nobody has needed the machines in between
                    reason = f"nobody had used it for {duration(down_after_s)}"
                    self._write(state=ENDING, reason=reason)
                self._use.leave()
                if reason:
                    return reason

    def _asked(self) -> str:
        return "its keeper was asked to end" if self._must_end else self._place.asked_for_end()

    def _is_free(self) -> bool:
        """Return whether nobody needs the machines at this moment."""
        if free := self._use.claim():
            self._use.leave()
        return free

    # ------------------------------------------------------------------------------------------------ ending

    def _end(self, reason: str) -> None:
        """Run `down` until it has succeeded."""
        had_machines = self._record.state != STARTING
        self._write(state=ENDING, reason=reason)
        if had_machines:
            time.sleep(LEAVE_S)
        while failure := self._down():
            failures = self._record.failures + 1
            pause_s = AGAIN_S[min(failures, len(AGAIN_S)) - 1]
            gone = self._status() not in (None, 0)
            if self._place.forgotten():
                return
            self._write(failures=failures, failure=failure, next_at_s=time.time() + pause_s, gone=gone)
            if not self._wait(pause_s):
                break
        if self._cut_off and self._record.failures == 0:
            self._wait_until_needed(LATE_S)
            self._down()
        if not self._place.forgotten():
            self._write(state=ENDED, ended_at_s=time.time())

    def _down(self) -> str:
        """Run `down` once; return why it has not succeeded, or an empty text."""
        with self._command("down") as down:
            if reason := self._follow(down, DOWN_S, needed=False):
                return reason
            if down.status:
                return f"`down` ended with status {down.status}{_said(down.last_line())}"
        return "`down` has succeeded, but `status` says that it is still up" if self._status() == 0 else ""

    def _status(self) -> int | None:
        """Return the exit status of `status`; None if there is no such command, or it does not answer."""
        if "status" not in self._record.plan:
            return None
        with self._command("status") as status:
            return None if self._follow(status, STATUS_S, needed=False) else status.status

    def _wait(self, pause_s: float) -> bool:
        """Wait until `down` is to be tried again; return False if it need not be, because the user has removed the
        record, or somebody wants new machines and `status` says that the old ones are gone."""
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            time.sleep(LOOK_S)
            if self._place.forgotten() or (self._record.gone and not self._is_free()):
                return False
            if self._place.asked_for_end():
                return True
        return True

    def _wait_until_needed(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s and self._is_free() and not self._must_end:
            time.sleep(LOOK_S)

    # ------------------------------------------------------------------------------------------------ files

    def _command(self, name: str, *, reads: bool = False) -> Command:
        return Command(name, self._record.plan[name], self._place, self._record.path, reads=reads)

    def _write(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        with suppress(OSError):  # a full disk: the record stays as it was, and the machines are ended all the same
            self._place.write(self._record)


def _said(line: str) -> str:
    return f" ({line})" if line else ""
