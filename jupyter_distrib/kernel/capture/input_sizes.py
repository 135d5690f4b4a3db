"""The size that each variable adds to the inputs of a cell. Kernel side, in the thread that runs the cell.

Measured only for a warning about large inputs, since everything is pickled once more for it and thrown away. Values
that functions lead to go first, so that they count for their own names and not for the functions; a value that several
names hold counts for the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jupyter_distrib.kernel.capture.capture import Input, global_names, reachable
from jupyter_distrib.serialization.picklers import InputPickler, Name, inputs_in_order
from jupyter_distrib.serialization.tensors import Tensors
from jupyter_distrib.system.formatting import size

LARGE_BYTES = 100_000_000
NAMED_BYTES = LARGE_BYTES // 10
"""The size below which the warning does not name a variable."""

CALLS = {"__function__": "the function", "__arguments__": "the arguments", "__keywords__": "the keyword arguments"}
"""The parts of the call of a distributed function, by the names under which they travel."""


def warning(inputs: tuple[Input, ...], namespace: dict[str, object], total_bytes: int) -> str:
    """Return a warning that names the variables which make the inputs large, the largest first."""
    what, one = _largest(inputs, namespace, total_bytes, NAMED_BYTES)
    are, them = ("is", "it") if one else ("are", "them")
    return f"{what} {are} captured and sent once per node. Load {them} in the cell to avoid this."


def refusal(inputs: tuple[Input, ...], namespace: dict[str, object], total_bytes: int, most_bytes: int) -> str:
    """Return a sentence on inputs that are larger than `most_bytes`; it names the largest of them first."""
    what, one = _largest(inputs, namespace, total_bytes, min(most_bytes // 10, NAMED_BYTES))
    are, them = ("is", "it") if one else ("are", "them")
    return (
        f"{what} {are} captured, {size(total_bytes)} with everything else, and no more than {size(most_bytes)} may be "
        f"sent (max_capture). Load {them} on the ranks, or allow more."
    )


def _largest(
    inputs: tuple[Input, ...], namespace: dict[str, object], total_bytes: int, named_bytes: int
) -> tuple[str, bool]:
    """Return the names of the variables from `named_bytes` on, the largest first, and whether it is a single one."""
    ways = reachable(inputs, namespace)
    values = {**{name: namespace[name] for name in ways}, **{item.name: item.value for item in inputs}}
    weights = sorted(_weights(values, namespace).items(), key=lambda item: -item[1])
    named = []
    for name, weight in weights:
        way = f", used by {' -> '.join(ways[name])}" if name in ways else ""
        named += [f"{CALLS.get(name, f'`{name}`')} ({size(weight)}{way})"] if weight >= named_bytes else []
    what = " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))
    return what or f"{len(values)} variables ({size(total_bytes)})", len(named) == 1


def _weights(values: Mapping[str, object], namespace: dict[str, object]) -> dict[str, int]:
    ordered = dict(sorted(values.items(), key=lambda item: bool(global_names(item[1]) & values.keys())))
    meter = _Meter(namespace, Tensors(results=False))
    try:
        meter.dump(inputs_in_order(ordered))
        if compact := meter.tensors.wasteful():
            meter = _Meter(namespace, Tensors(results=False, compact=compact))
            meter.dump(inputs_in_order(ordered))
    except Exception:  # noqa: BLE001 - foreign code, which pickled well a moment ago
        return {}
    return meter.weights()


class _Meter(InputPickler):
    """A pickler that keeps no data and records its position at each name."""

    def __init__(self, namespace: dict[str, object], tensors: Tensors) -> None:
        self.tensors = tensors
        self._stream, self._buffers, self._marks = _Counter(), list[memoryview](), dict[str, int]()
        super().__init__(namespace, self._stream, tensors, self._buffers)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Name:
            self._marks[obj.name] = self._bytes()
        return super().reducer_override(obj)

    def weights(self) -> dict[str, int]:
        ends = [*self._marks.values(), self._bytes()][1:]
        return {name: end - begin for (name, begin), end in zip(self._marks.items(), ends, strict=True)}

    def _bytes(self) -> int:
        """Return the approximate number of bytes pickled so far: the pickler holds back up to 64 KB."""
        return self._stream.count + sum(view.nbytes for view in self._buffers)


class _Counter:
    count = 0

    def write(self, data: bytes | memoryview) -> int:
        self.count += len(data)
        return len(data)
