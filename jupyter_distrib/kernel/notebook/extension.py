"""Loads the extension into a shell and takes it out again: `%load_ext jupyter_distrib`, `%unload_ext jupyter_distrib`.
Runs in the kernel's main thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import stand_ins
from jupyter_distrib.kernel.notebook import comment_syntax
from jupyter_distrib.kernel.notebook.line_magics import LineMagics
from jupyter_distrib.kernel.notebook.magic import CellMagics
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs import prompts
from jupyter_distrib.kernel.sidebar import bridge, cell_outputs

_OURS = ("distributed", "distrib")
_replaced: dict[str, Callable[..., Any]] = {}


def load(shell: InteractiveShell) -> None:
    """Load the extension (`%load_ext jupyter_distrib`); a second time changes nothing."""
    registry = shell.magics_manager.magics["cell"]
    for name in _OURS:
        other = registry.get(name)
        if other is not None and not isinstance(getattr(other, "__self__", None), CellMagics):
            _replaced[name] = other
            print(f"%%{name} was {_home(other)}'s; it is jupyter_distrib's until %unload_ext jupyter_distrib.")
    shell.register_magics(CellMagics, LineMagics)
    from jupyter_distrib.kernel.notebook import completion

    completion.install(shell)
    bridge.install(shell)
    comment_syntax.install(shell)
    shell.events.register("post_run_cell", _pass_on)
    prompts.front_end = partial(cell_outputs.missing_prompt, shell)
    with suppress(DistributedError):  # a settings file that is wrong: the first cell will say so
        stand_ins.enable(session.current().settings.compat)


def _pass_on(_: object) -> None:
    """Free the values on the ranks whose handles a cell of the notebook has dropped, when the cell ends."""
    session.current().pass_on()


def _home(magic: Callable[..., Any]) -> str:
    """Return the package that a magic comes from, by its `__module__`."""
    module = getattr(magic, "__module__", None) or type(magic).__module__
    return "this notebook" if module == "__main__" else module.partition(".")[0]


def unload(shell: InteractiveShell) -> None:
    """Unload the extension (`%unload_ext jupyter_distrib`): end the ranks, and restore the magics that it replaced."""
    from jupyter_distrib.kernel.notebook import completion

    bridge.remove()
    prompts.front_end = prompts.terminal
    completion.remove(shell)
    comment_syntax.remove(shell)
    shell.events.unregister("post_run_cell", _pass_on)
    for kind, names in {"cell": _OURS, "line": tuple(LineMagics.magics["line"])}.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.magics["cell"].update(_replaced)
    _replaced.clear()
    session.close()
