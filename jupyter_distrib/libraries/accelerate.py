"""The facts about Accelerate. It takes one set of arguments and one process group for a program, and requires a restart
for others. On ranks without an accelerator it needs a variable that says so."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

ACCELERATE = Library(
    modules=("accelerate",),
    extra="accelerate",
    cpu_environment={"ACCELERATE_USE_CPU": "true"},
    instead_of_launching="with Accelerate call the training function instead of notebook_launcher()",
    divides_data=True,
    shared_states={"accelerate.state": ("GradientState", "AcceleratorState", "PartialState")},
)
