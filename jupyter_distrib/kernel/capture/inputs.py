"""The inputs that travel with a cell: pickled, with a sentence on values that cannot be pickled, and a warning about
large ones.

Names that the ranks will not have, although the notebook has or had them, travel with the reason, which a `NameError`
on one of them then gives. Kernel side, in the thread that runs the cell.
"""

from __future__ import annotations

import builtins
import linecache
import re
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING

from jupyter_distrib.errors import CaptureError, PayloadError
from jupyter_distrib.kernel.capture import input_sizes
from jupyter_distrib.kernel.capture.capture import PROVIDED, Dropped, Input
from jupyter_distrib.serialization import payload
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.nested_code import names_in

if TYPE_CHECKING:
    from jupyter_distrib.serialization.pickle_errors import PickleProblem

_OF_CALLS = {
    "__function__": "function",
    "__arguments__": "args",
    "__keywords__": "kwargs",
    "inside the cell": "inside the function",
}
"""The words for the parts of the call of a distributed function, in a sentence on one that cannot be sent."""


@data_class
class PackedInputs:
    """The inputs of a cell, ready to be sent."""

    values: dict[str, object]
    """The values that travel, by name."""
    packed: payload.Packed
    left_out: dict[str, str]
    """The names that do not travel, since the cell may not need them, each with the reason."""

    def names_in_code(self) -> set[str]:
        """Return the names that the notebook's travelling functions look up or bind as globals, and their
        attributes."""
        functions = [item for item in self.packed.sent if isinstance(item, FunctionType)]
        return set().union(*(names_in(function.__code__) for function in functions))

    def sources(self) -> dict[str, str]:
        """Return the sources of the notebook's cells that define travelling functions, by file name."""
        files = {item.__code__.co_filename for item in self.packed.sent if isinstance(item, FunctionType)}
        entries = {file: linecache.cache.get(file, ()) for file in files}
        return {file: "".join(entry[2]) for file, entry in entries.items() if len(entry) == 4 and entry[1] is None}


def pack(inputs: tuple[Input, ...], namespace: dict[str, object], *, most_bytes: int | None = None) -> PackedInputs:
    """Pickle the inputs. A value that cannot be pickled is left out if the cell may not need it.

    Raises:
        PayloadError: It names the variable, the part that cannot be pickled, and the line that reads the variable.
        CaptureError: The inputs are larger than `most_bytes`; it names the largest of them.
    """
    travelling = {item.name: item.value for item in inputs}
    by_name = {item.name: item for item in inputs}
    left_out: dict[str, str] = {}
    while True:
        try:
            packed = payload.pack_inputs(_with_submodules(travelling, by_name), namespace)
        except PayloadError as error:
            problem = payload.problem(travelling, namespace)
            if problem is None or problem.name not in travelling:
                raise
            sentence = _sentence(problem, by_name[problem.name])
            if by_name[problem.name].certain:
                raise PayloadError(sentence) from error.__cause__
            left_out[problem.name] = sentence
            del travelling[problem.name]
        else:
            if packed.size_bytes > min(input_sizes.LARGE_BYTES, most_bytes or input_sizes.LARGE_BYTES):
                sent = tuple(item for item in inputs if item.name in travelling)
                _check_size(sent, namespace, packed.size_bytes, most_bytes)
            return PackedInputs(values=travelling, packed=packed, left_out=left_out)


def _check_size(
    inputs: tuple[Input, ...], namespace: dict[str, object], total_bytes: int, most_bytes: int | None
) -> None:
    """Raise `CaptureError` for inputs larger than `most_bytes`, and print a warning about large ones."""
    if most_bytes is not None and total_bytes > most_bytes:
        raise CaptureError(input_sizes.refusal(inputs, namespace, total_bytes, most_bytes))
    if total_bytes > input_sizes.LARGE_BYTES:
        print(input_sizes.warning(inputs, namespace, total_bytes))


def _with_submodules(values: Mapping[str, object], inputs: Mapping[str, Input]) -> dict[str, object]:
    """Return the values, in which modules bring along the modules inside them that the cell reads."""
    return {
        name: payload.ModuleInput(value, inputs[name].submodules) if inputs[name].submodules else value
        for name, value in values.items()
    }


def absent(
    source: str, packed_inputs: PackedInputs, namespace: Mapping[str, object], dropped: Mapping[str, Dropped]
) -> dict[str, str]:
    """Return the names that the cell, or code that travels with it, may miss on the ranks, each with the reason."""
    gone = dropped.keys() - namespace.keys()
    mentioned = {*re.findall(r"[^\W\d]\w*", source), *packed_inputs.names_in_code()} if gone else set()
    return {**{name: dropped[name].told(name) for name in gone & mentioned}, **packed_inputs.left_out}


def unseen(source: str, packed_inputs: PackedInputs, namespace: Mapping[str, object]) -> dict[str, str]:
    """Return the names of the notebook that do not travel although the cell's text holds them, each with advice: only
    `eval`, `exec` or an annotation in quotes may read them."""
    inside = [name for name in namespace if name in source and name not in packed_inputs.values and name[0] != "_"]
    words = set(re.findall(r"[^\W\d]\w*", source)) if inside else set()
    return {
        name: f"`{name}` is in the notebook, but the cell only reads it by eval, exec or an annotation in quotes, "
        f"which is not seen beforehand: add --with {name}"
        for name in inside
        if name in words and name not in PROVIDED and not hasattr(builtins, name)
    }


def _sentence(problem: PickleProblem, item: Input) -> str:
    where = f" (used on line {item.line})" if item.line else ""
    inside = f" at {problem.path}" if problem.path != problem.name else ""
    holds = "holds" if inside else "is"
    sentence = (
        f"`{problem.name}`{where} {holds} a {problem.type_name}{inside}, which cannot be sent to the ranks "
        f"({problem.reason}). Build it inside the cell."
    )
    if problem.name in input_sizes.CALLS:
        for ours, theirs in _OF_CALLS.items():
            sentence = sentence.replace(ours, theirs)
    return sentence
