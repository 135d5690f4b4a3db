"""A command that breaks when it is told to: `python breaking_command.py FOLDER HOST WORDS ...` runs the words on a "host"
and passes on what comes and goes, as ssh does with a session of its own at the other end.

A file `HOST.anything` in the folder that contains a number makes it die after so many more bytes, in whatever direction;
each file is for one death. While there is a file `HOST-refused`, it starts nothing. While there is a file `HOST-slow`, only
as many more bytes as it says go to the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Budget:
    """The number of bytes that still pass, once a file has set it."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host, self._lock = folder, host, threading.Lock()
        self._left: int | None = None

    def passes(self, data: bytes, to: int) -> None:
        """Pass data on, or a part of it, and die."""
        with self._lock:
            if self._left is None:
                self._claim()
            part = data if self._left is None else data[: self._left]
            while part:
                part = part[os.write(to, part) :]
            if self._left is not None:
                self._left -= min(len(data), self._left)
                if not self._left:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _claim(self) -> None:
        for path in sorted(self._folder.glob(f"{self._host}.*")):
            with suppress(FileNotFoundError):
                self._left = int(path.read_text())
                path.unlink()
                return


def main(folder: str, host: str, *words: str) -> None:
    if os.path.exists(f"{folder}/{host}-refused"):
        sys.exit(f"{host} is out of reach")
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    budget = Budget(Path(folder), host)

    def forward(source: int, to: int, before: Callable[[bytes], None] = lambda data: None) -> None:
        with suppress(BrokenPipeError):
            while data := os.read(source, 1 << 16):
                before(data)
                budget.passes(data, to)

    slow, passed = Path(folder, f"{host}-slow"), 0

    def wait(data: bytes) -> None:
        nonlocal passed
        with suppress(FileNotFoundError):
            while passed + len(data) > int(slow.read_text()):
                time.sleep(0.01)
            passed += len(data)

    def there() -> None:
        forward(0, process.stdin.fileno(), wait)
        process.stdin.close()

    threading.Thread(target=there, daemon=True).start()
    forward(process.stdout.fileno(), 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
