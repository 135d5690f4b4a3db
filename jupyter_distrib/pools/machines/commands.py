"""Runs the user's commands for machines: by `sh`, in sessions of their own, with a log and without a terminal."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from jupyter_distrib.pools.machines.record import Place
from jupyter_distrib.system import outside_text, paths, reap
from jupyter_distrib.system.launch import began, new_log

ENDING_S = 10.0
"""Seconds that a command has to clean up when it is ended."""
LARGEST_LOG_BYTES = 16 << 20
LARGEST_OUTPUT_BYTES = 1 << 20
ROOT = str(Path(__file__).parents[3])
"""The folder of this package."""


class Command:
    """One running command of the user. Leaving the block ends it, unless it has ended; processes that it has left
    running go on.

    Args:
        name: The option that has it.
        text: What `sh` executes.
        place: The folder with the log.
        path: PATH for it.
        reads: Whether its standard output is kept for `output`.
    """

    def __init__(self, name: str, text: str, place: Place, path: str, *, reads: bool = False) -> None:
        self.name, self._place = name, place
        self._output = new_log() if reads else None
        with paths.opened(place.log, emptied=name == "up") as log:
            fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
            log.write(f"$ {text}\n".encode())
            log.flush()
            self._start = os.fstat(log.fileno()).st_size
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", text],
                stdin=subprocess.DEVNULL,
                stdout=self._output or log,
                stderr=log,
                env=environment(path),
                cwd=paths.home(),
                start_new_session=True,
            )
        self.pid, self.began = self._process.pid, began(self._process.pid)

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            end(self._process)
        if self._output is not None:
            self._output.close()

    def wait(self, limit_s: float) -> bool:
        """Wait a while; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
            return True
        with suppress(OSError):
            if self._place.log.stat().st_size > LARGEST_LOG_BYTES:
                os.truncate(self._place.log, 0)
        return False

    @property
    def status(self) -> int:
        """Its exit status."""
        return self._process.returncode or 0

    def output(self) -> str:
        """Return its standard output."""
        assert self._output is not None
        return os.pread(self._output.fileno(), LARGEST_OUTPUT_BYTES, 0).decode("utf-8", "replace")

    def last_line(self) -> str:
        """Return the last line that the command has written to the log."""
        return last_line(self._place.log_tail(self._start))


def last_line(text: str) -> str:
    """Return the last line that is not empty, in a form that can be shown."""
    lines = [outside_text.shown(line) for line in text.replace("\r", "\n").split("\n")]
    return next((line for line in reversed(lines) if line), "")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command with everything that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
            break
    reap.kill_left([process.pid], ())


def end_left(pid: int, began_at: str) -> None:
    """End the command of a killed keeper, with everything that it has started."""
    if pid and began_at and began(pid) in (began_at, ""):
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # all at once: a script whose `sleep` was killed first would go on
        reap.kill_left([pid], ())


def environment(path: str) -> dict[str, str]:
    """Return the variables of the user's commands: without the folder of this package, which their Pythons would
    search first."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if others := [each for each in before if each and each != ROOT]:
        given["PYTHONPATH"] = os.pathsep.join(others)
    return {**given, "PATH": path}
