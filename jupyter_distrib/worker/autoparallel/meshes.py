"""The meshes of this rank's runs, and how they outlive their process group. Runs in the rank's main thread.

What is sharded refers to a mesh, and the mesh to process groups. After an interrupt, or when the ranks' groups have
seen unequal numbers of collectives, the worker group gets new groups: then the meshes that there are, and what FSDP has
noted of them, are pointed to the new ones, so that a model that was kept on the ranks can go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker import identity
from jupyter_distrib.worker.autoparallel import object_collectives, ownership
from jupyter_distrib.worker.pytorch import private, process_group

Shape = tuple[tuple[str, int], ...]
"""Names and sizes of the dimensions, the last one counting fastest: `(("data", 2), ("model", 4))`."""

_made: dict[Shape, DeviceMesh] = {}
_world: Any = None
"""The default group that they were made with."""


def mesh(shape: Shape) -> DeviceMesh:
    """Return the mesh of this shape over all ranks. Collective when it is asked for the first time.

    Raises:
        DistributedError: It does not have as many places as there are ranks.
    """
    wanted, there = math.prod(size for _, size in shape), identity.world_size()
    if wanted != there:
        text = ",".join(f"{name}={size}" for name, size in shape)
        raise DistributedError(
            f"--mesh {text} wants {wanted} ranks, and there are {there}: run the cell with {wanted} ranks, or give a "
            f"mesh for {there}."
        )
    if shape not in _made:
        _made[shape] = _new(shape)
    return _made[shape]


def ours_among(tensors: Callable[[], Iterable[Any]]) -> bool:
    """Return whether any of these sharded tensors is spread over one of these meshes, or what was cut out of one.

    Args:
        tensors: Called only if there are meshes.
    """
    made = [*_made.values()]
    return bool(made) and any(private.root_mesh(each.device_mesh) in made for each in tensors())


def follow() -> bool:
    """Point all meshes to the groups that there are now; return True if any rank had others before. Collective then."""
    global _world
    before, _world = _world, dist.group.WORLD
    if before is _world:  # on all ranks or on none
        return False
    every = [{_shape(each) for each in theirs} for theirs in object_collectives.gather(list(_made))]
    groups: dict[str, str] = {}
    for shape in list(_made):
        old = _made.pop(shape)
        if all(shape in theirs for theirs in every):  # a rank that was replaced has none: its shards are gone
            fresh = _new(shape)
            groups |= dict(zip(private.group_names(old), private.group_names(fresh), strict=True))
            _made[shape] = old
    for each in ownership.alive(DeviceMesh):  # with those that were cut out of ours, or joined from them
        _point_to(each, groups)
    for module in ownership.alive(FSDPModule):
        private.point_fsdp_to_its_mesh(module)
    return any(every)


def _shape(dimensions: list[list[Any]]) -> Shape:
    return tuple((str(name), int(size)) for name, size in dimensions)


def _new(shape: Shape) -> DeviceMesh:
    automatic = process_group.current.automatic
    made = init_device_mesh(
        identity.device().type,
        tuple(size for _, size in shape),
        mesh_dim_names=tuple(name for name, _ in shape),
    )
    process_group.current.automatic = (
        automatic  # the groups of a mesh last as long as the group that the strategy has made
    )
    return made


def _point_to(each: DeviceMesh, groups: dict[str, str]) -> None:
    """Torch (2.13) finds the groups of a mesh by their names."""
    names = private.group_names(each)
    if all(name in groups for name in names):
        private.set_group_names(each, [groups[name] for name in names])
