"""Environment variables that GPU libraries read once in a process and that the notebook has set after it reached its
pool: they are not in force on ranks that are up. Kernel side.
"""

from __future__ import annotations

from jupyter_distrib.system import process_environment
from jupyter_distrib.system.load_time import GPU_LOAD_TIME, SET_BY_LIBRARIES


class GpuVariables:
    """The variables of GPU libraries as they were when a connection was made."""

    def __init__(self) -> None:
        self._at_first = _now()

    def changed(self) -> dict[str, str]:
        """Return the variables with a new value; a deleted one is left out: it cannot be removed from ranks."""
        return {name: value for name, value in _now().items() if self._at_first.get(name) != value}


def not_in_force(changed: dict[str, str], in_force: dict[str, str]) -> str:
    """Return a sentence on the changed variables that are not in force on the ranks; empty if all of them are."""
    missing = sorted(name for name, value in changed.items() if in_force.get(name) != value)
    if not missing:
        return ""
    return (
        f"{', '.join(missing)}: set after these ranks were started, and not in force on them, since they keep values; "
        "--fresh takes new ones"
    )


def _now() -> dict[str, str]:
    return {
        name: value
        for name, value in process_environment.variables().items()
        if name.startswith(GPU_LOAD_TIME) and name not in SET_BY_LIBRARIES
    }
