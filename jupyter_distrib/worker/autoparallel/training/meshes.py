"""Manages the meshes of this rank's runs, and moves them to new process groups. Runs in the rank's main thread.

A sharded tensor refers to a mesh, and the mesh to process groups. After an interrupt, or when the ranks' groups have
seen unequal numbers of collectives, the worker group gets new groups: then the existing meshes, and FSDP's copies of
their groups, are pointed to the new ones, so that a model that was kept on the ranks stays usable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.autoparallel import object_collectives, ownership
from jupyter_distrib.worker.pytorch import private, process_group

Shape = tuple[tuple[str, int], ...]
"""Names and sizes of the dimensions, the last one varying fastest: `(("data", 2), ("model", 4))`."""

_made: dict[Shape, DeviceMesh] = {}
_world: tuple[Any, int] = (None, 0)
"""The default group with which the meshes were created, and the number of stops it has survived."""


def mesh(shape: Shape) -> DeviceMesh:
    """Return the mesh of this shape over all ranks. Collective at the first call for each shape.

    Raises:
        DistributedError: The size of the mesh is not the number of ranks.
    """
    wanted, world_size = math.prod(size for _, size in shape), identity.world_size()
    if wanted != world_size:
        text = ",".join(f"{name}={size}" for name, size in shape)
        raise DistributedError(
            f"--mesh {text} needs {wanted} ranks, and there are {world_size}: run the cell with {wanted} ranks, or "
            f"give a mesh for {world_size}."
        )
    if shape not in _made:
        _made[shape] = _new(shape)
    return _made[shape]


def ours_among(tensors: Callable[[], Iterable[Any]]) -> bool:
    """Return whether any of these tensors is sharded over one of our meshes, or over part of one.

    Args:
        tensors: Returns the tensors; called only if there are meshes.
    """
    made = [*_made.values()]
    return bool(made) and any(private.root_mesh(each.device_mesh) in made for each in tensors())


def point_to_current_groups() -> bool:
    """Point all meshes to the current groups. Return True if any rank had meshes before and the group is new or a run
    was stopped; collective in that case."""
    global _world
    before, _world = _world, (dist.group.WORLD, process_group.current.stops)
    if before[0] is _world[0]:
        if before == _world:  # on all ranks or on none
            return False
        _reset_fsdp()
        return any(object_collectives.gather(bool(_made)))
    every = [{_shape(each) for each in shapes} for shapes in object_collectives.gather(list(_made))]
    groups: dict[str, str] = {}
    for shape in list(_made):
        old = _made.pop(shape)
        if all(shape in shapes for shapes in every):  # a rank that was replaced has no mesh: its shards are gone
            fresh = _new(shape)
            groups |= dict(zip(private.group_names(old), private.group_names(fresh), strict=True))
            _made[shape] = old
    for each in ownership.alive(DeviceMesh):  # including meshes that were cut out of ours, or joined from them
        _point_to(each, groups)
    _reset_fsdp()
    return any(every)


def _reset_fsdp() -> None:
    for module in ownership.alive(FSDPModule):
        private.point_fsdp_to_its_mesh(module)


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
    """Point a mesh to new groups, which torch (2.13) finds by their names."""
    names = private.group_names(each)
    if all(name in groups for name in names):
        private.set_group_names(each, [groups[name] for name in names])
