"""The extension that runs notebook cells on every rank of a warm pool under torch.distributed:
`%load_ext jupyter_distrib`, then `%%distributed`.

Importing this package loads neither torch nor IPython.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""A constant that type checkers take for True. Importing `typing` itself takes longer than everything that an agent
needs."""
if TYPE_CHECKING:
    from typing import Any

    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_distrib import runtime
    from jupyter_distrib.checkpoints import load, resume, save
    from jupyter_distrib.errors import DistributedError
    from jupyter_distrib.gpu_types import GPUType
    from jupyter_distrib.kernel.notebook.decorator import DistributedFunction, distributed
    from jupyter_distrib.kernel.notebook.script import run_script
    from jupyter_distrib.kernel.session.runs.results import RankValue, Results
    from jupyter_distrib.kernel.session.runs.run import Run
    from jupyter_distrib.kernel.session.session import runs
    from jupyter_distrib.worker.api import prepare, total
    from jupyter_distrib.worker.output.reporting import progress, report

__version__ = "0.1.0"
__all__ = [
    "DistributedError",
    "DistributedFunction",
    "GPUType",
    "RankValue",
    "Results",
    "Run",
    "__version__",
    "distributed",
    "load",
    "prepare",
    "progress",
    "report",
    "resume",
    "run_script",
    "runs",
    "runtime",
    "save",
    "total",
]

_HOMES = {
    "DistributedError": "errors",
    "DistributedFunction": "kernel.notebook.decorator",
    "GPUType": "gpu_types",
    "RankValue": "kernel.session.runs.results",
    "Results": "kernel.session.runs.results",
    "Run": "kernel.session.runs.run",
    "distributed": "kernel.notebook.decorator",
    "load": "checkpoints",
    "prepare": "worker.api",
    "progress": "worker.output.reporting",
    "report": "worker.output.reporting",
    "resume": "checkpoints",
    "run_script": "kernel.notebook.script",
    "runs": "kernel.session.session",
    "save": "checkpoints",
    "total": "worker.api",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use."""
    if name not in _HOMES and name != "runtime":
        raise AttributeError(f"module 'jupyter_distrib' has no attribute {name!r}")
    import importlib

    if name == "runtime":
        return importlib.import_module("jupyter_distrib.runtime")

    from jupyter_distrib.system import interrupts

    with interrupts.WholeImports():  # some of them import torch
        return getattr(importlib.import_module(f"jupyter_distrib.{_HOMES[name]}"), name)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Load the extension; called by `%load_ext jupyter_distrib`.

    Raises:
        PoolError: The installed torch is too old.
    """
    from jupyter_distrib.system import interrupts, process_environment

    with interrupts.WholeImports():
        from jupyter_distrib.errors import PoolError
        from jupyter_distrib.wire import versions

        if refusal := versions.too_old(process_environment.version("torch")):
            raise PoolError(refusal)
        from jupyter_distrib.kernel.session import session

        session.current().pools.connections.warm_up()  # the pool starts while the rest is imported

        from jupyter_distrib.kernel.notebook import extension

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unload the extension; called by `%unload_ext jupyter_distrib`."""
    from jupyter_distrib.kernel.notebook import extension

    extension.unload(shell)
