"""The identity of this kernel for agents, coordinators and other notebooks. Kernel side; a value without state."""

from __future__ import annotations

import os
import platform
import secrets
import sys
from dataclasses import field

from jupyter_distrib.system import confinement, process_environment
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m


@data_class
class KernelIdentity:
    """The identity of one use of the extension by one kernel."""

    name: str = field(default_factory=lambda: secrets.token_hex(3))
    """A random name, with which the ids of runs and worker groups begin."""
    pid: int = field(default_factory=os.getpid)

    @property
    def notebook(self) -> str:
        """The notebook's path; empty if the front end does not give it."""
        return _notebook()

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


def _notebook() -> str:
    """Return the notebook's path if the front end gives it: Jupyter in the environment, VS Code as a variable of the
    notebook."""
    return os.environ.get("JPY_SESSION_NAME") or str(getattr(sys.modules["__main__"], "__vsc_ipynb_file__", ""))
