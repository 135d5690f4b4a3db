"""The kernel's knowledge of a pool's GPUs and of the variables of GPU libraries. Kernel side."""

from __future__ import annotations

from jupyter_distrib.system import process_environment
from jupyter_distrib.system.process_environment import GPU_LOAD_TIME, SET_BY_LIBRARIES
from jupyter_distrib.wire import messages as m


class GpuVisibility:
    """The kernel's knowledge of a pool's GPUs."""

    def __init__(self) -> None:
        self.devices: tuple[str, ...] | None = None
        """The kernel's CUDA_VISIBLE_DEVICES, split; None if the variable is unset."""
        self.exist: bool | None = None
        """Whether ranks can have GPUs; None until ranks that see these devices have started."""

        self.broken = False
        """Whether there are GPUs that cannot be used; a cell that asks for a number of GPUs gets the reason."""

    def learn(self, event: m.WorkerGroupOpened) -> None:
        """Record whether the pool has GPUs from the event that its ranks have started; unknown for some CPU ranks."""
        if event.gpus or event.node_has_gpus is not None:
            self.exist, self.broken = event.gpus or event.node_has_gpus, bool(event.gpu_problem)

    def update(self, devices: tuple[str, ...] | None) -> None:
        """Record the kernel's present CUDA_VISIBLE_DEVICES, which have changed."""
        self.devices, self.exist = devices, None


class GpuVariables:
    """The variables that GPU libraries read only once in a process, as they were when a connection was made. Variables
    that the notebook sets later are not in force on ranks that have started."""

    def __init__(self) -> None:
        self._at_first = _now()

    def changed(self) -> dict[str, str]:
        """Return the variables with a new value; deleted ones are left out, since they cannot be removed from ranks."""
        return {name: value for name, value in _now().items() if self._at_first.get(name) != value}


def not_in_force(changed: dict[str, str], in_force: dict[str, str]) -> str:
    """Return a sentence on the changed variables that are not in force on the ranks; empty if all of them are."""
    missing = sorted(name for name, value in changed.items() if in_force.get(name) != value)
    if not missing:
        return ""
    return (
        f"{', '.join(missing)}: set after these ranks were started, and not in force on them, since they keep values; "
        "--fresh starts new ranks"
    )


def _now() -> dict[str, str]:
    return {
        name: value
        for name, value in process_environment.variables().items()
        if name.startswith(GPU_LOAD_TIME) and name not in SET_BY_LIBRARIES
    }
