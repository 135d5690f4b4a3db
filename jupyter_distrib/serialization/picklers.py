"""The two picklers: one for values that the kernel sends to a rank, one for values that a rank sends back.

Both are cloudpickle's, with large buffers out of band (pickle protocol 5), torch handled by `tensors` and functions and
classes of the notebook by `definitions`. Used through `payload` only. Any thread; one pickler per pickle.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import cloudpickle

from jupyter_distrib.libraries import known
from jupyter_distrib.serialization import definitions, exception_form, mapped_files, standard_objects
from jupyter_distrib.serialization.identities import CONTAINERS, Identities
from jupyter_distrib.serialization.tensors import Tensors, same
from jupyter_distrib.system import file_owner, private_torch
from jupyter_distrib.system.importable import is_only_here

IN_BAND_BYTES = 4096
"""Largest buffer to put into the pickle stream: this is cheaper, and a small tensor keeps no large mapping alive."""

NAMESPACE: ContextVar[dict[str, object]] = ContextVar("jupyter_distrib_namespace")
"""The run's namespace, while a rank unpickles its inputs."""
LOADING: ContextVar[Callable[[str], None]] = ContextVar("jupyter_distrib_loading")
"""A callback that gets the name of each input before it is unpickled."""

_SHELLS_OWN = frozenset({"get_ipython", "exit", "quit", "open", "display"})
"""Names that IPython puts into every notebook, for which ranks have their own values."""


_CACHED: type = type(functools.lru_cache(len))
_DEFINITIONS = (type, types.FunctionType, _CACHED)
_TEXT_STREAM: type = io.TextIOWrapper.__mro__[1]
"""The class `io.TextIOBase` without the slow check of an abstract class."""


_WEAK_CONTAINERS = weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet
_WEAK = weakref.ref, *_WEAK_CONTAINERS


@dataclass(slots=True, eq=False)
class Name:
    """Marks each input in the pickle, so that a failure on either side can name it."""

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return begin_input, (self.name,)


def begin_input(name: str) -> str:
    LOADING.get()(name)
    return name


class LiveNamespace(dict[str, object]):
    """A stand-in for the notebook's namespace as the globals of its functions; a rank puts the run's in its place.

    Not empty, since cloudpickle (3.0 to 3.1) copies `__name__` and the like into globals that equal `{}`.
    """

    def __init__(self) -> None:
        super().__init__(live=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return live_namespace, ()


def live_namespace() -> dict[str, object]:
    return NAMESPACE.get()


class ModuleGlobals(dict[str, object]):
    """A stand-in for the globals of a function that a library has made, such as the wrapper of a decorator: a rank puts
    those of its own module in its place. A copy would be apart from what other functions of the library use."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(live=True)
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self._module,)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table = definitions.DISPATCH_TABLE.new_child(standard_objects.BOTH_WAYS)

    def __init__(self, file: Any, tensors: Tensors, buffers: list[memoryview] | None) -> None:
        """Prepare to write to `file`, with large buffers in `buffers`; if that is None, everything goes to `file`."""

        def in_band(buffer: pickle.PickleBuffer) -> bool:
            assert buffers is not None
            view = buffer.raw()
            if view.nbytes > IN_BAND_BYTES:
                buffers.append(view)
            return view.nbytes <= IN_BAND_BYTES

        super().__init__(file, protocol=5, buffer_callback=None if buffers is None else in_band)
        self._tensors = tensors
        self.last: object = None
        """The last object reached; if pickling fails, the one that cannot be pickled."""

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        cls = type(obj)  # `isinstance` would read the `__class__` of proxies, which loads their target
        if issubclass(cls, _DEFINITIONS):
            return self._definition(obj)
        if issubclass(cls, _TEXT_STREAM):
            return self.text(obj)
        reduced = self._tensors.reduce(obj, cls)
        if reduced is not NotImplemented:
            return reduced
        if issubclass(cls, _WEAK):
            return _weak_form(obj)
        return standard_objects.accessor(obj, self.dispatch_table)  # NotImplemented, as cloudpickle's, for most objects

    def text(self, stream: Any) -> Any:
        return _standard_stream(stream)

    def _definition(self, obj: Any) -> Any:
        if isinstance(obj, _CACHED):
            return self.cached(obj)
        if definitions.dispatches(obj) and (form := self.dispatching(obj)) is not None:
            return form
        reduced = super().reducer_override(obj)
        if definitions.is_by_value(reduced):
            if isinstance(obj, types.FunctionType) and (parts := private_torch.compiled(obj)) is not None:
                return compile_again, parts
            return self.by_value(obj, definitions.with_own_bases(obj, definitions.with_own_cells(obj, reduced)))
        return reduced

    def by_value(self, obj: Any, reduced: definitions.Reduced) -> definitions.Reduced:
        return reduced

    def cached(self, function: Any) -> Any:
        return definitions.cached_form(function, sent=False)

    def dispatching(self, function: Any) -> definitions.Reduced | None:
        return definitions.dispatch_form(function, sent=False)


def _standard_stream(stream: object) -> Any:
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name):
            return getattr, (sys, name)
    if isinstance(stream, io.StringIO):
        return NotImplemented
    # cloudpickle would read the whole file and send its text.
    raise pickle.PicklingError("an open file cannot leave its process")


_OF_MODULES = types.ModuleType, type, types.FunctionType


class ModulesByValue(AbstractContextManager["ModulesByValue"]):
    """Modules that exist in the kernel only: while it pickles, cloudpickle sends them and what they define by value."""

    def __init__(self) -> None:
        self._seen: dict[str, types.ModuleType | None] = {__name__: None}

    def register_if_local(self, obj: Any) -> None:
        """Let a module, or the module of a function or class, be sent by value if ranks cannot import it."""
        name = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
        if type(name) is not str or name in self._seen:
            return
        self._seen[name] = None
        module = sys.modules.get(name)
        if module is not None and name not in cloudpickle.list_registry_pickle_by_value() and is_only_here(name):
            cloudpickle.register_pickle_by_value(module)
            self._seen[name] = module

    def __exit__(self, *_: object) -> None:
        for module in filter(None, self._seen.values()):
            cloudpickle.unregister_pickle_by_value(module)
        self._seen = {__name__: None}


class InputPickler(_Pickler):
    """The kernel's pickler. Functions of the notebook use the run's namespace as their globals."""

    dispatch_table = _Pickler.dispatch_table.new_child(standard_objects.FORMS)

    def __init__(
        self,
        namespace: dict[str, object],
        file: Any,
        tensors: Tensors,
        buffers: list[memoryview],
        *,
        identities: Identities | None = None,
        shared: Mapping[int, tuple[str, str]] = types.MappingProxyType({}),
        reads_files: Callable[[], bool] = bool,
    ) -> None:
        """Prepare to write to `file`.

        Args:
            namespace: The names of the notebook.
            file: Takes the pickle.
            tensors: The tensors of this pickle.
            buffers: Takes the large buffers.
            identities: What is sent for collections of ids.
            shared: The objects that ranks have from a set-up, by identity; they are sent by their names.
            reads_files: Returns whether the ranks have the files of this machine.
        """
        super().__init__(file, tensors, buffers)
        self._namespace, self._shared, self._reads_files = namespace, shared, reads_files
        self._identities = identities or Identities()
        self._live = self.globals_ref[id(namespace)] = LiveNamespace()
        self._of_modules: dict[str, ModuleGlobals] = {}
        self._users: dict[type, bool] = {}
        self.sent: list[object] = []
        self.name = ""
        """Name of the last input reached."""
        self._memmap = getattr(sys.modules.get("numpy"), "memmap", None)
        """The only subclass of numpy's arrays that is usually large; numpy puts its data into the pickle itself."""
        self._forms: Mapping[type, Callable[[Any], Any]] | None = None
        """The forms of objects of known libraries; None until an object needs one."""
        self._form_by_class: dict[type, Callable[[Any], Any] | None] = {}
        self._by_value = ModulesByValue()

    def dump(self, obj: object) -> None:
        with self._by_value:
            super().dump(obj)

    def dump_inputs(self, inputs: Mapping[str, object]) -> None:
        """Pickle name, value, name, value, ..."""
        if not CONTAINERS.isdisjoint(map(type, inputs.values())):
            inputs = {**inputs, **self._identities.changed(inputs)}
        self.dump([part for name, value in inputs.items() for part in (Name(name), value)])

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Name:
            self.name = obj.name
            return NotImplemented
        if obj is begin_input:
            return NotImplemented
        if issubclass(type(obj), _OF_MODULES):
            self._by_value.register_if_local(obj)
        if obj is os.environ:
            return getattr, (os, "environ")
        if issubclass(type(obj), BaseException) and (form := exception_form.sent_form(obj)) is not None:
            return form
        if self._shared and (place := self._shared.get(id(obj))) is not None:
            return definitions.shared_value, place
        if type(obj) is self._memmap:
            return self._mapped(obj)
        if (of_library := self._form_of(type(obj))) is not None:
            self.last = obj
            return of_library(obj)
        if (form := super().reducer_override(obj)) is not NotImplemented:
            return form
        if (form := standard_objects.of_base(obj, self.dispatch_table)) is not NotImplemented:
            return form
        if type(obj) is types.CellType:
            return definitions.cell_form(obj, self._identities.sent)
        form = standard_objects.with_getattr(obj, self.dispatch_table)
        return self._with_identities(obj, form) if self._is_users(type(obj)) else form

    def _form_of(self, cls: type) -> Callable[[Any], Any] | None:
        """Return what reduces instances of a class of a known library; None if nothing does."""
        try:
            return self._form_by_class[cls]
        except KeyError:
            if (forms := self._forms) is None:
                forms = self._forms = known.sent_forms()
            found = next((forms[base] for base in cls.__mro__ if base in forms), None)
            self._form_by_class[cls] = found
            return found

    def text(self, stream: Any) -> Any:
        is_file = type(stream) is io.TextIOWrapper and stream not in (sys.stdout, sys.stderr)
        return standard_objects.text_form(stream) if is_file else _standard_stream(stream)

    def _is_users(self, cls: type) -> bool:
        """Return whether a class is the user's, and pickles as objects do that have nothing of their own."""
        if (found := self._users.get(cls)) is None:
            file = getattr(sys.modules.get(cls.__module__), "__file__", None)
            of_user = cls.__module__ == "__main__" or (isinstance(file, str) and file_owner.is_users(file))
            found = self._users[cls] = of_user and standard_objects.is_plain(cls, self.dispatch_table)
        return found

    def _with_identities(self, obj: Any, form: Any) -> Any:
        """Return the form of an object with what is sent for the collections of ids that it holds."""
        if not type(obj).__dictoffset__ or not self._identities.changed(object.__getattribute__(obj, "__dict__")):
            return form
        if form is NotImplemented:
            form = object.__reduce_ex__(obj, pickle.HIGHEST_PROTOCOL)
        make, arguments, state, *rest = form
        if type(state) is not dict:  # of a class with slots, or of a `__getstate__`
            return form
        return make, arguments, {**state, **self._identities.changed(state)}, *rest

    def _mapped(self, array: Any) -> Any:
        if (form := mapped_files.form(array, self._reads_files)) is not NotImplemented:
            return form
        if (form := self._tensors.arrays.reduce(array)) is not NotImplemented:
            return form
        return rebuild_memmap, (self._tensors.arrays.alone(array.view(sys.modules["numpy"].ndarray)),)

    def by_value(self, obj: Any, reduced: definitions.Reduced) -> definitions.Reduced:
        self.sent.append(obj)
        if isinstance(obj, types.FunctionType) and obj.__globals__ is self._namespace:
            used = reduced[2][1]["__globals__"]
            _leave_out_shell(used)
            used |= self._identities.changed(used)
        elif isinstance(obj, types.FunctionType) and (module := definitions.module_of_globals(obj)) is not None:
            make, (code, _, *others), (attributes, slots), *rest = reduced
            stand_in = self._of_modules.setdefault(module.__name__, ModuleGlobals(module))
            reduced = make, (code, stand_in, *others), (attributes, {**slots, "__globals__": {}}), *rest
        return definitions.sent_form(obj, reduced, self._namespace, self._live)

    def cached(self, function: Any) -> Any:
        self.sent.append(function)
        return definitions.cached_form(function, sent=True)

    def dispatching(self, function: Any) -> definitions.Reduced | None:
        self.sent.append(function)
        return definitions.dispatch_form(function, sent=True)


def _weak_form(obj: Any) -> Any:
    """Return the form of a weak reference or container, also of a derived class, with the attributes that it has beside
    its content; NotImplemented for one that pickles itself."""
    cls: Any = type(obj)
    if cls is weakref.WeakMethod:
        return new_method_reference, (obj(),)
    base: Any = next(each for each in _WEAK if issubclass(cls, each))
    if cls is not base and (cls.__reduce__ is not base.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__):
        return NotImplemented
    if base is weakref.ref:
        return new_reference, (obj(), cls), getattr(obj, "__dict__", None) or None
    members = list(obj) if base is weakref.WeakSet else dict(base.items(obj))
    own = {name: value for name, value in vars(obj).items() if name not in vars(base())}
    return new_weak, (cls, base), (members, own), None, None, fill_weak


def new_weak(cls: Any, base: Any) -> Any:
    made = cls.__new__(cls)
    base.__init__(made)
    return made


def new_reference(target: Any, cls: Any = weakref.ref) -> Any:
    """Return a weak reference to an object; a dead one for None."""
    if target is None:
        return weakref.ref.__new__(cls, set())
    _hold(target)
    return weakref.ref.__new__(cls, target)


def new_method_reference(method: Any) -> Any:
    """Return a weak reference to a method; a dead one for None."""
    if method is None:
        return weakref.WeakMethod(types.MethodType(len, set()))
    new_reference(method.__self__)
    return weakref.WeakMethod(method)


def fill_weak(container: Any, state: tuple[Any, dict[str, object]]) -> None:
    """Fill a container that does not keep its members alive."""
    members, own = state
    base = next(each for each in _WEAK_CONTAINERS if isinstance(container, each))
    base.update(container, members)
    vars(container).update(own)
    _hold(members)


def _hold(target: object) -> None:
    """Let the run's namespace keep what the notebook keeps. In the kernel, only the value itself keeps its parts."""
    if (namespace := NAMESPACE.get(None)) is not None:
        held: Any = namespace.setdefault("__distributed_held__", [])
        held.append(target)


def compile_again(context: Callable[[Any], Any], function: Any) -> Any:
    return context(function)


def rebuild_memmap(array: Any) -> Any:
    """Return an array as numpy itself unpickles a mapped one: of its class, without a file, and writable."""
    own = array if array.flags.writeable else array.copy()
    return own.view(sys.modules["numpy"].memmap)


def _leave_out_shell(used: dict[str, object]) -> None:
    for name in _SHELLS_OWN & used.keys():
        value = used[name]
        module = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", "")
        if str(module or type(value).__module__).startswith(("IPython.", "ipykernel.")):
            del used[name]


class ResultPickler(_Pickler):
    """A rank's pickler. Objects of the kernel go back as references, classes of the cell under names of the run."""

    def __init__(self, run: str, by_value: bool, file: Any, tensors: Tensors, buffers: list[memoryview]) -> None:
        super().__init__(file, tensors, buffers)
        self._run = run
        self._with_definitions = by_value

    def _definition(self, obj: Any) -> Any:
        key = definitions.key_of_received(obj)
        if key is not None:
            return definitions.reference(obj, key, _definition_of(obj) if self._with_definitions else None)
        if isinstance(obj, type) and not definitions.is_importable(obj):
            definitions.name_class(obj, self._run)
        return super()._definition(obj)

    def by_value(self, obj: Any, reduced: definitions.Reduced) -> definitions.Reduced:
        return definitions.new_form(obj, reduced) if isinstance(obj, type) else reduced


class _DefinitionPickler(_Pickler):
    """A pickler for a reader that may not have the kernel's objects: everything by value."""

    def by_value(self, obj: Any, reduced: definitions.Reduced) -> definitions.Reduced:
        return definitions.new_form(obj, reduced) if isinstance(obj, type) else reduced


def _definition_of(obj: object) -> bytes | None:
    """Return a pickle of the object itself, including buffers; None if it holds something that cannot be pickled."""
    file = io.BytesIO()
    pickler = _DefinitionPickler(file, Tensors(results=True), None)
    try:
        pickler.dump(obj)
    except Exception:  # noqa: BLE001 - foreign code; the kernel that knows the key does not need it
        return None
    return file.getvalue()


class ShardFinder(pickle.Pickler):
    """A pickler that collects only the sharded tensors, in an order that is the same on every rank."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__(NullFile(), protocol=5, buffer_callback=lambda _: None)
        self._tensors = Tensors(results=True, found=found)

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if obj is same:
            return NotImplemented
        if issubclass(cls, (*_DEFINITIONS, types.ModuleType)):
            return same, (None,)
        return self._tensors.reduce(obj, cls)


class _TorchFinder(InputPickler):
    """A pickler that collects the tensors and modules that travel, by their ids."""

    def __init__(self, namespace: dict[str, object], torch: Any, **options: Any) -> None:
        super().__init__(namespace, NullFile(), Tensors(results=False, look_first=True), [], **options)
        self._torch = torch
        self.found: dict[int, object] = {}

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), (self._torch.Tensor, self._torch.nn.Module)):
            self.found[id(obj)] = obj
            if id(obj) in self._shared and issubclass(type(obj), self._torch.nn.Module):  # its parts do not travel
                parts = (*obj.modules(), *obj.parameters(), *obj.buffers())
                self.found |= {id(part): part for part in parts}
        return super().reducer_override(obj)


def torch_objects_in(
    inputs: Mapping[str, object], namespace: dict[str, object], **options: Any
) -> Mapping[int, object]:
    """Return the tensors and modules that travel with inputs, which can be pickled, by their ids."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "nn"):
        return {}
    finder = _TorchFinder(namespace, torch, **options)
    finder.dump_inputs(inputs)
    return finder.found


class NullFile:
    """A file that discards its data."""

    def write(self, data: bytes | memoryview) -> int:
        return len(data)
