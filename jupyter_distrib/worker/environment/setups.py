"""Runs the set-ups of the notebook (`%%distributed_setup`) on a rank, each once, before the first cell that comes with
it. Rank's main thread.

A set-up runs again when it has changed, and when a local module that it uses was imported again because its file has
changed: what it had done to that module is gone.
"""

from __future__ import annotations

import ast
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jupyter_distrib.cells import cell
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.serialization import definitions, payload
from jupyter_distrib.system import file_owner
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.environment import rank_environment

_SLOW_S = 1.0
"""Seconds after which the view says that a set-up is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    digest: str
    module: types.ModuleType
    """The module as whose body the set-up ran, which its functions need."""
    uses: dict[str, types.ModuleType]
    """The local modules that it uses, by name."""

    def holds(self, digest: str) -> bool:
        return self.digest == digest and all(sys.modules.get(name) is each for name, each in self.uses.items())


class Setups:
    """The set-ups that this rank has run.

    Args:
        device: The device of this rank.
        say: Called, in another thread, with a sentence on a set-up that takes long.
    """

    def __init__(self, device: str, say: Callable[[str, str], object]) -> None:
        self._device, self._say = device, say
        self._done: dict[str, _Done] = {}

    def missing(self, command: m.Execute) -> list[m.Setup]:
        """Return the set-ups that have to run before the cell."""
        done = self._done
        return [each for each in command.setups if each.name not in done or not done[each.name].holds(each.digest)]

    def run(self, setup: m.Setup, run: str) -> None:
        """Run a set-up. An exception gets a note with the set-up's name, and the set-up counts as not run."""
        if (before := self._done.pop(setup.name, None)) is not None:
            definitions.forget_shared(before.digest)
        module = cell.fresh_module()
        cell.become_main(module)
        slow = threading.Timer(_SLOW_S, self._say, [run, f"runs the set-up {setup.name}"])
        slow.daemon = True
        slow.start()
        problem = ""
        try:
            self._execute(setup, module)
        except SystemExit as left:
            problem = f"The set-up {setup.name} called sys.exit({left.code!r}), so the cell was not run on this rank."
        except Exception as error:
            error.add_note(
                f"in the set-up {setup.name}, which each rank runs before its first cell; "
                "the cell was not run on this rank"
            )
            raise
        finally:
            slow.cancel()
        if problem:
            raise DistributedError(problem)
        definitions.share(setup.defines, module.__dict__, setup.digest, sent=False)
        uses = {name: sys.modules[name] for name in _modules(setup.cell.source, module) if name in sys.modules}
        local = {name: each for name, each in uses.items() if file_owner.is_users(getattr(each, "__file__", "") or "<")}
        self._done[setup.name] = _Done(digest=setup.digest, module=module, uses=local)

    def _execute(self, setup: m.Setup, module: types.ModuleType) -> None:
        namespace = module.__dict__
        namespace |= rank_environment.provided(namespace)
        cell.add_sources(setup.cell)
        data, buffers = payload.from_parcel(setup.inputs, None)
        payload.unpack_inputs(data, buffers, namespace, device=self._device)
        cell.execute(setup.cell, namespace)


def _modules(source: str, module: types.ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a set-up imports, or has objects of."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(home := getattr(type(value), "__module__", None), str):
            yield home
