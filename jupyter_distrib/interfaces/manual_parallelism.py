"""Signs that a program handles parallelism itself: a wrapped model or divided data. Read in ranks from objects, and in
the kernel (`--explain`) from names in a cell's text; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP = "init_process_group"
WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
SHARDS = "fully_shard"
PLAN = "parallelize_module"
SAMPLERS = frozenset({"DistributedSampler"})

EFFECTS = {
    GROUP: "the cell manages its ranks itself, so nothing in it is changed",
    **dict.fromkeys(WRAPPERS, "wrapped by hand, so this model is left alone"),
    SHARDS: "sharded by hand, so this model is left alone",
    PLAN: "spread over the mesh by this plan",
    **dict.fromkeys(SAMPLERS, "divided by hand, so a data loader with it is left alone"),
}
"""Effect of each of these calls on a strategy, in the words of `--explain`."""

_RANK_AND_SIZE = (
    ("rank", "num_replicas"),
    ("rank", "world_size"),
    ("process_index", "num_processes"),
    ("data_parallel_rank", "data_parallel_size"),  # Megatron
    ("dp_rank", "dp_world_size"),
    ("dist_rank", "dist_num_replicas"),  # timm
)
"""Names of attributes that mark a share of the data, also with `_` before them, as detectron2 has them."""
_SPLIT_STAGE = "split_by_node"
"""Name of the stage that gives each rank its shards in a pipeline of `webdataset`."""


def wraps_model(module: Any) -> bool:
    """Return whether a module reduces the gradients of the model in it."""
    from jupyter_distrib.libraries import known  # a kernel asks for names only

    return _is_one_of(module, WRAPPERS) or known.wraps_model(module)


def divides_data(part: Any, *, by_attributes: bool) -> bool:
    """Return whether a data loader, a data set or a sampler is already one rank's share.

    Args:
        part: An object of torch, of a library or of the user.
        by_attributes: Whether attributes named like a rank and the number of ranks also mark a share.
    """
    from jupyter_distrib.libraries import known

    if _is_one_of(part, SAMPLERS) or known.divides_data(part):
        return True
    attributes = getattr(part, "__dict__", {})
    if (by_attributes and _is_share(attributes)) or known.is_split(part):
        return True
    stages = attributes.get("pipeline")
    return isinstance(stages, list) and any(getattr(each, "__name__", "") == _SPLIT_STAGE for each in stages)


def _is_share(attributes: Mapping[str, Any]) -> bool:
    """Return whether attributes hold a rank and a number of ranks. Rank 0 of 1 has all of the data."""
    plain = {name.removeprefix("_"): value for name, value in attributes.items()}
    return any(plain.get(rank) is not None and plain.get(size) not in (None, 1) for rank, size in _RANK_AND_SIZE)


def _is_one_of(thing: Any, names: frozenset[str]) -> bool:
    """Return whether an object's class or one of its bases has one of these names, which other libraries use in the
    same sense."""
    return any(cls.__name__ in names for cls in type(thing).__mro__)
