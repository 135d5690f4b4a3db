"""Pickles torch's objects: tensors without a copy, modules without their process groups.

Torch is never imported to pickle: without it in `sys.modules` there can be no tensor. To unpickle, the pickle itself
names functions of this file, which import it. The treatment of each kind of object:

* A storage travels once, whole, out of band, however many tensors are views of it; they are views of one storage
  again. A storage of which a single tensor uses less than half is not sent whole: the tensor is copied first. On
  arrival the memory is the buffer itself, so it is writable but, like all memory from outside, cannot grow in place.
* Tensors on an accelerator travel as CPU bytes: captured ones go to the rank's own device, results stay on the CPU.
* A numpy array over the memory of a tensor, or of another array, is again one (`shared_arrays`).
* Captured leaves bring their `.grad` and their hooks; results leave these on the rank, as `torch.save` does. The
  autograd graph is left out. A captured tensor that has one refuses gradients that flow into it, since in the
  notebook they would go on.
* Results lose the parts that belong to the ranks: `DistributedDataParallel` becomes its module, `replicate` and
  `fully_shard` are undone on a copy. A tensor that is sharded over ranks is refused with advice, since `full_tensor()`
  would be a collective that others do not join; unless a strategy has gathered it before, on all ranks (`whole`).

Runs in the thread that pickles.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import operator
import pickle
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from jupyter_distrib.serialization import device_memory
from jupyter_distrib.serialization.shared_arrays import Region, SharedArrays
from jupyter_distrib.system import private_torch

DEVICE: ContextVar[str] = ContextVar("jupyter_distrib_device", default="cpu")
"""The device of captured accelerator tensors, while a rank unpickles its inputs."""

Reduced = tuple[Any, ...]
_SHARDED = (
    "it is sharded over the ranks; in the cell, on every rank, call `.full_tensor()` (for a module "
    "`torch.distributed.checkpoint.state_dict.get_model_state_dict` with `full_state_dict=True`), or return this "
    "rank's part, `.to_local()`"
)
_ELSEWHERE = "it is sharded over the ranks; the value of rank 0 has all of it"
GRAPH_ELSEWHERE = (
    "a gradient reached a tensor that the notebook has computed, and its graph is in the notebook: compute the tensor "
    "in this cell, or use its `.detach()`"
)
_SMALL_BYTES = 1 << 20
"""Largest storage that is not worth a second pass."""

whole: dict[int, tuple[Any, Any]] = {}
"""Sharded tensors that the ranks have gathered for their results, by `id`: the tensor and, on rank 0, its full
contents."""

shapes_only = False
"""Whether the cell's result has shapes in place of tensors that are on an accelerator or sharded over ranks."""


class Tensors:
    """The tensors found in one pickling. `reduce` is called for every object that is not a plain builtin."""

    def __init__(
        self,
        *,
        results: bool,
        compact: frozenset[int] = frozenset(),
        found: list[Any] | None = None,
        look_first: bool = False,
        deferred: bool = False,
        regions: dict[int, Region] | None = None,
    ) -> None:
        """Prepare for one pickling.

        Args:
            results: True for values of a rank, False for inputs from the kernel.
            compact: The result of `wasteful` after a first pass: storages whose only tensor is copied.
            found: If given, sharded tensors are only collected in this list; the pickle is then unusable.
            look_first: Leave out large storages of an accelerator, so that none is moved before `wasteful` is called.
            deferred: Leave large storages of an accelerator there until their bytes are written into shared memory.
            regions: The memory that arrays share, as the arrays of a first pass have found it.
        """
        self.arrays = SharedArrays(regions)
        self._deferred = deferred
        self._found = found
        self._looks_first = look_first
        self.left_out = False
        """Whether something was left out, so that the pickle is unusable."""
        self._results = results
        self._compact = compact
        self._storages: dict[int, Any] = {}
        self._used_bytes: dict[int, list[int]] = defaultdict(list)
        self._plain: dict[int, Any] = {}
        torch = sys.modules.get("torch")
        self._torch: Any = torch if hasattr(torch, "UntypedStorage") and hasattr(torch, "nn") else None
        if self._torch is not None:
            storages = (self._torch.UntypedStorage, self._torch.TypedStorage)
            self._types: tuple[type, ...] = (self._torch.Tensor, *storages, self._torch.nn.Module)
            self._scripted = getattr(getattr(self._torch, "jit", None), "ScriptFunction", None)
            optim = sys.modules.get("torch.optim.lr_scheduler")
            self._schedulers: tuple[type, ...] = () if optim is None or self._results else (optim.LRScheduler,)
            self._optimizer = getattr(sys.modules.get("torch.optim"), "Optimizer", ())
            self._group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)

    def reduce(self, obj: Any, cls: type) -> Any:
        """Return a reducer's tuple, or NotImplemented if the object needs torch's own reducer or is not one of torch's.

        Raises:
            pickle.PicklingError: The object belongs to the ranks; the message says what to return instead.
        """
        if (form := self.arrays.reduce(obj)) is not NotImplemented or self._torch is None:
            return form
        if issubclass(cls, self._types):
            if issubclass(cls, self._torch.Tensor):
                return self._tensor(obj)
            if issubclass(cls, self._torch.nn.Module):
                return self._module(obj)
            return self._storage(obj)
        if cls is self._scripted:
            if any(each.has_default_value() for each in obj.schema.arguments):
                raise pickle.PicklingError("torch cannot save the default arguments of a function of TorchScript")
            return rebuild_script, (_script(obj),)
        if issubclass(cls, self._schedulers):
            make, arguments, state, *_ = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return make, arguments, state, None, None, set_scheduler
        if issubclass(cls, self._optimizer) and cls.__getstate__ is self._optimizer.__getstate__:
            make, arguments, state, *_ = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return make, arguments, {**_own_attributes(obj), **state}
        if self._group is not None and issubclass(cls, self._group):
            raise pickle.PicklingError("a process group exists only between the ranks")
        return NotImplemented

    def wasteful(self, regions: Collection[int] = ()) -> frozenset[int]:
        """Return the storages that were sent in full although a single tensor used less than half of them, and no array
        any of them (`regions`)."""
        return frozenset(
            key
            for key, used in self._used_bytes.items()
            if len(used) == 1
            and key in self._storages  # else torch used a different form, as for XLA
            and self._storages[key].nbytes() > max(2 * used[0], _SMALL_BYTES)
            and not (regions and self._storages[key].data_ptr() in regions)
        )

    # -------------------------------------------------------------------------------------------------- tensors

    def _tensor(self, tensor: Any) -> Any:
        is_sharded = hasattr(tensor, "device_mesh")
        if shapes_only and self._found is None and (is_sharded or tensor.device.type not in ("cpu", "meta")):
            return same, (_shape_of(tensor),)
        if is_sharded:
            return self._sharded(tensor)
        if self._found is not None:
            return same, (None,)
        if not self._results and tensor.is_leaf:
            hooks = private_torch.hooks_of(tensor)
            if hooks or tensor.grad is not None:
                return self._with_extra(tensor, (hooks, tensor.grad))
        if not self._results and not tensor.is_leaf and tensor.layout is self._torch.strided:
            return without_graph, (tensor.detach(),)
        return self._without_grad(tensor)

    def _with_extra(self, tensor: Any, extra: tuple[dict[str, Any], Any]) -> Any:
        """Return the form of a leaf with its hooks and its gradient, which torch leaves out."""
        with warnings.catch_warnings():  # torch warns of hooks that it does not pickle
            warnings.simplefilter("ignore" if extra[0] else "default")
            reduced = self._without_grad(tensor)
            if reduced is NotImplemented:
                reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return (*reduced, extra, None, None, set_extra) if len(reduced) == 2 else reduced

    def _without_grad(self, tensor: Any) -> Any:
        if type(tensor) is not self._torch.Tensor or tensor.device.type == "meta":
            return NotImplemented
        if tensor.is_quantized:
            with warnings.catch_warnings():  # torch warns of its own use of `TypedStorage`
                warnings.simplefilter("ignore")
                return rebuild_quietly, tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if tensor.layout is not self._torch.strided:
            return NotImplemented
        key = private_torch.identity(tensor.untyped_storage())
        if key in self._compact:
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return self._reduced(tensor)
        self._used_bytes[key].append(tensor.nbytes)
        return self._reduced(tensor)

    def _reduced(self, tensor: Any) -> Any:
        """Reduce with torch's own form, repaired for dtypes without a storage class (float8, uint16).

        Their `_rebuild_tensor_v3` requires a typed storage, but gets an untyped one: only `torch.save` (2.13),
        which replaces storages, can read that.
        """
        function, arguments = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        storage = arguments[0]
        if type(storage) is self._torch.UntypedStorage:
            typed = self._torch.TypedStorage(wrap_storage=storage, dtype=self._torch.uint8, _internal=True)
            arguments = (typed, *arguments[1:])
        return function, arguments

    def _sharded(self, tensor: Any) -> Any:
        if all(placement.is_replicate() for placement in tensor.placements):
            return same, (tensor.to_local().detach().requires_grad_(tensor.requires_grad),)
        if self._found is not None:
            self._found.append(tensor)
            return same, (None,)
        if id(tensor) not in whole:
            raise pickle.PicklingError(_SHARDED)
        _, gathered = whole[id(tensor)]
        if gathered is None:
            raise pickle.PicklingError(_ELSEWHERE)
        return same, (gathered,)

    def _storage(self, storage: Any) -> Any:
        if isinstance(storage, self._torch.TypedStorage):
            return rebuild_typed_storage, (self._only(private_torch.untyped(storage)), storage.dtype)
        only = self._only(storage)
        if only is not storage:
            return same, (only,)
        size, device = storage.nbytes(), storage.device.type
        if size == 0 or device == "meta":
            return rebuild_without_data, (size, "meta" if device == "meta" else "cpu")
        moves = is_on_accelerator(storage)
        if not moves and (form := self.arrays.reduce_storage(storage)) is not NotImplemented:
            return form
        if moves and self._looks_first and size > _SMALL_BYTES:
            self.left_out = True
            return same, (None,)
        if moves and self._deferred and size > _SMALL_BYTES:
            return rebuild_storage, (pickle.PickleBuffer(device_memory.unread(storage)), False)
        return rebuild_storage, (_memory(on_host(storage) if moves else storage), moves and not self._results)

    def _only(self, storage: Any) -> Any:
        """Return one Python object per storage, since pickle compares by identity and torch may create several."""
        return self._storages.setdefault(private_torch.identity(storage), storage)

    # -------------------------------------------------------------------------------------------------- modules

    def _module(self, module: Any) -> Any:
        if isinstance(module, self._torch.jit.ScriptModule):
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            return rebuild_script, (_script(module),), tensors, None, None, set_tensors
        if (form := private_torch.parametrized(module)) is not None:
            base, names = form
            return rebuild_parametrized, (base, names), vars(module)
        if not self._results:
            return NotImplemented
        parallel = self._torch.nn.parallel.DistributedDataParallel
        if isinstance(module, parallel):
            return same, (module.module,)
        sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        if sharded is not None and isinstance(module, sharded):
            raise pickle.PicklingError(_SHARDED)
        marks = (*private_torch.composable_keys(), *private_torch.FSDP_MARKS)
        if vars(module).keys().isdisjoint(marks):
            return NotImplemented
        return same, (self._plain.setdefault(id(module), _as_it_was(module, marks)),)


def _shape_of(tensor: Any) -> Any:
    """Return a tensor without contents that has the shape of this one, or of all parts of a sharded one."""
    torch = sys.modules["torch"]
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    if hasattr(tensor, "device_mesh"):
        made.was_sharded = True
    return made.requires_grad_(tensor.requires_grad)


def is_on_accelerator(storage: Any) -> bool:
    """Return whether the storage's contents have to be copied to the host."""
    return bool(storage.device.type != "cpu")


def on_host(storage: Any) -> Any:
    """Return a copy of the storage in the host's memory."""
    return storage.cpu()


def _memory(storage: Any) -> pickle.PickleBuffer:
    """Return the storage's own bytes, which keep the storage alive. Uses ctypes, since numpy may not be installed."""
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array.storage = storage
    return pickle.PickleBuffer(array)


def _as_it_was(module: Any, marks: Collection[str]) -> Any:
    """Return a copy of the module without the changes by torch's `replicate` or `fully_shard`; all parts are shared.

    These functions (torch 2.13) leave a state and a registry in `module.__dict__`, hooks of their own, and a class with
    the bases `(DDP, <the user's>)` or `(FSDPModule, <the user's>)`.
    """
    cls: Any = type(module)
    first = cls.__bases__[0]
    if len(cls.__bases__) == 2 and first.__name__ in {"DDP", "FSDPModule"} and first.__module__.startswith("torch."):
        cls = cls.__bases__[1]
    plain = cls.__new__(cls)
    attributes = {name: value for name, value in vars(module).items() if name not in marks}
    for name in private_torch.HOOKS & attributes.keys():
        attributes[name] = type(attributes[name])(
            (key, hook) for key, hook in attributes[name].items() if not _is_distributed_hook(hook)
        )
    kept = {key for name in private_torch.HOOKS & attributes.keys() for key in attributes[name]}
    for name in private_torch.HOOK_OPTIONS:
        if name in attributes:
            attributes[name] = type(attributes[name])((k, v) for k, v in attributes[name].items() if k in kept)
    plain.__dict__.update(attributes)
    return plain


def _is_distributed_hook(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    owner = getattr(hook, "__self__", None)
    where = str(getattr(hook, "__module__", "") if owner is None else type(owner).__module__)
    return where.startswith(("torch.distributed.", "jupyter_distrib."))


# ------------------------------------------------------------------------------------------- named by the pickles


def same(obj: Any) -> Any:
    return obj


def rebuild_quietly(function: Any, arguments: tuple[Any, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def rebuild_storage(buffer: Any, moves: bool) -> Any:
    """Make a storage over the buffer's own memory, or on `DEVICE`.

    A buffer from the pickle stream is small: it is copied, so that it is aligned, can grow, and holds no other memory.
    """
    torch: Any = importlib.import_module("torch")
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    if moves:
        view = view.to(DEVICE.get())
    elif isinstance(buffer, bytearray):
        return torch.UntypedStorage(len(buffer), device="cpu").copy_(view.untyped_storage(), False)
    return view.untyped_storage()


def rebuild_typed_storage(storage: Any, dtype: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Return the names of the attributes that every optimizer has, and of `step`, which a scheduler replaces."""
    torch: Any = importlib.import_module("torch")
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"step"}


def _own_attributes(optimizer: Any) -> dict[str, Any]:
    """Return what torch does not pickle: hooks, and what the class of an optimizer has added to it: `LBFGS` needs its
    list of parameters, and an optimizer around another one that one."""
    hooks = {name for name in private_torch.HOOKS_OF_OPTIMIZERS if getattr(optimizer, name, None)}
    return {
        name: value for name, value in vars(optimizer).items() if name in hooks or name not in _of_every_optimizer()
    }


def set_scheduler(scheduler: Any, state: Any) -> None:
    """Set the state of a scheduler, and let its optimizer count steps for it, which only a new scheduler arranges: else
    torch warns at the first step."""
    torch: Any = importlib.import_module("torch")
    if hasattr(scheduler, "__setstate__"):
        scheduler.__setstate__(state)
    else:
        scheduler.__dict__.update(state)
    optimizer = getattr(scheduler, "optimizer", None)
    if isinstance(optimizer, torch.optim.Optimizer) and all("initial_lr" in each for each in optimizer.param_groups):
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)


def without_graph(tensor: Any) -> Any:
    """Return a tensor over the same memory that requires gradients; one that reaches it is an error."""
    torch: Any = importlib.import_module("torch")
    return _graph_of_the_notebook().apply(torch.empty(0, requires_grad=True), [tensor])


@functools.cache
def _graph_of_the_notebook() -> Any:
    torch: Any = importlib.import_module("torch")

    class GraphOfTheNotebook(torch.autograd.Function):  # type: ignore[misc]  # torch is loaded here
        @staticmethod
        def forward(_: Any, __: Any, held: list[Any]) -> Any:
            return held.pop()  # not an argument: the result would be a view of it

        @staticmethod
        def backward(*_: Any) -> Any:
            raise RuntimeError(GRAPH_ELSEWHERE)

    return GraphOfTheNotebook


def _script(function: Any) -> bytes:
    """Return a module or function of TorchScript as torch saves it."""
    file = io.BytesIO()
    with warnings.catch_warnings():  # newer versions of torch tell TorchScript's users of its end
        warnings.simplefilter("ignore")
        sys.modules["torch"].jit.save(function, file)
    return file.getvalue()


def rebuild_script(data: bytes) -> Any:
    torch: Any = importlib.import_module("torch")
    return rebuild_quietly(torch.jit.load, (io.BytesIO(data), DEVICE.get()))


def set_tensors(module: Any, tensors: dict[str, Any]) -> None:
    """Put tensors into a module in place of its own: others, such as an optimizer, may have them too."""
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        setattr(operator.attrgetter(owner)(module) if owner else module, attribute, tensor)


def rebuild_parametrized(cls: Any, names: tuple[str, ...]) -> Any:
    """Make a module without contents whose tensors of these names are computed, as those of `weight_norm` are."""
    importlib.import_module("torch.nn.utils.parametrize")
    return private_torch.new_parametrized(cls, names)


def set_extra(tensor: Any, extra: tuple[dict[str, Any], Any]) -> None:
    hooks, tensor.grad = extra
    for name, by_number in hooks.items():
        setattr(tensor, name, by_number)


def rebuild_without_data(size_bytes: int, device: str) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.UntypedStorage(size_bytes, device=device)


def number_hooks_anew() -> None:
    """Let new hooks of this process have numbers that no other process has given: torch keeps them by number, so one of
    the cell would replace one of the notebook."""
    if (hooks := sys.modules.get("torch.utils.hooks")) is not None:
        hooks.RemovableHandle.next_id = max(hooks.RemovableHandle.next_id, time.time_ns())


def after_load() -> None:
    """Clear the list of tensors that torch keeps while unpickling."""
    private_torch.forget_sparse_tensors()
