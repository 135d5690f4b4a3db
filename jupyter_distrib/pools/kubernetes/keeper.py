"""The programs that keep a pod, and that end it when nobody uses it. Pure.

    pod's own command   `KEEPER`: process 1; reaps, and ends with status 0 when no command of kubectl has run in the pod
                        for a while: then the Job is complete, and its GPUs are free, whoever is left to delete it
    kubectl exec        `COMPANY`: while other pods of the Job start, so that this pod does not count as unused
    kubectl exec        the relay (`pools/command/piped_relay.py`)

Each ends when it hears nothing for twelve seconds, so that a connection that has silently gone does not keep it.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_S = 45
"""Seconds in which the first command has to come."""
ALONE_S = 20
"""Seconds without a command afterwards. A relay whose connection is broken waits for another one before it ends."""
SILENT_S = 12
ALIVE_S = 1.0
"""Seconds between the signs of life that `COMPANY` waits for."""

# A process that was brought in from outside has no parent in the pod. For any Python 3.
_KEEPER = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
def has_company():
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open("/proc/%s/stat" % name, errors="replace") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if parent == "0" and state not in "ZX":
                return True
    return False
limit, since = @FIRST@, time.monotonic()
while time.monotonic() - since < limit:
    time.sleep(1)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    if has_company():
        limit, since = @ALONE@, time.monotonic()
"""
_COMPANY = """
import os, select
while select.select([0], [], [], @SILENT@)[0] and os.read(0, 4096):
    pass
"""


def keeper(python: str) -> list[str]:
    """Return the command of a pod's container."""
    program = _KEEPER.replace("@FIRST@", str(FIRST_S)).replace("@ALONE@", str(ALONE_S))
    return [python, "-I", "-S", "-c", program.strip()]


def company(python: str) -> Sequence[str]:
    """Return the words for a pod that waits for others."""
    return (python, "-I", "-S", "-c", _COMPANY.strip().replace("@SILENT@", str(SILENT_S)))
