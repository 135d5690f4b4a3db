"""The values of a run that stay on ranks: the names that can be kept, and the handles to the values.

The ranks drop a value when the notebook's last handle to it is gone.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType, ModuleType
from typing import Any

from jupyter_distrib.errors import CaptureError
from jupyter_distrib.kernel.capture.capture import PROVIDED, Captured
from jupyter_distrib.kernel.capture.inputs import PackedInputs
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.session.pools.connection import GroupState, WorkerGroup
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.wire import messages as m

_PROVIDED = PROVIDED | {"mesh"}
"""Names that a rank puts into the cell's namespace, including those of `--strategy fsdp` and `tp`."""
_BINDS_ANYTHING = frozenset({"exec", "eval", "globals", "locals", "vars", "__import__", "get_ipython"})
"""Names by which a program can bind names that do not appear in its text."""


def explain_unknown(
    names: Iterable[str], captured: Captured, packed_inputs: PackedInputs, notebook: Mapping[str, object]
) -> CaptureError | None:
    """Return an error on a name in `--keep` that no rank will define; None if ranks may define all of them."""
    if re.search(r"\bimport\s*\*", captured.cell.source):
        return None
    code = {*captured.reads, *packed_inputs.names_in_code()}
    candidates = {*captured.defines, *packed_inputs.values}
    for name in names:
        if name in candidates or name in code or name in notebook or name in _PROVIDED or code & _BINDS_ANYTHING:
            continue
        near = get_close_matches(name, [each for each in candidates if not each.startswith("_")], n=1)
        hint = f"Did you mean `{near[0]}`?" if near else "Define it in the cell, or leave it out."
        return CaptureError(f"--keep names `{name}`, which this cell does not define. {hint}")
    return None


def note_missing(run: Run, names: Iterable[str], notebook: Mapping[str, object]) -> None:
    """Add a note on the names in `--keep` that no rank had at the end of the cell; values that are already kept
    stay."""
    kept = {name for rank in run.record.ranks.values() for name in rank.kept.types}
    kept |= {name for name in names if isinstance(notebook.get(name), RankValue)}
    if run.record.ok and (missing := [f"`{name}`" for name in names if name not in kept]):
        has = "has this name" if len(missing) == 1 else "has one of these names"
        text = f"nothing is kept as {', '.join(missing)}: no rank {has} at the end of the cell"
        run.note(text)


def note_stopped(run: Run, kept: Iterable[str]) -> None:
    """Add a note on the names that ranks kept although they were stopped before the end of the cell."""
    if any(rank.state == "interrupted" and rank.kept.types for rank in run.record.ranks.values()) and kept:
        run.note(f"kept as they were when the cell was stopped: {', '.join(f'`{name}`' for name in kept)}")


def bind(notebook: dict[str, Any], name: str, handle: RankValue) -> None:
    """Let a name of the notebook mean a kept value, and remember what it meant before."""
    before = notebook.get(name)
    handle.replaced = before.replaced if isinstance(before, RankValue) else _alone(before)
    notebook[name] = handle


def _alone(value: object) -> tuple[weakref.ref[Any], ...]:
    """Return references to a value and, if it is a model, its parameters: what other values may be tied to."""
    with contextlib.suppress(TypeError):  # not every class allows weak references
        parts = list(value.parameters()) if _is_model(value) else []  # type: ignore[attr-defined]
        return tuple(weakref.ref(each) for each in (value, *parts))
    return ()


def _is_model(value: object) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch.nn"), "Module", ()))


def read_by(captured: Captured, packed_inputs: PackedInputs, notebook: Mapping[str, object]) -> dict[str, RankValue]:
    """Return the handles that a cell or the functions sent with it read, by name."""
    if RankValue not in map(type, notebook.values()):
        return {}
    names = sorted((captured.reads | packed_inputs.names_in_code()) & notebook.keys())
    return {name: value for name in names if isinstance(value := notebook[name], RankValue)}


def notes_on_ties(
    kept: Mapping[str, RankValue], captured: Captured, packed_inputs: PackedInputs, notebook: Mapping[str, object]
) -> Iterator[str]:
    """Yield a sentence for each value of the notebook, such as an optimizer, that the cell sends beside a kept value,
    although it belongs to the notebook's own value of that name: it would train, or schedule, what nobody uses."""
    names = sorted((captured.reads | packed_inputs.names_in_code()) & notebook.keys())
    replaced = {
        id(part): name for name, handle in kept.items() for each in handle.replaced if (part := each()) is not None
    }
    for name in names:
        if tied := next((replaced[id(part)] for part in _parts(notebook[name]) if id(part) in replaced), ""):
            yield (
                f"`{name}` belongs to the notebook's own `{tied}`, and the ranks use the `{tied}` that they have kept: "
                f"keep both in the first of these cells, with --keep {tied},{name}, or make `{name}` in this cell"
            )


def _parts(value: object) -> Iterator[object]:
    """Yield what an object has as attributes, what is in a model, and what an optimizer trains."""
    if isinstance(value, (RankValue, type, ModuleType, FunctionType)):
        return
    own = getattr(value, "__dict__", {})
    yield from own.values()
    if _is_model(value):
        yield from value.modules()  # type: ignore[attr-defined]
    if isinstance(groups := own.get("param_groups"), list):
        yield from (each for group in groups for each in group["params"])


def covers_more(before: object, handle: RankValue) -> bool:
    """Return whether a name means a value that stays on more ranks than the one that a failed cell has kept."""
    return (
        isinstance(before, RankValue)
        and before.group == handle.group
        and not before.lost
        and set(before.ranks) > set(handle.ranks)
    )


class KeptValues:
    """The handles of one notebook to values that ranks keep.

    Args:
        fetch: Returns a copy of the value under a key from one rank of a worker group.
    """

    def __init__(self, fetch: Callable[[WorkerGroup, str, int], Any]) -> None:
        self._fetch = fetch
        self.dropped: queue.SimpleQueue[tuple[WorkerGroup, str]] = queue.SimpleQueue()
        """The values to which the notebook has no handle any more, and that their ranks still have."""

    def handles(self, group: WorkerGroup, run: Run, names: Iterable[str]) -> dict[str, RankValue]:
        """Return handles to the kept values, for each name that at least one rank defined.

        Ranks that were stopped count if every rank of the run has the name: otherwise a part of the run failed, and
        the cell will be run again with the notebook's own value.
        """
        out: dict[str, RankValue] = {}
        ranks = list(run.record.ranks.values())
        for name in names:
            having = [rank for rank in ranks if name in rank.kept.types]
            if usable := having if len(having) == len(ranks) else [rank for rank in having if rank.returned]:
                out[name] = self._handle(group, run, name, usable)
            elif having:
                self.dropped.put((group, f"{run.id}/{name}"))
        return out

    def _handle(self, group: WorkerGroup, run: Run, name: str, ranks: Sequence[RankRecord]) -> RankValue:
        key, forgotten, held = f"{run.id}/{name}", self.dropped, weakref.ref(group)
        types = {rank.rank: rank.kept.types[name] for rank in ranks}

        def drop(key: str) -> None:
            if (group := held()) is not None:
                forgotten.put((group, key))

        handle = RankValue(
            name=name,
            key=key,
            group=group.name,
            ranks=types,
            type_names=types,
            size_bytes={rank.rank: rank.kept.sizes.get(name, 0) for rank in ranks},
            pool=run.pool,
            since=run.record.label,
            sharded=any(name in rank.kept.sharded for rank in ranks),
            fetch=lambda rank: self._fetch(group, key, rank),
            on_drop=drop,
        )
        group.handles.add(handle)
        return handle

    def pass_on(self) -> None:
        """Tell the ranks which values have no handle any more; handles are collected at any time, in any thread."""
        keys: dict[str, tuple[WorkerGroup, list[str]]] = {}
        while not self.dropped.empty():
            group, key = self.dropped.get()
            keys.setdefault(group.name, (group, []))[1].append(key)
        for group, dropped in keys.values():
            if group.state is GroupState.OPEN:
                group.connection.node.send(m.Forget(group=group.name, keys=tuple(dropped)))
