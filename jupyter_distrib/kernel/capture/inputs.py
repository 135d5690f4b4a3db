"""The inputs that travel with a cell: pickled, with a sentence on values that cannot be pickled, and a warning about
large ones.

Names that the ranks will not have, although the notebook has or had them, travel with the reason, which a `NameError`
on one of them then gives. Kernel side, in the thread that runs the cell.

The size of each variable is measured only for a warning about large inputs, since everything is pickled once more for
it and thrown away. Values that functions lead to go first, so that they count for their own names and not for the
functions; a value that several names hold counts for the first of them.
"""

from __future__ import annotations

import builtins
import functools
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from jupyter_distrib.errors import CaptureError, PayloadError
from jupyter_distrib.kernel.capture import mlflow_use
from jupyter_distrib.kernel.capture.capture import PROVIDED, Dropped, Input, global_names, reachable
from jupyter_distrib.serialization import payload
from jupyter_distrib.serialization.picklers import InputPickler, Name
from jupyter_distrib.serialization.tensors import Tensors
from jupyter_distrib.system import call_parts
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import size
from jupyter_distrib.system.nested_code import codes_in, names_in, read_globals
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.serialization.pickle_errors import PickleProblem

T = TypeVar("T")
_OF_CALLS = {
    call_parts.FUNCTION: "function",
    call_parts.ARGUMENTS: "args",
    call_parts.KEYWORDS: "kwargs",
    "inside the cell": "inside the function",
}
"""Words for the parts of a distributed function's call, for the sentence on one that cannot be sent."""
_PLAIN = (str, bytes, bool, int, float, type(None))
_LARGE_BYTES = 100_000_000
_NAMED_BYTES = _LARGE_BYTES // 10
"""Size below which the warning does not name a variable."""


@data_class
class PackedInputs:
    """The inputs of a cell, ready to send."""

    values: dict[str, object]
    """The values that travel, by name."""
    packed: payload.Packed
    left_out: dict[str, str]
    """The names that are not sent, since the cell may not need them, each with the reason."""

    def of_type(self, kind: type[T]) -> list[T]:
        """Return the values of this type that travel."""
        return [value for value in self.values.values() if isinstance(value, kind)]

    def uses(self, source: str) -> dict[str, object]:
        """Return the trackers that a program with these inputs uses, each with what its code says about it."""
        if "import" not in source and all(type(value) in _PLAIN for value in self.values.values()):
            return {}
        use = mlflow_use.of(source, self.packed.data, self.packed.sent, self.values)
        return {} if use is None else {"mlflow": use}

    def names_in_code(self) -> set[str]:
        """Return the names that the notebook's travelling functions look up or bind as globals, and their
        attributes."""
        functions = [item for item in self.packed.sent if isinstance(item, FunctionType)]
        return set().union(*(names_in(function.__code__) for function in functions))

    def globals_in_code(self) -> set[str]:
        """Return the globals and builtins that the notebook's travelling functions look up, without attributes."""
        functions = [item for item in self.packed.sent if isinstance(item, FunctionType)]
        return set().union(*(read_globals(function.__code__) for function in functions))

    def texts_in_code(self) -> str:
        """Return the strings in the notebook's travelling functions, which may be code for `eval` or `exec`."""
        functions = [item for item in self.packed.sent if isinstance(item, FunctionType)]
        codes = [each for item in functions for each in codes_in(item.__code__)]
        return "\n".join(text for each in codes for text in each.co_consts if isinstance(text, str))

    def sources(self) -> dict[str, str]:
        """Return the sources of the notebook's cells that define travelling functions, by file name."""
        files = {item.__code__.co_filename for item in self.packed.sent if isinstance(item, FunctionType)}
        entries = {file: linecache.cache.get(file, ()) for file in files}
        return {file: "".join(entry[2]) for file, entry in entries.items() if len(entry) == 4 and entry[1] is None}


def pack(
    inputs: tuple[Input, ...],
    namespace: dict[str, object],
    *,
    most_bytes: int | None = None,
    shared: Callable[[], Mapping[int, tuple[str, str]]] = dict,
    reads_files: Callable[[], bool] = bool,
) -> PackedInputs:
    """Pickle the inputs. A value that cannot be pickled is left out if the cell may not need it.

    Args:
        inputs: The inputs.
        namespace: The names of the notebook.
        most_bytes: The limit of their size.
        shared: Returns the objects that ranks have from a set-up: sent by name if something cannot be pickled.
        reads_files: Returns whether the ranks have the files of this machine, and map them as the notebook has.

    Raises:
        PayloadError: It names the variable, the part that cannot be pickled, and the line that reads the variable.
        CaptureError: The inputs are larger than `most_bytes`; it names the largest of them.
    """
    travelling = {item.name: item.value for item in inputs}
    by_name = {item.name: item for item in inputs}
    left_out: dict[str, str] = {}
    by_name_of_setup: Mapping[int, tuple[str, str]] = {}
    while True:
        try:
            packed = payload.pack_inputs(
                _with_submodules(travelling, by_name), namespace, by_name_of_setup, reads_files
            )
        except PayloadError as error:
            if not by_name_of_setup and (by_name_of_setup := shared()):
                continue
            problem = payload.problem(travelling, namespace)
            if problem is None or problem.name not in travelling:
                raise
            sentence = _sentence(problem, by_name[problem.name])
            if by_name[problem.name].certain:
                raise PayloadError(sentence) from error.__cause__
            left_out[problem.name] = sentence
            del travelling[problem.name]
        else:
            if packed.size_bytes > min(_LARGE_BYTES, most_bytes or _LARGE_BYTES):
                sent = tuple(item for item in inputs if item.name in travelling)
                _check_size(sent, namespace, packed.size_bytes, most_bytes, reads_files)
            return PackedInputs(values=travelling, packed=packed, left_out=left_out)


def _check_size(
    inputs: tuple[Input, ...],
    namespace: dict[str, object],
    total_bytes: int,
    most_bytes: int | None,
    reads_files: Callable[[], bool],
) -> None:
    """Raise `CaptureError` for inputs larger than `most_bytes`, and print a warning about large ones."""
    largest = functools.partial(_largest, inputs, namespace, total_bytes, reads_files)
    if most_bytes is not None and total_bytes > most_bytes:
        raise CaptureError(_refusal(largest, total_bytes, most_bytes))
    if total_bytes > _LARGE_BYTES:
        print(_warning(largest))


def _with_submodules(values: Mapping[str, object], inputs: Mapping[str, Input]) -> dict[str, object]:
    """Return the values; modules bring along the submodules that the cell reads."""
    return {
        name: payload.ModuleInput(value, inputs[name].submodules) if inputs[name].submodules else value
        for name, value in values.items()
    }


def explained(
    cell: m.Cell, packed_inputs: PackedInputs, namespace: Mapping[str, object], dropped: Mapping[str, Dropped]
) -> m.Cell:
    """Return the cell with what is known of the names that its ranks lack, and the sources of their functions."""
    sources, source = packed_inputs.sources(), cell.source
    lacking = {
        **unseen(source, packed_inputs, namespace),
        **absent(source, packed_inputs, namespace, dropped),
    }
    return replace(cell, absent=lacking, sources=sources) if lacking or sources else cell


def absent(
    source: str, packed_inputs: PackedInputs, namespace: Mapping[str, object], dropped: Mapping[str, Dropped]
) -> dict[str, str]:
    """Return the names that the cell, or code sent with it, may lack on the ranks, each with the reason."""
    gone = {name: dropped[name].explained(name) for name in dropped.keys() - namespace.keys()}
    if not (origins := {**_added_to_builtins(frozenset(vars(builtins))), **gone}):
        return packed_inputs.left_out
    mentioned = {*re.findall(r"[^\W\d]\w*", source), *packed_inputs.names_in_code()}
    return {**{name: origins[name] for name in origins.keys() & mentioned}, **packed_inputs.left_out}


_KNOWN_BUILTINS = PROVIDED | {
    *("True", "False", "None", "Ellipsis", "NotImplemented", "open", "copyright", "credits", "license"),
    *("exit", "quit", "help", "_"),
}
"""The names among the builtins that Python and IPython put there and whose values do not say so."""


@functools.lru_cache(maxsize=1)  # asked for by each cell
def _added_to_builtins(names: frozenset[str]) -> dict[str, str]:
    """Return the names among all these that something else than Python and IPython has put there, each with advice."""
    ours = "builtins", "IPython.", "ipykernel."
    return {
        name: f"`{name}` is a builtin that the notebook has added (`builtins.{name} = ...`), and ranks do not have it: "
        "bind the name in the notebook, or add it in a cell with %%distributed_setup"
        for name in names - _KNOWN_BUILTINS
        if name[:2] != "__" and not str(getattr(vars(builtins)[name], "__module__", None)).startswith(ours)
    }


def unseen(
    source: str,
    packed_inputs: PackedInputs,
    namespace: Mapping[str, object],
    *,
    what: str = "the cell",
    cure: str = "add --with {}",
) -> dict[str, str]:
    """Return the names of the notebook that appear in the cell's text, or in strings of functions sent with it, but are
    not sent, each with advice: only `eval`, `exec` or the like may read them."""
    source = f"{source}\n{packed_inputs.texts_in_code()}"
    inside = [name for name in namespace if name in source and name not in packed_inputs.values and name[0] != "_"]
    words = set(re.findall(r"[^\W\d]\w*", source)) if inside else set()
    return {
        name: f"`{name}` is in the notebook, but {what} only reads it through eval, exec or a string, "
        f"which cannot be detected beforehand: {cure.format(name)}"
        for name in inside
        if name in words and name not in PROVIDED and not hasattr(builtins, name)
    }


def _sentence(problem: PickleProblem, item: Input) -> str:
    where = f" (used on line {item.line})" if item.line else ""
    inside = f" at {problem.path}" if problem.path != problem.name else ""
    holds = "holds" if inside else "is"
    says_what_to_do = re.search(r"\b(?:the|a|earlier) cell\b", problem.reason)  # not: cannot pickle 'cell' object
    advice = "" if says_what_to_do else " Build it inside the cell."
    sentence = (
        f"`{problem.name}`{where} {holds} a {problem.type_name}{inside}, which cannot be sent to the ranks "
        f"({problem.reason}).{advice}"
    )
    if problem.name in _OF_CALLS:
        for ours, theirs in _OF_CALLS.items():
            sentence = sentence.replace(ours, theirs)
    return sentence


_Largest = Callable[[int], tuple[str, bool]]
"""Returns the variables of at least this many bytes, largest first, and whether this is singular."""


def _warning(largest: _Largest) -> str:
    """Return a warning that names the variables which make the inputs large, the largest first."""
    what, one = largest(_NAMED_BYTES)
    are, them = ("is", "it") if one else ("are", "them")
    return f"{what} {are} captured and sent once per node. Load {them} in the cell to avoid this."


def _refusal(largest: _Largest, total_bytes: int, most_bytes: int) -> str:
    """Return a sentence on inputs that are larger than `most_bytes`; it names the largest of them first."""
    what, one = largest(min(most_bytes // 10, _NAMED_BYTES))
    are, them = ("is", "it") if one else ("are", "them")
    return (
        f"{what} {are} captured, {size(total_bytes)} with everything else, and no more than {size(most_bytes)} may be "
        f"sent (max_capture). Load {them} on the ranks, or allow more."
    )


def _largest(
    inputs: tuple[Input, ...],
    namespace: dict[str, object],
    total_bytes: int,
    reads_files: Callable[[], bool],
    named_bytes: int,
) -> tuple[str, bool]:
    ways = reachable(inputs, namespace)
    values = {**{name: namespace[name] for name in ways}, **{item.name: item.value for item in inputs}}
    weights = sorted(_weights(values, namespace, reads_files).items(), key=lambda item: -item[1])
    named: list[str] = []
    one = True
    for name, weight in weights:
        way = f", used by {' -> '.join(ways[name])}" if name in ways else ""
        named += [f"{call_parts.named(name)} ({size(weight)}{way})"] if weight >= named_bytes else []
        one = one and name not in call_parts.PLURAL if weight >= named_bytes else one
    what = " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))
    return what or f"{len(values)} variables ({size(total_bytes)})", one and len(named) == 1


def _weights(
    values: Mapping[str, object], namespace: dict[str, object], reads_files: Callable[[], bool]
) -> dict[str, int]:
    ordered = dict(sorted(values.items(), key=lambda item: bool(global_names(item[1]) & values.keys())))
    meter = _Meter(namespace, Tensors(results=False), reads_files)
    try:
        meter.dump_inputs(ordered)
        if compact := meter.tensors.wasteful():
            meter = _Meter(namespace, Tensors(results=False, compact=compact), reads_files)
            meter.dump_inputs(ordered)
    except Exception:  # noqa: BLE001 - foreign code, which pickled well a moment ago
        return {}
    return meter.weights()


class _Meter(InputPickler):
    """A pickler that keeps no data and records its position at each name."""

    def __init__(self, namespace: dict[str, object], tensors: Tensors, reads_files: Callable[[], bool]) -> None:
        self.tensors = tensors
        self._stream, self._buffers, self._marks = _Counter(), list[memoryview](), dict[str, int]()
        super().__init__(namespace, self._stream, tensors, self._buffers, reads_files=reads_files)

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
