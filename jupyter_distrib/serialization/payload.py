"""Pickles values between kernel and ranks; the only module of the package that pickles.

    kernel   pack_inputs -> to_parcel     ==link==>   from_parcel -> unpack_inputs   rank
    kernel   unpack_value <- from_parcel  <==link==   to_parcel <- pack_value        rank

The kernel's functions run in the run's own namespace on a rank, and come back as the kernel's own (`definitions`).
Tensors and arrays are neither copied into the pickle nor out of it (`tensors`, `shared_memory`). A value that a rank
cannot return becomes an `Unreturned`; `problem` names a value that the kernel cannot send. Nothing is unpickled that
the caller did not pass in.

Any thread, but not two at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import reprlib
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from jupyter_distrib.errors import PayloadError, ValueLost
from jupyter_distrib.serialization import shared_memory, tensors
from jupyter_distrib.serialization.identities import Identities
from jupyter_distrib.serialization.picklers import (
    LOADING,
    NAMESPACE,
    InputPickler,
    ResultPickler,
    ShardFinder,
    torch_objects_in,
)
from jupyter_distrib.serialization.tensors import DEVICE, Tensors
from jupyter_distrib.system import call_parts, file_owner
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.serialization.pickle_errors import PickleProblem

ALIGNMENT = shared_memory.ALIGNMENT
INLINE_LIMIT = 64 * 1024
"""Largest total size of buffers sent in the message itself; larger ones go through shared memory."""
_STREAM_LIMIT = 1 << 20
"""Length above which a pickle stream goes through shared memory as well, so that it is sent once per node."""
_MAX_REPR = 80
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _MAX_REPR
_MAX_REASON = 500

kept_values: dict[str, object] = {}
"""Values kept on this rank between runs, by key."""


@data_class
class Packed:
    """A pickle and its out-of-band buffers, which are still the memory of the objects themselves."""

    data: bytes
    buffers: tuple[memoryview, ...]
    """One-dimensional views of bytes, in pickle order; each keeps its object's memory alive."""
    size_bytes: int
    """The size of both."""
    sent: tuple[object, ...] = ()
    """The kernel's functions and classes in the pickle, which ranks return by key: keep them until values have come."""


@dataclass(frozen=True, slots=True)
class Unreturned:
    """A stand-in for a value that could not leave its rank or could not be rebuilt in the kernel."""

    type_name: str
    """The type of the value; empty if it failed on arrival."""
    short: str
    """The beginning of its `repr`."""
    reason: str

    def __repr__(self) -> str:
        return f"<not returned: {self.short or self.type_name or 'a value'} ({self.reason})>"

    def __getattr__(self, name: str) -> NoReturn:
        if name in Unreturned.__slots__ or name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"there is no `{name}` here, since this {self.type_name or 'value'} was not returned ({self.reason}). Use "
            "it in a distributed cell, and end that cell with what you need of it"
        )


# ------------------------------------------------------------------------------------------------ kernel to rank


def pack_inputs(
    inputs: Mapping[str, object],
    namespace: dict[str, object],
    shared: Mapping[int, tuple[str, str]] | None = None,
    reads_files: Callable[[], bool] = bool,
) -> Packed:
    """Pickle captured variables together, so that a shared object or storage stays shared.

    Args:
        inputs: The values by name.
        namespace: The names of the notebook; functions defined in it bring along the globals that they use.
        shared: The objects that ranks have from a set-up, by identity, if they are to be sent by their names.
        reads_files: Returns whether the ranks have the files of this machine, so that mapped ones need not be copied.

    Raises:
        PayloadError: A value cannot be pickled; `problem` then describes it.
    """
    options: dict[str, Any] = {"shared": shared or {}, "reads_files": reads_files}
    pickler, identities = partial(InputPickler, namespace, **options), Identities()
    try:
        packed = _packed(partial(pickler, identities=identities), InputPickler.dump_inputs, inputs, results=False)
        if identities.may_be_needed and (objects := torch_objects_in(inputs, namespace, **options)):
            again = partial(pickler, identities=Identities(objects))
            return _packed(again, InputPickler.dump_inputs, inputs, results=False)
        return packed
    except (Exception, SystemExit) as error:  # foreign code, whose `__getstate__` may call `sys.exit`
        raise PayloadError(f"A variable cannot be sent to the ranks: {error}") from error


class ModuleInput:
    """A module that arrives with modules inside it imported, if the rank has them.

    Args:
        module: The module, which the rank finds by its name.
        submodules: The full names of the modules inside it.
    """

    def __init__(self, module: object, submodules: Sequence[str]) -> None:
        self._module, self._submodules = module, tuple(submodules)

    def __reduce__(self) -> tuple[Any, ...]:
        return import_submodules, (self._module, self._submodules)


def import_submodules(module: object, submodules: Sequence[str]) -> object:
    """Import submodules of a module; if the rank lacks them, the cell itself fails. Pickles name this function."""
    for name in submodules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - foreign code
            break
    return module


def problem(inputs: Mapping[str, object], namespace: dict[str, object]) -> PickleProblem | None:
    """Return the value that made `pack_inputs` fail; None if nothing fails now. Takes up to 0.5 s longer than the
    failed pickling."""
    from jupyter_distrib.serialization import pickle_errors  # loaded when something cannot be sent

    return pickle_errors.find(inputs, namespace)


def unpack_inputs(
    data: bytes | memoryview,
    buffers: Sequence[memoryview],
    namespace: dict[str, object],
    *,
    device: str,
    loading: Callable[[str], None] | None = None,
) -> None:
    """Put captured variables into a run's namespace.

    Existing names take precedence over globals that functions bring along, and inputs over both.

    Args:
        data: The stream that `from_parcel` returned.
        buffers: The buffers that `from_parcel` returned.
        namespace: The namespace of the cell, which becomes the globals of the notebook's functions.
        device: The device for captured tensors of an accelerator, as torch names it on this rank.
        loading: Called with each name before its value is unpickled, so that a crash can be explained.

    Raises:
        PayloadError: A variable cannot be rebuilt on this rank; the error names it.
        ValueLost: A variable was kept, and this process does not have it; the error names it.
    """
    provided, names = dict(namespace), [""]

    def begin(name: str) -> None:
        names.append(name)
        if loading is not None:
            loading(name)

    try:
        with _set(NAMESPACE, namespace), _set(DEVICE, device), _set(LOADING, begin):
            parts = _loaded(data, buffers)
        tensors.number_hooks_anew()
    except Exception as error:  # foreign code
        what, them = call_parts.named(names[-1]), "them" if names[-1] in call_parts.PLURAL else "it"
        if isinstance(error, ValueLost):
            raise ValueLost(f"{what}: {error}") from None
        cure = f"Pickling in the kernel succeeded; build {them} on the rank, or install the missing parts there."
        if file := _failing_file(error):
            cure = f"Importing {file} fails on the rank, which reads the file as it is now."
        raise PayloadError(f"{what} cannot be rebuilt on the rank: {type(error).__name__}: {error}. {cure}") from error
    own = {name: value for name, value in provided.items() if _is_the_ranks_own(name, value, namespace[name])}
    namespace.update(own)
    namespace.update(zip(parts[::2], parts[1::2], strict=True))


_OF_A_SINGLE_PROCESS = {"rank": 0, "local_rank": 0, "world_size": 1}


def _is_the_ranks_own(name: str, value: object, notebooks: object) -> bool:
    """Return whether a name is the rank's own where only functions of the notebook read it: names of modules, a `rank`
    or `world_size` that says what a single process is, which a `rank` of LoRA does not, and a `device` of torch, since
    that of the notebook may be on another machine."""
    if name in _OF_A_SINGLE_PROCESS:
        return type(notebooks) is int and notebooks == _OF_A_SINGLE_PROCESS[name]
    return name[:2] == "__" or (name == "device" and type(notebooks) in (str, type(value)))


def _failing_file(error: BaseException) -> str:
    """Return the user's file whose import has raised an exception; empty if none has, or if a package is missing."""
    if isinstance(error, ModuleNotFoundError):
        return ""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename for frame in frames if frame.f_code.co_name == "<module>"]
    if isinstance(error, SyntaxError) and error.filename:
        files.append(error.filename)
    return next((each for each in reversed(files) if file_owner.is_users(each)), "")


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def sizes(
    inputs: Mapping[str, object],
    namespace: dict[str, object] | None = None,
    reads_files: Callable[[], bool] = bool,
) -> dict[str, int]:
    """Return the approximate number of bytes that each input alone would take; 0 if it cannot be pickled."""
    known = {} if namespace is None else namespace
    return {name: _size_bytes(value, known, reads_files) for name, value in inputs.items()}


def _size_bytes(value: Any, namespace: dict[str, object], reads_files: Callable[[], bool]) -> int:
    if isinstance(value, (bytes, bytearray, str, int, float, type(None))):
        return sys.getsizeof(value)
    try:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "numpy" and kind.__name__ != "memmap" and value.dtype.kind != "O":
            return int(value.nbytes)
        return pack_inputs({"": value}, namespace, reads_files=reads_files).size_bytes
    except Exception:  # noqa: BLE001 - foreign code; `pack_inputs` of all inputs reports it
        return 0


# ------------------------------------------------------------------------------------------------ rank to kernel


def sharded_in(value: object) -> list[Any]:
    """Return the tensors in a value that are sharded over ranks, in an order that is the same for equal values."""
    found: list[Any] = []
    try:
        ShardFinder(found).dump(value)
    except Exception:  # noqa: BLE001 - foreign code; tensors behind it stay sharded
        return found
    return found


def pack_value(value: object, *, by_value: bool, run: str, deferred: bool = False) -> Packed:
    """Pickle the value that a cell returned. If it or items of it cannot be pickled, they become `Unreturned`.

    Args:
        value: The value of the cell's last expression.
        by_value: Whether a kernel that did not start the run may read it.
        run: The run's id, from which ranks of one run give classes of the cell a common identity.
        deferred: Leave large storages on their device until `to_parcel` writes them; nothing else can read them then.
    """
    try:
        return pack_result(value, by_value, run, deferred=deferred)
    except Exception as error:  # noqa: BLE001 - foreign code
        replacement = _without_bad_items(value, reason_of(error), by_value, run)
    try:
        return pack_result(replacement, by_value, run, deferred=deferred)
    except Exception as error:  # noqa: BLE001 - each item can be pickled, together they cannot
        return pack_result(placeholder(value, reason_of(error)), by_value, run)


def pack_result(value: object, by_value: bool, run: str, *, deferred: bool = False) -> Packed:
    """Pickle a value of a rank as it is; errors of pickling are raised."""
    pickler = partial(ResultPickler, run, by_value)
    return _packed(pickler, ResultPickler.dump, value, results=True, deferred=deferred)


def _without_bad_items(value: Any, reason: str, by_value: bool, run: str) -> object:
    def checked(item: object) -> object:
        try:
            pack_result(item, by_value, run)
        except Exception as error:  # noqa: BLE001 - foreign code
            return placeholder(item, reason_of(error))
        return item

    cls = type(value)
    if cls in (dict, OrderedDict):  # a `state_dict()` is an `OrderedDict`
        return cls((key, checked(item)) for key, item in value.items())
    if cls in (list, tuple):
        return cls(map(checked, value))
    if isinstance(value, tuple) and hasattr(cls, "_make"):  # a named tuple
        return cls._make(map(checked, value))
    return placeholder(value, reason)


def placeholder(value: object, reason: str) -> Unreturned:
    """Return an `Unreturned` in place of this value."""
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"
    return Unreturned(name, short_repr(value), reason)


def short_repr(value: object) -> str:
    """Return the beginning of a value's `repr`, in one line."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # noqa: BLE001 - the user's `__repr__`
        text = object.__repr__(value)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REPR else text[: _MAX_REPR - 1] + "…"


def reason_of(error: BaseException) -> str:
    """Return the message of an exception, or its type."""
    try:
        return (str(error) or type(error).__name__)[:_MAX_REASON]
    except Exception:  # noqa: BLE001 - the user's `__str__`
        return type(error).__name__


def unpack_value(data: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """Unpickle the value that a rank returned; give an `Unreturned` if it cannot be rebuilt in this process."""
    try:
        return _loaded(data, buffers)
    except Exception as error:  # noqa: BLE001 - foreign code; the values of other ranks must arrive all the same
        return Unreturned("", "", f"it cannot be rebuilt in the notebook: {reason_of(error)}")


def kept_value(key: str) -> object:
    """Return the value that a handle's pickle names, on the rank that keeps it.

    Raises:
        ValueLost: This process does not have the value.
    """
    try:
        return kept_values[key]
    except KeyError:
        raise ValueLost(
            f"the value kept as {key} is not on this rank: its process was replaced, or another rank or kernel has it. "
            "Run the cell that keeps it again."
        ) from None


# ------------------------------------------------------------------------------------------------ pickles, parcels


def _packed(
    make: Callable[[Any, Tensors, list[memoryview]], Any],
    dump: Callable[[Any, Any], object],
    value: object,
    *,
    results: bool,
    deferred: bool = False,
) -> Packed:
    """Pickle, a second time if the first pass found large storages that are hardly used or on an accelerator, or arrays
    that overlap.

    Args:
        make: Makes the pickler.
        dump: Its method that pickles the value.
        value: The value, or inputs by name.
        results: Whether it is a value of a rank.
        deferred: See `pack_value`.
    """
    found: Tensors | None = None
    objects = Tensors(results=results, look_first=True)
    while True:
        file, buffers = io.BytesIO(), list[memoryview]()
        dump(pickler := make(file, objects, buffers), value)
        if found is None and (buffers or objects.left_out or objects.arrays.seen):
            found, regions = objects, objects.arrays.overlapping()
            compact = found.wasteful(regions)
            if compact or found.left_out or regions:
                objects = Tensors(results=results, compact=compact, deferred=deferred, regions=regions)
                continue
        data = file.getvalue()
        size_bytes = len(data) + sum(map(len, buffers))
        return Packed(
            data=data, buffers=tuple(buffers), size_bytes=size_bytes, sent=tuple(getattr(pickler, "sent", ()))
        )


def _loaded(data: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        tensors.after_load()


def to_parcel(packed: Packed) -> tuple[m.Parcel, int | None]:
    """Return the parcel for the link and, for large payloads, a file descriptor of shared memory.

    This makes the only copy of the data; `packed` may be dropped afterwards. The caller closes the descriptor after
    sending it, to any number of readers.

    Raises:
        PayloadError: There is not enough memory.
    """
    parcel, views = laid_out(packed)
    return parcel, shared_memory.write(views) if views else None


def laid_out(packed: Packed) -> tuple[m.Parcel, Sequence[memoryview]]:
    """Return the parcel, and the parts of `packed` that go through shared memory; none if it is small."""
    data, views = packed.data, packed.buffers
    if len(data) > _STREAM_LIMIT:
        data, views = b"", (memoryview(data), *views)
    lengths = tuple(view.nbytes for view in views)
    if data and sum(lengths) <= INLINE_LIMIT:
        return m.Parcel(data=data, sizes=lengths, inline=tuple(map(bytes, views))), ()
    return m.Parcel(data=data, sizes=lengths), views


def from_parcel(
    parcel: m.Parcel, fd: int | None, more: Sequence[int] = ()
) -> tuple[bytes | memoryview, list[memoryview]]:
    """Reverse `to_parcel`: return stream and writable buffers for `unpack_inputs` or `unpack_value`.

    Args:
        parcel: The parcel that the link delivered.
        fd: The descriptor that came with it; closed in every case. The memory is freed with the last buffer in use.
        more: The descriptors that came after that; closed as well.

    Raises:
        PayloadError: The shared memory is missing or incomplete.
    """
    if fd is None:
        if len(parcel.inline) != len(parcel.sizes):
            raise PayloadError("A payload arrived without its shared memory.")
        return parcel.data, [memoryview(bytearray(buffer)) for buffer in parcel.inline]
    if parcel.segments:
        views = shared_memory.read_places((fd, *more), parcel.sizes, parcel.places)
    else:
        views = shared_memory.read(fd, parcel.sizes)
    # An empty stream is no pickle: it means that the first buffer is the stream.
    return (parcel.data, views) if parcel.data else (views[0], views[1:])
