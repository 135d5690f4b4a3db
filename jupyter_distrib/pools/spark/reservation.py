"""Reserves nodes of Ray in a Spark application, which lives as long as anyone uses or wants its nodes.

The reservation is the Ray pool's, the application is started by the first one and ended after the last one. The
coordinator ends with it, so that the next cell finds another coordinator with another application.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import ClassVar

from jupyter_distrib.coordinator.engine import ReservedNodes
from jupyter_distrib.coordinator.run import LOST_LOGS_S
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.ray import cluster
from jupyter_distrib.pools.ray.cluster import Address, Looked
from jupyter_distrib.pools.ray.reservation import RayCluster, RayReservation
from jupyter_distrib.pools.ray.serve import TELL_S, Serving
from jupyter_distrib.wire import messages as m

START_S = 600.0
"""Seconds to wait for Spark and Ray to start; both have their own limits with better messages."""
TRY_AGAIN_S = 60.0
"""Seconds for which the application is kept after ranks were refused, since the next cell may ask for others."""
LOOK_S = 0.5
END_S = 20.0
"""Seconds to wait for Ray and Spark to end."""
DIED = "the Spark application ended before Ray ran in it, without a reason: its log is {log}."


class SparkCluster(RayCluster):
    """The application of one coordinator, and Ray in it."""

    def __init__(self, application: Application, serving: Serving) -> None:
        super().__init__(serving.calls, serving.wanted, serving.joined, serving.archive)
        self._application, self._coordinator = application, serving.coordinator
        self._starting = False
        self._users = 0
        """Number of reservations that have or want nodes."""
        self._turn = 0
        """Number of reservations so far."""

    def reserve(self, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]) -> SparkReservation:
        """See `coordinator.engine.Reserve`; starts the application if it is not running."""
        self._users += 1
        self._turn += 1
        if not self._starting:
            self._starting = True
            threading.Thread(target=self._join, name="jupyter_distrib-join", daemon=True).start()
        return SparkReservation(self, command, hello, say)

    def wait_until_joined(self, say: Callable[[str], None]) -> Address:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                return self._joined.result(LOOK_S)
            except TimeoutError:
                say(self._application.said)
        raise TimeoutError(f"Spark and Ray did not start within {START_S:g} s.")

    def _join(self) -> None:
        """Start the application and join Ray in it; then wait for its end. In a thread of its own."""
        try:
            looking: Future[Looked] = Future()
            looking.set_result(cluster.find_cluster(self._application.start(), insecure=False))
            address = cluster.join(looking)
        except Exception as error:  # noqa: BLE001 - Ray's, or our own sentence
            # First, so that kernels that are refused ask another coordinator.
            self.calls.put(lambda: self._coordinator.give_up(TELL_S))
            self._joined.set_exception(error)
            return
        self._coordinator.title = f"Spark, with Ray at {address.shown}"
        self._joined.set_result(address)
        self._application.wait()
        if not self._application.ending:
            said = "the Spark application has ended, with everything in it: the next cell starts another one."
            self.calls.put(lambda: self._coordinator.lose(said, LOST_LOGS_S + TELL_S))

    def released(self, *, used: bool) -> None:
        """Record the end of a reservation; can be called in any thread."""
        self.calls.put(lambda: self._released(used=used))

    def _released(self, *, used: bool) -> None:
        self._users -= 1
        turn = self._turn

        def end() -> None:
            if not self._users and turn == self._turn:
                self._coordinator.give_up(TELL_S)

        stay_s = 0.0 if used else TRY_AGAIN_S
        if self._coordinator.server.keeps_records:  # these end with the coordinator
            stay_s = max(stay_s, self._coordinator.idle_s)
        self._coordinator.loop.later(stay_s, end)


class SparkReservation(RayReservation):
    """See `coordinator.engine.Reservation`."""

    engine = "Spark"
    left_out: ClassVar = ("SPARK_", "PYSPARK_", "PYTHON")
    """Variables that Spark sets for the Python of its executors."""

    def __init__(
        self, of: SparkCluster, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None]
    ) -> None:
        super().__init__(of, command, hello, say)
        self._of = of
        self._used = False

    def acquire(self, running: Mapping[str, str]) -> ReservedNodes:
        nodes = super().acquire(running)
        self._used = True
        return nodes

    def release(self, *, keep_agents: bool) -> None:
        super().release(keep_agents=keep_agents)
        self._of.released(used=self._used)


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
        """Sentence for the user on what it is doing."""
        self.ending = False

    def start(self) -> str:
        """Start it, and return Ray's address when it has one. Raises `PoolError`."""
        os.environ.update(variables(os.environ, sys.executable))
        os.environ.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", "jupyter_distrib.pools.spark.application"]
        with self._lock:
            if self.ending:
                raise PoolError("the request was cancelled before Spark started.")
            # A session of its own, so that a signal to the coordinator's session does not end Spark before Ray.
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
    """Return the environment variables that Ray and Spark need: Ray on Spark looks for `ray` on PATH, and makes no
    token."""
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
