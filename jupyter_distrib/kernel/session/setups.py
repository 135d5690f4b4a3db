"""Keeps the set-ups of this notebook: cells that every rank runs once, before its first cell (`%%distributed_setup`).

They are sent with every cell, and each rank runs the ones it has not run yet. Kernel side, in the thread that runs
cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jupyter_distrib.errors import CaptureError, OptionsError
from jupyter_distrib.kernel.capture.capture import Captured, Input
from jupyter_distrib.kernel.capture.inputs import PackedInputs
from jupyter_distrib.kernel.session.runs.program import Program
from jupyter_distrib.serialization import definitions
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import size
from jupyter_distrib.wire import messages as m

_MOST_BYTES = 1_000_000


@data_class
class RegisteredSetup:
    """A set-up of the notebook."""

    setup: m.Setup
    cell_id: str
    """The front end's id of its cell; empty if there is none."""
    inputs: tuple[Input, ...]
    made: Mapping[str, int]
    """The identities of the objects that it has bound in the notebook, by name."""
    sent: tuple[object, ...]
    """The functions and classes among its inputs; see `Packed.sent`."""


class Setups:
    """The set-ups in the order in which they were first run."""

    def __init__(self) -> None:
        self._all: dict[str, RegisteredSetup] = {}

    @property
    def registered(self) -> tuple[RegisteredSetup, ...]:
        return tuple(self._all.values())

    def sources(self) -> list[str]:
        return [each.setup.cell.source for each in self._all.values()]

    def shared(self, namespace: Mapping[str, object]) -> dict[int, tuple[str, str]]:
        """Return the objects of the notebook that each rank has from a set-up, by identity: digest and name."""
        return {
            identity: (each.setup.digest, name)
            for each in self._all.values()
            for name, identity in each.made.items()
            if id(namespace.get(name)) == identity
        }

    def to_send(self) -> tuple[m.Setup, ...]:
        return tuple(each.setup for each in self._all.values())

    def name_for(self, given: str, cell_id: str, source: str) -> str:
        """Return the name of a cell: the given one, that under which the same cell was run before, or the next free
        number."""
        if given:
            return given
        for name, each in self._all.items():
            if (cell_id and each.cell_id == cell_id) or each.setup.cell.source == source:
                return name
        return next(name for number in range(1, len(self._all) + 2) if (name := f"setup-{number}") not in self._all)

    def register(
        self, name: str, captured: Captured, packed: PackedInputs, namespace: Mapping[str, object], cell_id: str
    ) -> RegisteredSetup:
        """Have ranks run this cell, which has just been run in the notebook, from now on."""
        parcel = in_message(packed)
        cell = replace(captured.cell, absent=packed.left_out, sources=packed.sources())
        digest = _digest(cell, parcel)
        definitions.share(captured.defines, namespace, digest, sent=True)
        registered = RegisteredSetup(
            setup=m.Setup(name=name, digest=digest, cell=cell, inputs=parcel, defines=captured.defines),
            cell_id=cell_id,
            inputs=captured.inputs,
            made={name: id(namespace[name]) for name in captured.defines if name in namespace},
            sent=packed.packed.sent,
        )
        self._all[name] = registered
        return registered

    def before(self, program: Program) -> Program:
        """Return a program with the set-ups that each rank runs before it."""
        for each in self._all.values():
            program = program.after(each.setup, each.inputs)
        return program

    def remove(self, name: str) -> None:
        """Have ranks run it no more. Raises `OptionsError` if there is no set-up of this name."""
        if name not in self._all:
            names = ", ".join(self._all) or "none"
            raise OptionsError(f"there is no set-up {name!r} in this notebook; it has: {names}")
        del self._all[name]


def in_message(packed: PackedInputs) -> m.Parcel:
    """Return the inputs of a set-up as they are sent with every cell. Raises `CaptureError` if they are large."""
    if packed.packed.size_bytes > _MOST_BYTES:
        raise CaptureError(
            f"A set-up is sent with every cell, so what it reads of the notebook ({', '.join(packed.values)}) must not "
            f"take more than {size(_MOST_BYTES)}; it takes {size(packed.packed.size_bytes)}. Load it in the set-up."
        )
    views: Sequence[memoryview] = packed.packed.buffers
    return m.Parcel(
        data=packed.packed.data, sizes=tuple(view.nbytes for view in views), inline=tuple(map(bytes, views))
    )


def _digest(cell: m.Cell, parcel: m.Parcel) -> str:
    parts = (cell.source.encode(), str(cell.future_annotations).encode(), parcel.data, *parcel.inline)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
