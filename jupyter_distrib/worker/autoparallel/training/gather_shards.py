"""Gathers sharded values before they leave the ranks: on rank 0, on the CPU, one tensor at a time.

Runs in the rank's main thread. Gathering is a collective, so the ranks first exchange, through the store, a description
of their values, so that no rank waits for ever for one that ends early or returns another value.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.serialization import payload, tensors
from jupyter_distrib.worker.autoparallel.training import meshes
from jupyter_distrib.worker.pytorch import process_group

_LOOK_UP_S = 1.0
"""Seconds of one wait; interrupts are noticed between two waits."""


def gather_if_all_do(value: object) -> None:
    """Gather the sharded tensors of a value if all ranks' values contain the same ones. Called on every rank whose cell
    has ended well; collective if all of them take part."""
    sharded = [] if tensors.shapes_only else payload.sharded_in(value)
    form = _described(sharded)
    _publish(form)
    if sharded and all(other == form for other in _published_by_all()):
        _gather(sharded)


def announce_absence() -> None:
    """Announce that this rank leaves its cell early, so that the others do not wait for it."""
    _publish("")


def of(value: object) -> object:
    """Gather the value and return it. Called on all ranks at once, in a separate cell for `handle[rank]`."""
    process_group.current.ensure(process_group.default_backend(identity.device()))
    meshes.point_to_current_groups()
    _gather(payload.sharded_in(value))
    return value


def _gather(sharded: list[Any]) -> None:
    leads = identity.rank() == 0
    with torch.no_grad():
        for tensor in sharded:
            full = tensor.full_tensor()
            tensors.whole[id(tensor)] = tensor, _like(tensor, full.cpu()) if leads else None


def _like(tensor: Any, full: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(full, requires_grad=tensor.requires_grad)
    return full.requires_grad_(tensor.requires_grad)


def _described(sharded: list[Any]) -> str:
    if not sharded:
        return ""
    forms = [f"{tuple(each.shape)} {each.dtype} {each.placements} {each.device_mesh.shape}" for each in sharded]
    return json.dumps([process_group.current.sequence(), *forms])


def _publish(text: str) -> None:
    if (board := process_group.current.board()) is not None:
        board.put(_key(identity.rank()), text)


def _published_by_all() -> list[str]:
    board, keys = process_group.current.board(), [_key(rank) for rank in range(identity.world_size())]
    assert board is not None  # ranks with sharded values have met
    while not board.has(keys):
        try:
            board.wait(keys, _LOOK_UP_S)
        except RuntimeError:
            continue  # the keys are not there yet; a store that is gone raises in `has`
    return [board.get(key) for key in keys]


def _key(rank: int) -> str:
    return f"whole/{rank}"
