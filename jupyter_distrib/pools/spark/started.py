"""The Spark application of one coordinator, as the coordinator sees it: a process of its own
(`pools/spark/application.py`), started when the first ranks are asked for. Its methods are called in any thread."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

from jupyter_distrib.errors import PoolError

END_S = 20.0
"""Seconds in which Ray and Spark have to end."""
DIED = "the Spark application ended before Ray ran in it, without a reason: its log is {log}."


class Application:
    """One Spark application with Ray in it.

    Args:
        options: The pool's options, as texts.
        log: The path of the file with the output of Spark and Ray, for messages.
    """

    def __init__(self, options: Mapping[str, str], log: str) -> None:
        self._options, self._log = options, log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.said = "Spark starts an application for these ranks, which takes about a minute."
        """Sentence on what it is doing, for people."""
        self.ending = False

    def start(self) -> str:
        """Start it, and return Ray's address when it has one. Raises `PoolError`."""
        os.environ.update(variables(os.environ, sys.executable))
        os.environ.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", "jupyter_distrib.pools.spark.application"]
        with self._lock:
            if self.ending:
                raise PoolError("the ranks were given up before Spark was started.")
            # A session of its own, so that nothing that signals the coordinator's ends Spark before Ray.
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(dict(self._options)), file=process.stdin, flush=True)
        for line in process.stdout:
            match json.loads(line):
                case {"said": str(text)}:
                    self.said = text
                case {"refused": str(reason)}:
                    raise PoolError(reason)
                case {"address": str(address)}:
                    return address
        raise PoolError(DIED.format(log=self._log))

    def wait(self) -> None:
        """Wait until it has ended, for whatever reason."""
        assert self._process is not None
        self._process.wait()

    def end(self) -> None:
        """End Ray, then Spark, and wait for both."""
        with self._lock:
            self.ending, process = True, self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def variables(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the variables that Ray and Spark need, from those that there are: Ray on Spark looks for `ray` on PATH,
    and makes no token."""
    folder = os.path.dirname(python)
    return {
        "PATH": f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}",
        "PYSPARK_PYTHON": environment.get("PYSPARK_PYTHON", python),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": environment.get("RAY_USAGE_STATS_ENABLED", "0"),
    }
