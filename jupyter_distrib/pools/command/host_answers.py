"""Asks the Python on each host of a pool for its version and that of torch. Runs in the process of a trial."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command import bootstrap
from jupyter_distrib.pools.trial import VERSIONS, versions
from jupyter_distrib.system import process

ANSWER_S = 30.0
_AT_ONCE = 16
WORDS = ("-I", "-")
"""Arguments of the interpreter that reads the program from its input: the words mean the same with and without a
shell."""


class Reached(Protocol):
    """The pool whose hosts are asked, as far as it is used here."""

    given: dict[str, str]

    def command(self, host: str, python: Sequence[str]) -> list[str]:
        """Return the command that runs the words `python` on a host."""

    def failure(self, host: str, status: int | None, said: str) -> str:
        """Return a sentence on a command that did not start a Python."""


def try_out(pool: Reached, hosts: Sequence[str]) -> str:
    """Return a sentence on all hosts. Raises `PoolError` if one of them has no Python with torch."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        asked = [threads.submit(_answer, pool, host) for host in hosts]
    errors = [str(error) for each in asked if (error := each.exception()) is not None]
    if errors:
        others = f"{len(hosts) - len(errors)} of {len(hosts)} hosts can be used: " if len(hosts) > 1 else ""
        raise PoolError(others + errors[0])
    found = {each.result() for each in asked}
    if len(hosts) == 1:
        return f"{hosts[0]} answers, with {found.pop()}."
    if len(found) == 1:
        return f"All {len(hosts)} hosts answer, with {found.pop()}."
    each = ", ".join(f"{host} with {answer.result()}" for host, answer in zip(hosts, asked, strict=True))
    return f"All {len(hosts)} hosts answer, with different versions: {each}."


def _answer(pool: Reached, host: str) -> str:
    """Return the versions on one host, in words. Raises `PoolError`."""
    python = pool.given["python"]
    words = pool.command(host, (python, *WORDS))
    try:
        done = subprocess.run(words, input=VERSIONS, capture_output=True, timeout=ANSWER_S, check=False)
        status, said, heard = done.returncode, done.stderr, done.stdout
    except subprocess.TimeoutExpired as late:
        status, said, heard = None, late.stderr or b"", b""
    except OSError as error:
        why = process.why_not_started(words[0], error)
        raise PoolError(f"{words[0]} cannot be started ({why}): install it, or correct the command.") from None
    found = versions(heard)
    if found is None:
        text = said.decode("utf-8", "replace") + heard.decode("utf-8", "replace")
        raise PoolError(_one_sentence(pool.failure(host, status, text)))
    version, torch = found
    if tuple(int(part) for part in version.split(".")[:2]) < bootstrap.OLDEST:
        oldest = ".".join(map(str, bootstrap.OLDEST))
        raise PoolError(
            f"host {host} has Python {version} at {python}: set python to a Python {oldest} or newer there."
        )
    if not torch:
        raise PoolError(f"{python} on host {host} has no torch: set python to an interpreter with torch there.")
    return f"Python {version} and torch {torch}"


def _one_sentence(text: str) -> str:
    return re.sub(r"\s+", " ", text)
