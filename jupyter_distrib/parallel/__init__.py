"""Helpers for cells that distribute a model over the ranks themselves, along a dimension of `mesh` (`--strategy tp
--mesh pp=2,data=2`): torch's pipeline schedules, its context parallelism, and experts. Ranks only."""

from __future__ import annotations

from jupyter_distrib.parallel.context import context_parallel
from jupyter_distrib.parallel.experts import Experts, average_expert_gradients
from jupyter_distrib.parallel.gradients import average_gradients
from jupyter_distrib.parallel.pipeline import Pipeline

__all__ = ["Experts", "Pipeline", "average_expert_gradients", "average_gradients", "context_parallel"]
