"""How much is measured, and of which package; and the notebook that most rows start from."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from driver import ROOT, Notebook

LOAD = "%load_ext jupyter_distrib"
_READY = """\
import time
import jupyter_distrib.kernel.session.session
_session = jupyter_distrib.kernel.session.session.current()
_connection = getattr(_session, "pools", _session).connect("local")
while "'forkserver ready'" not in repr(_connection.ask()):  # a dict in older versions
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asked for."""

    quick: bool = False
    package: Path = ROOT
    """Folder that `jupyter_distrib` is imported from."""

    def times(self, full: int, quick: int) -> range:
        return range(quick if self.quick else full)

    def notebook(self, **keywords: object) -> Notebook:
        """A fresh kernel, with no agent anywhere near."""
        return Notebook(package=self.package, **keywords)  # type: ignore[arg-type]

    def warm(
        self, line: str = "--ranks 2", body: str = "pass", runs: int = 3, env: dict[str, str] | None = None
    ) -> Notebook:
        """The same with warm ranks, once everything that is imported in the background has been."""
        notebook = self.notebook(env=env)
        try:
            notebook.good(LOAD)
            notebook.good(_READY)
            for _ in range(runs):
                notebook.good(f"%%distributed {line}\n{body}")
        except BaseException:
            notebook.close()
            raise
        return notebook


def fresh_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


_IMPORT_TORCH = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"


def import_torch_s() -> float:
    """One `import torch` in a fresh interpreter."""
    return float(fresh_python(_IMPORT_TORCH))


def imports_of_torch_s(count: int) -> float:
    """The slowest of some `import torch` side by side, as on hosts that share one machine."""
    command = [sys.executable, "-c", _IMPORT_TORCH]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return max(float(process.communicate()[0]) for process in running)
