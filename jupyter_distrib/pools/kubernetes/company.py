"""Keeps pods that run while others of their Job still start: each gets a command that lasts as long as this process.

Without such a command, a pod would consider itself unused (`keeper`); with it, all pods end soon when this process
is killed."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import suppress

from jupyter_distrib.pools.kubernetes import keeper

AGAIN_S = 5.0
ENDING_S = 2.0


class Company:
    """The commands in pods that wait. `keep` and `leave` are called in one thread."""

    def __init__(self) -> None:
        self._processes: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, pod: str, words: list[str]) -> None:
        """Run a command in a pod, unless it runs already."""
        process, began_s = self._processes.get(pod, (None, 0.0))
        if process is not None and (process.poll() is None or time.monotonic() < began_s + AGAIN_S):
            return
        with suppress(OSError):  # the error is reported where the relay is started
            new = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            with self._lock:
                if process is not None:
                    _close(process)
                self._processes[pod] = (new, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._show_signs, name="jupyter_distrib-company", daemon=True)
            self._thread.start()

    def _show_signs(self) -> None:
        """Send the signs of life that the commands wait for; in a thread of its own."""
        while not self._left.wait(keeper.ALIVE_S):
            with self._lock:
                processes = [process for process, _ in self._processes.values()]
            for process in processes:
                with suppress(OSError, ValueError):
                    assert process.stdin is not None
                    process.stdin.write(b"\n")
                    process.stdin.flush()

    def leave(self) -> None:
        """End the commands. Blocks for a moment."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        for process, _ in self._processes.values():
            _close(process)
        self._processes.clear()


def _close(process: subprocess.Popen[bytes]) -> None:
    """End a command by the end of its input."""
    with suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)
        return
    process.kill()
    process.wait()
