"""The facts about Accelerate. It takes one set of arguments and one process group per program, and requires a restart
for others. On ranks without an accelerator it needs a variable that says so, which only some of its classes read."""

from __future__ import annotations

import functools
from typing import Any

from jupyter_distrib.libraries.library import Library


def _find_cpu_ranks(module: Any) -> None:
    """Have a `PartialState` read the variable, as `Accelerator` does (1.15). Otherwise it counts one process, and so do
    later accelerators."""
    cls = module.PartialState
    original = cls.__init__

    @functools.wraps(original)
    def initialize(self: Any, cpu: bool = False, **keywords: Any) -> None:
        original(self, cpu or module.parse_flag_from_env("ACCELERATE_USE_CPU"), **keywords)

    cls.__init__ = initialize


ACCELERATE = Library(
    modules=("accelerate",),
    extra="accelerate",
    cpu_environment={"ACCELERATE_USE_CPU": "true"},
    instead_of_launching="with Accelerate call the training function instead of notebook_launcher()",
    divides_data=True,
    shared_states={"accelerate.state": ("GradientState", "AcceleratorState", "PartialState")},
    prepares_loaders="accelerate.state:AcceleratorState",
    mend={"accelerate.state": _find_cpu_ranks},
)
