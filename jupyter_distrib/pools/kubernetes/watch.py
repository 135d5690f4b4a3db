"""Watches the pods of one Job by `kubectl get --watch`, to know how a pod has ended even when it is gone.

One thread reads. When the server ends a watch, as it does after some time, another begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.kubernetes import words
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
from jupyter_distrib.system.launch import new_log

AGAIN_S = 1.0
LONGEST_AGAIN_S = 30.0


class Watch:
    """The pods that a selector of labels chooses, in their present or last state."""

    def __init__(self, kubectl: Kubectl, selector: str) -> None:
        self._kubectl, self._selector = kubectl, selector
        self._changed = threading.Condition()
        self._pods: dict[str, Any] = {}
        self._gone: dict[str, Any] = {}
        self._failure = ""
        self._changes = 0
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._follow, name="jupyter_distrib-pods", daemon=True)
        self._thread.start()

    def pods(self) -> list[Any]:
        """Return the pods that are there, by their numbers. Raises `PoolError` if they cannot be watched."""
        with self._changed:
            if self._failure:
                raise PoolError(self._failure)
            return sorted(self._pods.values(), key=words.index)

    def wait(self, seen: int, limit_s: float) -> int:
        """Wait until there are more changes than `seen`; return their number."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen or self._closed.is_set(), limit_s)
            return self._changes

    def end_of(self, limit_s: float) -> str:
        """Return how a pod has ended, as soon as that is known; empty if none has."""
        with self._changed:
            ended: Callable[[], str] = lambda: words.end_of([*self._gone.values(), *self._pods.values()])  # noqa: E731
            return self._changed.wait_for(ended, limit_s)

    def close(self) -> None:
        """Stop watching. Blocks for a moment."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # the user's own program may wrap kubectl
        self._thread.join()

    # ------------------------------------------------------------------------------------------ in its thread

    def _follow(self) -> None:
        pause_s = AGAIN_S
        while not self._closed.is_set():
            if self._read():
                pause_s = AGAIN_S
            self._closed.wait(pause_s)
            pause_s = min(LONGEST_AGAIN_S, pause_s * 2)

    def _read(self) -> bool:
        """Follow one watch until it ends; return whether it reported anything."""
        command = self._kubectl.words(
            "get", "pods", f"--selector={self._selector}", "--watch", "--output-watch-events", "--output=json"
        )
        heard = False
        with new_log() as log:
            with self._changed:
                if self._closed.is_set():
                    return False
                try:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
                    )
                except OSError:  # for now
                    return False
                self._process = process
            assert process.stdout is not None
            for event in _events(process.stdout):
                heard = True
                self._on_event(event)
            process.stdout.close()
            if process.wait() and not heard:
                log.seek(0)
                self._fail(log.read().decode("utf-8", "replace"))
        return heard

    def _on_event(self, event: dict[str, Any]) -> None:
        pod = event.get("object") or {}
        if pod.get("kind") != "Pod":
            return
        with self._changed:
            name = words.name(pod)
            if event.get("type") == "DELETED":
                pod["metadata"].setdefault("deletionTimestamp", "")
                self._pods.pop(name, None)
                self._gone[name] = pod
            else:
                self._pods[name] = pod
            self._failure = ""
            self._changes += 1
            self._changed.notify_all()

    def _fail(self, said: str) -> None:
        """Keep the reason why nothing can be watched; a server that is away may come back."""
        with self._changed:
            text = words.failure("get", said)
            self._failure = "" if text.startswith(words.AWAY) else text
            self._changes += 1
            self._changed.notify_all()


def _events(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events that kubectl writes: each in one line, or in several of which the last one is a bracket."""
    lines: list[bytes] = []
    for line in stream:
        lines.append(line)
        if line == b"}\n" or (line.endswith(b"}\n") and len(lines) == 1):
            with suppress(ValueError):
                yield json.loads(b"".join(lines))
            lines = []
