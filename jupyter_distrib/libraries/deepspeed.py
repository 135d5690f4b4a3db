"""The facts about DeepSpeed, which wraps models, divides data, and takes its accelerator from the environment."""

from __future__ import annotations

from jupyter_distrib.libraries.library import Library

DEEPSPEED = Library(
    modules=("deepspeed",), cpu_environment={"DS_ACCELERATOR": "cpu"}, divides_data=True, wraps_models=True
)
