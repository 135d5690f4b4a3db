"""The identity of this kernel for agents, coordinators and other notebooks, and the check of its versions against
theirs. Kernel side."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from dataclasses import field

from jupyter_distrib.system import confinement, process_environment
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire import versions


@data_class
class KernelIdentity:
    """The identity of one use of the extension by one kernel."""

    name: str = field(default_factory=lambda: secrets.token_hex(3))
    """A random name that begins the ids of its runs and worker groups."""
    pid: int = field(default_factory=os.getpid)

    @property
    def notebook(self) -> str:
        """The notebook's path; empty if the front end does not give it: Jupyter does so in the environment, VS Code in
        a variable of the notebook."""
        return os.environ.get("JPY_SESSION_NAME") or str(getattr(sys.modules["__main__"], "__vsc_ipynb_file__", ""))

    @property
    def label(self) -> str:
        """The name of this kernel in other notebooks."""
        notebook = os.path.basename(self.notebook)
        return f"{notebook} (kernel {self.pid})" if notebook else f"kernel {self.pid}"

    def hello(self) -> m.Hello:
        """Return the first message on every link."""
        return m.Hello(
            protocol=m.PROTOCOL,
            session=self.name,
            pid=self.pid,
            label=self.label,
            notebook=self.notebook,
            python=platform.python_version(),
            torch=process_environment.version("torch"),
            cloudpickle=process_environment.version("cloudpickle"),
            pid_namespace=confinement.pid_namespace(),
        )


class VersionCheck:
    """The outcome of comparing the kernel's Python and torch with those of the ranks."""

    def __init__(self, hello: m.Hello, pool: str) -> None:
        self.refusal = ""
        """The reason why kernel and ranks must not exchange values; set before any worker group opens."""
        self.remark = ""
        """A sentence on harmless differences."""
        self._hello, self._pool = hello, pool

    def compare(self, welcomed: m.Welcomed) -> None:
        self.refusal = versions.refusal(self._hello, welcomed, self._pool)
        self.remark = versions.remark(self._hello, welcomed)
