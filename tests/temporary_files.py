"""Looking at temporary files from tests: what this process and its children leave in a folder of their own, and what
hosts leave in /tmp."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from jupyter_distrib.system.process_environment import version

ALLOWED = {
    "torchelastic_*": "torchrun never removes the folder of its logs (torch/distributed/elastic/multiprocessing/api.py)",
    "torchinductor_*": "torch's cache of compiled code",
    "pymp-*": "multiprocessing removes it when a process exits, but a rank is killed when its kernel ends",
    "tmp*wandb-*": "so does wandb with the folders that it makes when it is imported",
    "__autograph_generated_file*": "so does TensorFlow with its generated code",
    "__pycache__": "Python's bytecode of that code",
    "wandb-*": "the folder of wandb's service, which ends by itself",
}
"""Names that others leave, with the reason."""
if version("torch").startswith(("2.9.", "2.10.")):
    ALLOWED["tmp????????"] = "torch's folder for remote modules, in a kernel that has imported it and is killed"


def use(folder: Path) -> None:
    """Have this process and its children make their temporary files in a folder of their own."""
    kept = tempfile.gettempdir()
    os.environ.setdefault("RAY_TMPDIR", kept)  # where a cluster is looked for
    folder.mkdir()
    for each in (folder.parent, folder):
        each.chmod(0o711)  # as /tmp: a test looks into it as another user
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def left() -> set[str]:
    """Names in this process's folder of temporary files that nobody is allowed to leave."""
    names = os.listdir(tempfile.gettempdir())
    return {name for name in names if not any(fnmatch(name, pattern) for pattern in ALLOWED)}


def of_hosts() -> set[Path]:
    """Folders of hosts behind a command, which are in /tmp whatever TMPDIR says: see `pools/command/bootstrap.py`."""
    return set(Path("/tmp").glob("jupyter_distrib-command-*"))


def deserted(before: Collection[Path]) -> list[Path]:
    """Folders of hosts that have come since, and that no process has on its command line. Those in which an agent was
    killed do not count: the next host removes them, see `coordinator/node_agent.py`."""
    new = [path for path in of_hosts() if path not in before and not os.path.lexists(path / "agent.sock")]
    lines = _command_lines() if new else ""
    return [path for path in new if str(path) not in lines]


def _command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)
