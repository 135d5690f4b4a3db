"""Machines on demand, for the processes that need them: a coordinator, or the kernel for `%distributed_pool up`.

    kernel, coordinator --starts--> keeper (keeper.py) --runs--> up, down
            \\---- locks and files (record.py) ----/

Blocks, in a thread of `acquire` or in the kernel's main thread."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.machines import commands, summary
from jupyter_distrib.pools.machines.options import NAMES
from jupyter_distrib.pools.machines.record import ENDED, ENDING, STARTING, UP, Place, Record, known
from jupyter_distrib.system import interrupts, paths

LOOK_S = 0.2
AT_MOST_KEEPERS = 3
"""Number of keepers that may end without having written a record."""
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from jupyter_distrib.pools.machines.keeper import main; main()"


class Machine:
    """The machines of a pool.

    Args:
        options: The options of the pool, among them `up`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.plan = {name: options[name] for name in (*NAMES, "hosts") if name in options}
        self.place = Place.of(self.plan).made()

    def record(self) -> Record | None:
        return self.place.record()

    def obtain(self, say: Callable[[str], object], given_up: threading.Event) -> Record:
        """Return the machines when they are up; start them if necessary. The caller holds their `Use`.

        Args:
            say: Called with what the caller waits for.
            given_up: Set when the caller does not want them any more.

        Raises:
            PoolError: The machines could not be started, or earlier ones cannot be ended.
        """
        followed, tries, said = "", 0, ""
        keeper: subprocess.Popen[bytes] | None = None
        while not given_up.is_set():
            record, is_held = self.record(), self.place.is_held()
            if is_held and record is not None and record.state == UP:
                return record
            if is_held and record is not None and record.state == STARTING:
                followed, tries = record.life, 0
            elif not is_held and (keeper is None or keeper.poll() is not None):
                if record is not None and record.state == ENDED and record.life == followed:
                    raise PoolError(self._refusal(record))
                if tries >= AT_MOST_KEEPERS:
                    raise PoolError(f"the process that holds machines does not start: see {self.place.keeper_log}.")
                followed, tries = secrets.token_hex(4), tries + 1
                keeper = self.start_keeper(followed)
            if record is not None and (text := self._news(record)) and text != said:
                said = text
                say(text)
            interrupts.wait(given_up, LOOK_S)
        raise PoolError("the request was cancelled before the ranks started.")

    def _news(self, record: Record) -> str:
        if record.state == STARTING:
            return f"`up` starts the machines{f': {record.line}' if record.line else '.'}"
        if record.state == ENDING and record.failures and not record.gone:
            raise PoolError(summary.stuck(record, self.place))
        return "the machines are being ended; after that, new ones are started." if record.state == ENDING else ""

    def _refusal(self, record: Record) -> str:
        return f"the machines were not started: {record.reason}. `down` has been run; {self.place.log} has the output."

    def start_keeper(self, life: str) -> subprocess.Popen[bytes]:
        """Start a keeper: for machines that a killed keeper has left, else for new machines under this name. It ends
        at once if there is another keeper."""
        return start_keeper(self.place, {"life": life, "plan": self.plan, "wanted": True})


def start_keeper(place: Place, given: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Start the process that holds machines, and tell it what to do: see `keeper.py`."""
    with paths.opened(place.keeper_log) as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, commands.ROOT],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            umask=0o077,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps({"folder": str(place.folder), **given}).encode())
    threading.Thread(target=process.wait, name="jupyter_distrib-agent", daemon=True).start()
    return process


def end_left() -> None:
    """End machines whose keeper was killed and that nobody needs."""
    for place, record in known():
        if record.alive and not place.is_held():
            start_keeper(place, {"wanted": False})
