"""A cloud with one machine: a namespace of processes, which ends with its first one. Needs root.

Files in its folder make it fail: `hang` (up never ends), `full` (up fails), `nameless` (no hosts are printed), `stuck`
(down fails), `away` (nobody gets in)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

_SCRIPTS = {
    "up": """
echo up >>calls
echo "creating box"
if [ -e hang ]; then sleep 1000; fi
if [ -e full ]; then echo "no capacity in zone b" >&2; exit 3; fi
setsid unshare --pid --fork --mount-proc --kill-child sh -c 'while :; do sleep 100; done' </dev/null >/dev/null 2>&1 &
echo $! >box.new
until pgrep -P $! >/dev/null; do sleep 0.02; done
mv box.new box
echo "box is ready"
""",
    "down": """
echo down >>calls
if [ -e stuck ]; then echo "the API is away" >&2; exit 4; fi
[ ! -e box ] || { kill -KILL $(cat box); rm box; }
""",
    "status": "echo status >>calls\n[ -e box ] && kill -0 $(cat box)\n",
    "hosts": "echo hosts >>calls\n[ -e nameless ] || echo box\n",
    "reach": """
shift
[ ! -e away ] || { echo "box does not answer" >&2; exit 255; }
[ -e box ] || { echo "there is no box" >&2; exit 255; }
inside=$(pgrep -P $(cat box)) || { echo "box is no more" >&2; exit 255; }
exec nsenter --target $inside --pid --mount -- "$@"
""",
}


@cache
def forbidden() -> str:
    """Why there can be no such machine; empty if there can."""
    if sys.platform != "linux" or os.getuid():
        return "needs root on Linux"
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    return "namespaces of processes are forbidden here" if done.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(forbidden()), reason=forbidden() or "none")


class Cloud:
    """One cloud."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for name, text in _SCRIPTS.items():
            script = folder / f"{name}.sh"
            script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(folder))}\n{text.lstrip()}")
            script.chmod(0o755)

    def options(self, **more: str) -> dict[str, str]:
        """The options of a pool of kind `command`."""
        return {
            "start": f"{self.folder}/reach.sh {{host}} {{python}}",
            "python": sys.executable,
            "interface": "lo",
            "up": str(self.folder / "up.sh"),
            "down": str(self.folder / "down.sh"),
            "hosts_from": str(self.folder / "hosts.sh"),
            **more,
        }

    def settings(self, name: str = "rented", **more: str) -> str:
        """The same as a table of a settings file."""
        lines = [f'{key} = """{value}"""' for key, value in self.options(**more).items()]
        return "\n".join([f"[pools.{name}]", 'kind = "command"', *lines, ""])

    def calls(self, name: str = "") -> list[str]:
        """What was called, in order; of these only that of this name."""
        with suppress(FileNotFoundError):
            return [line for line in (self.folder / "calls").read_text().split() if name in ("", line)]
        return []

    def runs(self) -> bool:
        """Whether the machine runs, which costs."""
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int((self.folder / "box").read_text()), 0)
            return True
        return False

    def processes(self) -> list[int]:
        """Every command of it that runs, and every machine, also one that its files do not name."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (path / "cwd").readlink() == self.folder:
                    found.append(int(path.name))
        return found

    def fault(self, name: str, *, on: bool = True) -> None:
        (self.folder / name).touch() if on else (self.folder / name).unlink(missing_ok=True)

    def crash(self) -> None:
        """End the machine, without a word to anybody."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / "box").read_text()), signal.SIGKILL)
