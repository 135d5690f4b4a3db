"""Runs the shell commands of a cell (`!command`) with a terminal as their standard output, as IPython does: most
programs keep what they print for a pipe until they end. Rank's main thread."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from jupyter_distrib.system import interrupts

LOOK_S = 0.05
"""Seconds between two checks whether a command has ended whose background processes have its terminal."""
REST_BYTES = 1 << 16
"""Bytes that are still read from those when it has ended: at least what a terminal holds."""
END_S = 0.5
"""Maximum seconds that a command has to end after an interrupt."""
_CHUNK_BYTES = 1 << 16
_ROWS, _COLUMNS = 24, 80


def run(command: str) -> int:
    """Run a command in a shell and return its exit status. Errors go to the rank's own stream, and there is no input.

    What it has started in the background keeps the terminal, and writes to the streams of this cell.
    """
    sys.stdout.flush()
    try:
        terminal, of_command = _opened()
    except OSError:  # a container without /dev/pts
        with _process(command) as process:
            return process.wait()
    out = os.dup(1)
    try:
        with _process(command, stdout=of_command, closed=of_command) as process:
            is_held = _pass_on_until_end(terminal, out, process)
            status = process.wait()
        if is_held:
            passes_on = threading.Thread(target=_pass_on_rest, args=(os.dup(terminal), os.dup(out)), daemon=True)
            passes_on.start()
        return status
    finally:
        os.close(terminal)
        os.close(out)


def read(command: str) -> str:
    """Run a command in a shell and return what it prints, errors as well."""
    with (
        _process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
        closing(process.stdout),  # type: ignore[type-var]
    ):
        return process.communicate()[0].decode(errors="replace")


@contextmanager
def _process(command: str, closed: int | None = None, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and close a descriptor that it has taken over. If the block is left early, all that the command
    has started in the foreground is interrupted, as Ctrl+C in a terminal does it; the shell alone would leave it."""
    process = None
    try:
        with interrupts.Uninterrupted():  # an interrupt would leave a command that has just begun
            try:
                process = subprocess.Popen(command, shell=True, process_group=0, **streams)  # type: ignore[call-overload]  # noqa: S602
            finally:
                if closed is not None:
                    os.close(closed)
        yield process
    except BaseException:
        if process is not None:
            _stop(process)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        _signal(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    finally:  # also after a second interrupt
        if process.poll() is None:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _opened() -> tuple[int, int]:
    """Return a terminal that changes nothing of what is printed, and the end of it for a program."""
    terminal, of_command = os.openpty()
    modes = termios.tcgetattr(of_command)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(of_command, termios.TCSANOW, modes)
    fcntl.ioctl(of_command, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    return terminal, of_command


def _pass_on_until_end(terminal: int, out: int, process: subprocess.Popen[bytes]) -> bool:
    """Write to `out` what the command prints. Return whether another process still holds the
    terminal after the command exits."""
    has_ended, left = False, REST_BYTES
    with selectors.DefaultSelector() as selector:
        selector.register(terminal, selectors.EVENT_READ)
        while left > 0:
            has_ended = has_ended or process.poll() is not None
            if selector.select(0 if has_ended else LOOK_S):
                if not (data := _read(terminal)):
                    return False
                _write(out, data)
                left -= len(data) if has_ended else 0
            elif has_ended:
                break
    return True


def _pass_on_rest(terminal: int, out: int) -> None:
    with suppress(OSError):  # nobody reads these streams any more
        while data := _read(terminal):
            _write(out, data)
    os.close(terminal)
    os.close(out)


def _read(terminal: int) -> bytes:
    """Return what was printed; empty once no program has the terminal, which Linux reports as an error."""
    try:
        return os.read(terminal, _CHUNK_BYTES)
    except OSError:
        return b""


def _write(out: int, data: bytes) -> None:
    while data:
        data = data[os.write(out, data) :]
