"""Variables that the notebook has set after its pool was reached, and that libraries of a GPU read once in a process:
ranks that are up do not have them in force. Kernel side.
"""

from __future__ import annotations

from jupyter_distrib.pools.local import GPU_LOAD_TIME, SET_BY_LIBRARIES
from jupyter_distrib.system import process_environment


class GpuVariables:
    """The variables of one connection, as they were when it was made."""

    def __init__(self) -> None:
        self._at_first = _now()

    def changed(self) -> dict[str, str]:
        """Return those that have another value now; one that was deleted cannot be taken from a rank's environment."""
        return {name: value for name, value in _now().items() if self._at_first.get(name) != value}


def not_in_force(changed: dict[str, str], in_force: dict[str, str]) -> str:
    """Return a sentence on those that ranks, which have other ones in force, do not have; empty if there are none."""
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
