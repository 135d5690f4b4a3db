"""Notifies the user of the end of a run through a command or a webhook. In threads of the kernel, and for detached
runs of the agent or coordinator, which outlive it; standard library only.

A command gets the news as JSON on its standard input, and the most important parts as variables; a webhook gets the
JSON by POST, with a sentence as `text`, which chat programs show.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field
from typing import Any
from urllib.parse import urlsplit

from jupyter_distrib.system import paths
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import duration

TIMEOUT_S = 30.0
"""Maximum seconds for a command, and for the answer of a webhook."""
MOST_METRICS = 50
SENTENCE_METRICS = 4
ERROR_CHARACTERS = 500
SCHEMES = ("http", "https")


@data_class
class Notification:
    """The news of one run that has ended."""

    run: str
    label: str
    notebook: str
    """Path of the notebook; empty if it is not known."""
    state: str
    """The way in which it ended: `done`, `failed`, `lost`, `interrupted` or `refused`."""
    began_at_s: float
    elapsed_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric, on the first rank that reported it."""
    error: str = ""
    """The first failure in one line, without secrets."""

    @property
    def text(self) -> str:
        """A sentence on the run."""
        where = f" of {os.path.basename(self.notebook)}" if self.notebook else ""
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in list(self.metrics.items())[:SENTENCE_METRICS])
        parts = [f"{self.label}{where}: {self.state} after {duration(self.elapsed_s)}", metrics, self.error]
        return "; ".join(filter(None, parts))

    def as_values(self) -> dict[str, Any]:
        """Return the news as JSON values."""
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in [*self.metrics.items()][:MOST_METRICS]
        }
        return {
            "text": self.text,
            "run": self.run,
            "label": self.label,
            "notebook": self.notebook,
            "host": socket.gethostname(),
            "state": self.state,
            "began_at_s": self.began_at_s,
            "elapsed_s": round(self.elapsed_s, 3),
            "metrics": metrics,
            "error": self.error[:ERROR_CHARACTERS],
        }


def is_address(target: str) -> bool:
    """Return whether a target is a webhook, not a command."""
    return urlsplit(target).scheme.lower() in SCHEMES and "://" in target


def send_later(target: str, news: Notification, say: Callable[[str], object] | None = None) -> threading.Thread:
    """Notify of a run in a thread, which is returned; `say` is called with a sentence if that fails."""

    def work() -> None:
        problem = send(target, news)
        if problem and say is not None:
            say(f"The notification of the end of this run (`notify`) failed: {problem}")

    thread = threading.Thread(target=work, name="jupyter_distrib-notify", daemon=True)
    thread.start()
    return thread


def send(target: str, news: Notification) -> str:
    """Notify of a run. Return the reason why that failed, without the address of the webhook, which may be a secret;
    else an empty text."""
    content = json.dumps(news.as_values()).encode()
    return _post(target, content) if is_address(target) else _execute(target, content, news)


def _post(address: str, content: bytes) -> str:
    import http.client  # most users have no webhook
    import urllib.error
    import urllib.request

    host = urlsplit(address).hostname or "the webhook"
    headers = {"Content-Type": "application/json", "User-Agent": "jupyter_distrib"}
    try:
        request = urllib.request.Request(address, data=content, headers=headers, method="POST")  # noqa: S310 - `is_address`
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - likewise
            answer.read(1)
    except urllib.error.HTTPError as error:
        return f"{host} has answered {error.code}."
    except urllib.error.URLError as error:
        return f"{host} cannot be reached ({getattr(error.reason, 'strerror', None) or type(error.reason).__name__})."
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{host} cannot be reached ({type(error).__name__})."
    return ""


def _execute(command: str, content: bytes, news: Notification) -> str:
    variables = {"RUN": news.run, "LABEL": news.label, "STATE": news.state, "TEXT": news.text, "ERROR": news.error}
    environment = {f"JUPYTER_DISTRIB_{name}": value.replace("\0", "") for name, value in variables.items()}
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=paths.home() if os.path.isdir(paths.home()) else "/",
            env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"the command cannot be started ({error.strerror})."
    try:
        _, errors = process.communicate(content, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"the command was killed, since it did not end within {TIMEOUT_S:g} s."
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    last = f": {lines[-1][:ERROR_CHARACTERS]}" if lines else ""
    return f"the command has exited with {process.returncode}{last}." if process.returncode else ""
