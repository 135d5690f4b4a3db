"""Runs the user's kubectl, with its logins, contexts and proxies. Blocks; any thread but the coordinator's loop."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.kubernetes import words
from jupyter_distrib.system import process

ANSWER_S = 20.0
LONGER_S = 3.0
"""Seconds for kubectl to end itself, with what a program of the user's around it has started."""
OLDEST = (1, 24)
"""The first version of Kubernetes in which Jobs with indexed pods are stable."""


class KubectlFailed(PoolError):
    """An error for a kubectl that has failed.

    Args:
        said: The text that it has written to its standard error.
    """

    def __init__(self, verb: str, said: str) -> None:
        super().__init__(words.failure(verb, said))
        self.said = said
        self.last = words.last(said)


class Kubectl:
    """The user's kubectl, for one context and namespace; `options` are the pool's."""

    def __init__(self, options: Mapping[str, str], namespace: str = "") -> None:
        self.program = shlex.split(options["kubectl"])
        self.namespace = options.get("namespace", namespace)
        self.context = options.get("context", "")

    def of_namespace(self, namespace: str) -> Kubectl:
        """Return the kubectl for another namespace; empty: that of the context."""
        context = {"context": self.context} if self.context else {}
        return Kubectl({"kubectl": shlex.join(self.program), **context}, namespace)

    def words(self, *more: str) -> list[str]:
        """Return the words of a command."""
        context = [f"--context={self.context}"] if self.context else []
        namespace = [f"--namespace={self.namespace}"] if self.namespace else []
        return [*self.program, *context, *namespace, *more]

    def output(self, *more: str, given: bytes = b"", limit_s: float = ANSWER_S) -> str:
        """Return the output of a command. Raises `KubectlFailed` or another `PoolError`."""
        try:
            done = subprocess.run(
                self.words(*more, f"--request-timeout={limit_s:g}s"),
                input=given,
                capture_output=True,
                timeout=limit_s + LONGER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PoolError(f"{words.AWAY} (kubectl {more[0]} took {limit_s:g} s): try again later.") from None
        except OSError as error:
            why = process.why_not_started(self.program[0], error)
            raise PoolError(f"{self.program[0]} cannot be started ({why}): install kubectl.") from None
        if done.returncode:
            raise KubectlFailed(more[0], done.stderr.decode("utf-8", "replace"))
        return done.stdout.decode("utf-8", "replace")

    def asked(self, *more: str, limit_s: float = ANSWER_S) -> Any:
        """Return the objects that `kubectl get` finds. Raises `PoolError`."""
        text = self.output("get", *more, "--output=json", limit_s=limit_s)
        try:
            return json.loads(text)
        except ValueError:
            raise PoolError(f"kubectl get does not write JSON ({text[:80]!r}): correct the option kubectl.") from None

    def check(self) -> None:
        """Raise `PoolError` if the program is not kubectl, or is too old."""
        text = self.output("version", "--client", "--output=json")
        found = re.search(r'"gitVersion": *"v(\d+)\.(\d+)', text)
        if found is None:
            raise PoolError(f"{shlex.join(self.program)} is not kubectl: correct the option kubectl.")
        if (int(found[1]), int(found[2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise PoolError(f"kubectl {found[1]}.{found[2]} is too old: install {oldest} or newer.")
