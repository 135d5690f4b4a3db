"""Tries out the options of a pool: reaches its parts, and starts no ranks.

    kernel:   Trial(kind, options, on_result)   --options-->   process: open_pool(kind, options).try_out()
                                           <--result---

The separate process lets the user give up: whatever a pool waits for, and whatever program it has started, ends with
the process's group. It ends with the kernel, too. Options come on its input, since command lines are visible to
all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.pools.base import open_pool
from jupyter_distrib.system import import_path

LIMIT_S = 90.0
"""Seconds after which a trial is given up."""
LONGEST = 600
"""Maximum number of characters of a result."""
_START = (
    "import json, sys; told = json.loads(sys.stdin.buffer.readline()); sys.path[:] = told.pop('path'); "
    "from jupyter_distrib.pools.trial import main; main(**told)"
)
VERSIONS = b"""
import sys
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    torch = ""
print("\\0:trial %s %s:" % (".".join(map(str, sys.version_info[:3])), torch))
"""
"""The program that prints the versions of Python and torch; it runs on any Python, so that a Python that is too old
is recognized."""


class Trial:
    """A trial in progress.

    Args:
        kind: The kind of pool.
        options: Its options, by `Option.name`.
        on_result: Called once, in a thread, with whether the pool was reached and a sentence; not after `end`.
    """

    def __init__(self, kind: str, options: Mapping[str, str], on_result: Callable[[bool, str], object]) -> None:
        self._on_result, self._is_over = on_result, threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        path = [os.path.abspath(each) for each in import_path.folders()]
        asked = json.dumps({"path": path, "kind": kind, "options": dict(options)})
        threading.Thread(target=self._follow, args=(asked,), name="jupyter_distrib-trial", daemon=True).start()

    def end(self) -> None:
        """End the trial and all that it has started, without a result; from any thread."""
        self._is_over.set()
        self._kill()

    def _follow(self, asked: str) -> None:
        late = threading.Timer(LIMIT_S, self._kill)
        late.daemon = True
        late.start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as given, process.stdout as heard:
            with suppress(BrokenPipeError):
                given.write(asked.encode() + b"\n")
                given.flush()
            line = heard.readline()
        is_late = not late.is_alive()
        late.cancel()
        self._kill()
        process.wait()
        if self._is_over.is_set():
            return
        self._is_over.set()
        with suppress(ValueError):
            result = json.loads(line)
            self._on_result(bool(result["ok"]), str(result["text"])[:LONGEST])
            return
        self._on_result(
            False, f"No answer came within {LIMIT_S:g} s." if is_late else "The test ended without a result."
        )

    def _kill(self) -> None:
        """Kill the process's group, which exists at least until the process is waited for."""
        with suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)


def main(kind: str, options: Mapping[str, str]) -> None:
    """Try a pool out, print the result as JSON, and wait for the end of the input."""
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the pool itself is not a result
    threading.Thread(target=_end_with_the_kernel, daemon=True).start()
    ok, text = try_out(kind, options)
    result.write(json.dumps({"ok": ok, "text": text}) + "\n")
    result.close()


def try_out(kind: str, options: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the parts of the pool were reached, and a sentence on them."""
    try:
        pool = open_pool(kind, options)
        found = getattr(pool, "try_out", None)
        if found is None:
            raise PoolError(f"pools of the kind {kind} cannot be tested: start ranks on it instead.")
        return True, str(found())
    except DistributedError as error:
        return False, str(error)
    except Exception as error:  # noqa: BLE001 - also of pools of other packages
        return False, f"The test failed with {type(error).__name__}: {error}"


def versions(heard: bytes) -> tuple[str, str] | None:
    """Return the versions of Python and torch from the output of `VERSIONS`, which may contain banners; None if it
    has no versions. Without torch, its version is empty."""
    match = re.search(rb"\0:trial (\d+\.\d+\.\d+) ([^\s:]*):", heard)
    return (match[1].decode(), match[2].decode()) if match else None


def _end_with_the_kernel() -> None:
    while os.read(0, 1 << 10):
        pass
    os.killpg(0, signal.SIGKILL)
