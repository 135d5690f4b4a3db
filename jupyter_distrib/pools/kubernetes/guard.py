"""Deletes the object of a worker group, whoever is killed: a process of its own waits for the end of the coordinator.

    coordinator --pipe--> sh, which reads until the pipe ends, then runs `kubectl delete` until it succeeds

The name of an object that may exist is in a file until it is certain that nobody has it. The guard holds a lock on the
file; where it is not locked, all these processes were killed, and the next coordinator on this machine deletes the
object. Blocks, in the thread of `acquire` or in one of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
from jupyter_distrib.system import paths, record_file

ENDING_S = 5.0
"""Seconds for which `release` waits; the guard goes on by itself."""
LARGEST_BYTES = 10_000
_NAME = re.compile(r"jd-[a-z0-9-]{1,60}")
_RESOURCE = re.compile(r"[a-z][a-z0-9.]{1,60}")
_NAMESPACE = re.compile(r"([a-z0-9][a-z0-9.-]{0,252})?")
# Pauses of 1, 2, 4 ... 30 s, for about two hours, unless the file is removed. A request that was not answered may
# arrive late: a minute covers it.
_SCRIPT = """
said= file=$1 tries=0 pause=1
shift
while read -r line; do said=$line; done
[ "$said" = refused ] || until "$@"; do
    tries=$((tries + 1))
    [ $tries -lt 250 ] && [ -e "$file" ] || exit 1
    sleep $pause
    [ $pause -ge 30 ] || pause=$((pause * 2))
done
if [ -z "$said" ]; then
    for more in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5; "$@"; done
fi
rm -f "$file"
"""


class Guard:
    """The guard of one object, from just before it is created."""

    def __init__(self, kubectl: Kubectl, resource: str, name: str) -> None:
        path = _folder() / secrets.token_hex(8)
        with paths.opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write("".join(f"{line}\n" for line in (key(kubectl), kubectl.namespace, resource, name)).encode())
            file.flush()
            command = [
                "sh",
                "-c",
                _SCRIPT,
                "sh",
                str(path),
                *kubectl.words(*deletes(resource, name), "--request-timeout=15s"),
            ]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[file.fileno()],  # the guard holds the lock as well
                start_new_session=True,
            )

    def send_outcome(self, word: str) -> None:
        """Tell the guard the outcome of the request: `created` or `refused`; nothing if it was not answered."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def release(self) -> None:
        """Have the object deleted; return when it is, or soon."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)


def deletes(resource: str, name: str) -> Sequence[str]:
    """Return the words that delete an object with its pods, and succeed if there is none."""
    return (
        "delete",
        resource,
        name,
        "--cascade=background",
        "--wait=false",
        "--ignore-not-found",
    )


def key(kubectl: Kubectl) -> str:
    """Return a line that identifies a cluster."""
    return json.dumps([kubectl.program, kubectl.context, os.environ.get("KUBECONFIG", "")])


def delete_left(kubectl: Kubectl) -> None:
    """Delete the objects of coordinators that were killed with their guards, as far as the cluster answers."""
    for path in _folder().iterdir():
        with suppress(OSError, PoolError), record_file.opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = file.read(LARGEST_BYTES).decode("utf-8", "replace").split("\n")
            if len(lines) == 5 and lines[0] == key(kubectl) and _are_names(*lines[1:4]):
                kubectl.of_namespace(lines[1]).output(*deletes(lines[2], lines[3]))
                path.unlink()


def _are_names(namespace: str, resource: str, name: str) -> bool:
    """Return whether these name one of our objects, so that nothing else is deleted."""
    return all(
        pattern.fullmatch(text) for pattern, text in ((_NAMESPACE, namespace), (_RESOURCE, resource), (_NAME, name))
    )


def _folder() -> Path:
    folder = paths.runtime_directory() / "kubernetes-jobs"
    paths.clear(folder, stat.S_IFDIR)
    return paths.private(folder)
