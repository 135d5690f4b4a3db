"""All uses of private parts of torch in processes that have loaded it for ranks; other uses are in
`system/private_torch.py`. `system/private_names.py` lists the names, with the versions that have them. Loaded in ranks;
each function runs in the thread that calls it.

Raises `private_names.MissingNameError` when it is imported with a torch that lacks one of them.
"""

# ruff: noqa: SLF001 - this file is for private parts

from __future__ import annotations

import ctypes
import io
import os
import pickle
import pkgutil
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler as _profiler
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.utils import _pytree
from torch.utils.data import dataloader

from jupyter_distrib.system import private_names

private_names.check(private_names.TORCH)

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, but not exported for checkers
PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
BatchNorm: Any = batchnorm._BatchNorm
"""Base class of all batch normalizations; relies on `_BatchNorm`."""
MEMORY_ENTRIES = 50_000
"""Number of allocations kept in the history of a GPU's memory; writing that many takes a second or two."""
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only
"""Functions for the leaves of nested containers, from `_pytree`."""
_PROFILER: Any = _profiler
_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""Variable that keeps the profiler's library from writing to standard error; read at its first use."""
_ERRORS_ONLY = 2
"""Lowest level of torch's C++ log that means an error."""
_SILENT = 3
"""Level of torch's C++ log that leaves out errors, too."""
_TRACED = tuple(
    f"{__name__.partition('.')[0]}.worker.autoparallel.{each}" for each in ("traced", "training.forward_changes")
)
"""The modules of this package that `torch.compile` traces."""
_WATCHDOG = "watchdg"
"""Last letters of the names of threads that watch a group's collectives: `pt_nccl_watchdg`."""
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""The flight recorders of CPU and of NVIDIA groups."""

# ------------------------------------------------------------------------------------------------------ process groups


def default_group() -> Any:
    """Return the default group; relies on `_get_default_group`."""
    return distributed_c10d._get_default_group()


def default_store() -> Any:
    """Return the store of the default group; relies on `_get_default_store`."""
    return distributed_c10d._get_default_store()


def set_default_group(group: Any) -> None:
    """Make a group the default one, or none; relies on `_update_default_pg`, which destroys nothing."""
    distributed_c10d._update_default_pg(group)


def known_groups() -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield each group's name, the group, and the global ranks of its members; relies on the dictionaries of
    `_world`."""
    world = distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        yield name, group, tuple(world.pg_group_ranks.get(group, ()))


def is_known(group: Any) -> bool:
    """Return whether a group still exists; relies on `_world.pg_map`, which holds the existing groups."""
    return group in distributed_c10d._world.pg_map


def forget_group_count() -> None:
    """Reset the count of groups, which is a part of the keys in the store and must be equal on all ranks; relies on
    `_world.group_count`."""
    distributed_c10d._world.group_count = 0


def abort_groups() -> None:
    """Abort all groups; may be called from another thread than the waiting one. Relies on `_abort_process_group`."""
    distributed_c10d._abort_process_group()


torch_batch: Any = distributed_c10d._coalescing_manager
"""Torch's own manager of batches."""


def replace_batches(manager: Callable[..., Any]) -> None:
    """Replace the manager of batches of sends and receives; relies on `_coalescing_manager`."""
    replace_entry_points({"_coalescing_manager": manager})


def end_batch(group: Any, device: torch.device | None) -> None:
    """End a batch of sends and receives that an exception has cut off, which may wait for the other ranks; relies on
    `_world.pg_coalesce_state` and `_end_coalescing`."""
    group = group or default_group()
    distributed_c10d._world.pg_coalesce_state.pop(group, None)
    if device is not None:
        with suppress(RuntimeError):  # it had not begun, or has ended
            group._end_coalescing(device)


def backends(group: Any) -> str:
    """Return the backends of a group as pairs, `cpu:gloo,cuda:nccl`; relies on `_world.pg_backend_config`."""
    return str(distributed_c10d._world.pg_backend_config.get(group, ""))


def counts(group: Any) -> dict[str, int]:
    """Return the number of collectives in each backend of a group; relies on `_device_types`, `_get_backend` and
    `_get_sequence_number_for_group`, which for the group itself gives the number of one backend: NCCL, if it has it."""
    backends = {backend.name(): backend for backend in map(group._get_backend, group._device_types)}
    return {name: int(backend._get_sequence_number_for_group()) for name, backend in backends.items()}


def backends_of_groups() -> dict[tuple[str, str], Any]:
    """Return the backends of all groups, by the names of group and backend; relies on the same as `counts`."""
    return {
        (name, backend.name()): backend
        for name, group, _ in known_groups()
        for backend in map(group._get_backend, group._device_types)
    }


def counts_of_groups() -> dict[str, int]:
    """Return the number of collectives in each backend of all groups, without backends that do not count; relies on
    `_get_sequence_number_for_group`."""
    found = {}
    for (name, backend), counting in backends_of_groups().items():
        with suppress(RuntimeError):
            found[f"{name} {backend}"] = int(counting._get_sequence_number_for_group())
    return found


def timeout(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's collectives; relies on `options._timeout`."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_timeout(backend: Any, limit: timedelta) -> None:
    """Set the timeout of later collectives; relies on `_set_default_timeout`, like `_set_pg_timeout`."""
    backend._set_default_timeout(limit)


def sequence(group: Any) -> int:
    """Return a number that is equal on ranks that have called equally many collectives in each backend."""
    return sum(count << 64 * place for place, (_, count) in enumerate(sorted(counts(group).items())))


def replace_entry_points(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Replace functions of `torch.distributed`; relies on `distributed_c10d` being the only other module with them."""
    for name, function in functions.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)


def answer_env_rendezvous(handler: Callable[..., Any]) -> None:
    """Install the handler of `env://`; relies on `_rendezvous_handlers`, since a scheme cannot be registered twice."""
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = handler  # a function hides the module


def torch_env_rendezvous(url: str, timeout: timedelta, **others: Any) -> Any:
    """Answer `env://` as torch does; relies on `_env_rendezvous_handler`."""
    return sys.modules["torch.distributed.rendezvous"]._env_rendezvous_handler(url, timeout, **others)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the last collectives, oldest first; relies on the flight recorders' pickles and the keys of an entry."""
    from torch._C import _distributed_c10d

    entries: list[dict[str, Any]] = []
    for name in _RECORDERS:
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            # This process made the pickle. Without stack traces: the first one would take a second.
            entries += pickle.loads(dump(True, False, False)).get("entries", ())
    return entries


def broadcast(tensors: list[torch.Tensor], size_bytes: int) -> None:
    """Give every rank the tensors of rank 0; relies on `_broadcast_coalesced`, which sends two pieces at a time."""
    dist._broadcast_coalesced(default_group(), tensors, size_bytes, 0)  # type: ignore[attr-defined]


def leave_out_of_compiler(compiler: Any) -> None:
    """Have `torch.compile` call this package's functions as they are: it fails at tracing the ones that a strategy has
    put in torch's place. It still traces `_TRACED`, which is called in models, since these could not be one graph
    otherwise. Relies on `trace_rules.add`."""
    if (add := getattr(sys.modules.get(f"{compiler.__name__}.trace_rules"), "add", None)) is None:
        return
    left = [__name__.partition(".")[0]]
    while left:
        name = left.pop()
        if any(each.startswith(f"{name}.") for each in _TRACED):
            left += [each.name for each in pkgutil.iter_modules(import_module(name).__path__, f"{name}.")]
        elif name not in _TRACED:
            add(name)


def remove_folder_of_remote_modules() -> None:
    """Remove the temporary folder that torch (2.9 and 2.10) creates at import for its remote modules; in forked
    processes nothing else removes it. Relies on `_TEMP_DIR`."""
    instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if (folder := getattr(instantiator, "_TEMP_DIR", None)) is not None:
        folder.cleanup()


def spawn_module() -> types.ModuleType:
    """Return `torch.multiprocessing.spawn`; relies on it being loaded, and hidden by the function of that name."""
    return sys.modules["torch.multiprocessing.spawn"]


# --------------------------------------------------------------------------------------------------------- checkpoints


def storage_info() -> Any:
    """Return the class that describes an entry's position in a file of a checkpoint; relies on `_StorageInfo`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # loaded once a checkpoint is written or read

    return _StorageInfo


def saved_pickle(content: bytes) -> bytes:
    """Return the pickle inside a file of `torch.save`, as `torch.load` finds it; relies on `PyTorchFileReader`.

    Raises:
        RuntimeError: There is none.
    """
    found: bytes = torch._C.PyTorchFileReader(io.BytesIO(content)).get_record("data.pkl")
    return found


# ------------------------------------------------------------------------------------------------------- data-parallel


def set_group_of(model: Any, group: Any) -> None:
    """Give a DistributedDataParallel another group; relies on `_update_process_group`."""
    model._update_process_group(group)


def synchronise(model: Any) -> None:
    """Give every rank the weights of rank 0, as a new DistributedDataParallel does; relies on `_sync_module_states`."""
    from torch.distributed.utils import _sync_module_states

    _sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=0,
        params_and_buffers_to_ignore=model.parameters_to_ignore,
    )


def leave_alone(held: Any, names: Iterable[str]) -> None:
    """Make a reducer skip these parameters; relies on `_set_params_and_buffers_to_ignore_for_model`."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(held, names)  # type: ignore[no-untyped-call]


def initialise(ddp: Any) -> None:
    """Create the reducer now instead of in the first forward pass; relies on `DistributedDataParallel._lazy_init`."""
    ddp._lazy_init()


def rebuild_buckets(reducer: Any) -> None:
    """Rebuild the buckets in the order in which gradients arrived; relies on `Reducer._rebuild_buckets`."""
    reducer._rebuild_buckets()


def log_construction(*, on: bool) -> None:
    """Switch the log of DistributedDataParallel's construction on or off: with TORCH_DISTRIBUTED_DEBUG=DETAIL on gloo,
    torch (2.9 to 2.15) takes the wrapper around the group for gloo's own class there and crashes. Relies on it calling
    `dist.Logger`."""
    names: Any = dist
    names.Logger = _Logger if on else _SilentLogger


_Logger: Any = dist.Logger  # type: ignore[attr-defined]


class _SilentLogger(_Logger):  # type: ignore[misc]  # from C++
    def set_construction_data_and_log(self, *described: object) -> None:
        pass


def gradient_hook(reducer: Any) -> Callable[[int], None]:
    """Return the hook that reports a gradient to a reducer; relies on `_autograd_hook`, like its mixed precision."""
    hook: Callable[[int], None] = reducer._autograd_hook
    return hook


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was modified in place; relies on `_version`, which autograd compares."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass; relies on `queue_callback`, as torch's FSDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


# ------------------------------------------------------------------------------------------------- modules and loaders


def own_parameters(module: Any) -> dict[str, Any]:
    """Return a module's own parameters, including shared ones; relies on `_parameters`."""
    parameters: dict[str, Any] = module._parameters
    return parameters


def set_buffer(module: Any, name: str, buffer: Any) -> None:
    """Replace a buffer's tensor; the buffer stays persistent or not, as before. Relies on `_buffers`."""
    module._buffers[name] = buffer


LoaderIterator: Any = dataloader._BaseDataLoaderIter
"""Base class of all data loader iterators; relies on `_BaseDataLoaderIter.__next__`, which no subclass overrides."""
Work: Any = dist.Work
"""A collective in progress; relies on `torch.distributed` and FSDP calling its `wait` as an attribute."""


def end_loaders(values: Iterable[object]) -> None:
    """End the persistent workers of the data loaders among these values; another iteration would start them again.
    Relies on `_iterator` and its `_shutdown_workers`.

    A loader that is freed by the garbage collector waits 5 s for each worker: their signal to end is finalized first
    (measured with torch 2.13)."""
    data: Any = sys.modules.get("torch.utils.data")
    for loader in values if data is not None else ():
        if isinstance(loader, data.DataLoader) and (workers := getattr(loader, "_iterator", None)) is not None:
            loader._iterator = None
            # torchdata's StatefulDataLoader has an iterator without workers there as well.
            if (end := getattr(workers, "_shutdown_workers", None)) is not None:
                end()


# --------------------------------------------------------------------------------------------------- meshes and FSDP


def root_mesh(mesh: Any) -> Any:
    """Return the mesh from which a submesh was sliced; relies on `_get_root_mesh`, or before 2.10 on
    `_mesh_resources`."""
    if (find := getattr(mesh, "_get_root_mesh", None)) is not None:
        return find()
    from torch.distributed import device_mesh

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def group_names(mesh: Any) -> list[Any]:
    """Return the names of a mesh's groups, none if it has no groups; relies on `_dim_group_names`."""
    return list(getattr(mesh, "_dim_group_names", []))


def set_group_names(mesh: Any, names: list[Any]) -> None:
    """Point a mesh to other groups; relies on `_dim_group_names`, and on `_pg_registry` serving torch.compile only."""
    mesh._dim_group_names = names
    mesh._pg_registry = {}


def point_fsdp_to_its_mesh(module: Any) -> None:
    """Make FSDP re-read the groups of its mesh, after a stop at any point of a step; relies on `_get_fsdp_state` and on
    the `__post_init__` of its mesh infos."""
    state = module._get_fsdp_state()
    for param_group in _param_groups(state):
        for info in (param_group.mesh_info, param_group.post_forward_mesh_info):
            if info is not None:
                info.__post_init__()
    if state._is_root and hasattr(state._comm_ctx, "all_gather_stream"):  # else no forward pass has begun
        reset = getattr(module, "reset_iter_state", None)  # since 2.13
        reset() if reset is not None else _reset_step(state)


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups that FSDP gathers as one; relies on `_fsdp_param_groups`, or before 2.13 on
    `_fsdp_param_group`."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [each for each in (state._fsdp_param_group,) if each is not None] if several is None else several


def gathered_parameters(module: Any) -> list[Any]:
    """Return the whole parameters of a module, and of those inside it, that FSDP has gathered at least once, whether or
    not it has freed them since; relies on `_unsharded_param`."""
    states = (part._get_fsdp_state() for part in module.modules() if hasattr(part, "_get_fsdp_state"))
    sharded = (each for state in states for group in _param_groups(state) for each in group.fsdp_params)
    return [each._unsharded_param for each in sharded if hasattr(each, "_unsharded_param")]


def replaced_parameter(module: Any) -> tuple[Any, str] | None:
    """Return the module and the name of a parameter that FSDP gathers with this module, and in whose place the module
    has another tensor now; None if there is none. Relies on `_module_info` and `_unsharded_param`."""
    for each in (each for group in _param_groups(module._get_fsdp_state()) for each in group.fsdp_params):
        info, own = each._module_info, (each.sharded_param, getattr(each, "_unsharded_param", None))
        places = ((info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True))
        for part, name in places:
            if not any(own_parameters(part).get(name) is tensor for tensor in own):
                return part, name
    return None


def transforms_functions() -> bool:
    """Return whether a transformation of torch.func is being executed, whose gradients always create a graph; relies on
    `maybe_current_level`."""
    return torch._C._functorch.maybe_current_level() is not None


def _reset_step(root: Any) -> None:
    """Do what `reset_iter_state` does since 2.13: discard the step that was interrupted. On CUDA it first waits for the
    whole device, where torch waits for single events. Relies on the attributes of 2.9 to 2.12 that are set here."""
    root._device_handle.synchronize()
    context, shared = root._comm_ctx, root._state_ctx
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in shared.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _param_groups(state):
            gathered, group._all_gather_result = group._all_gather_result, None
            if isinstance(work := getattr(gathered, "all_gather_work", None), dist.Work):
                work.wait()
            group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


# ------------------------------------------------------------------------------------------------------------ memory


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS, which it allocates again at its next use; relies on
    `_cuda_clearCublasWorkspaces`."""
    torch._C._cuda_clearCublasWorkspaces()


# ---------------------------------------------------------------------------------------------------------- profiler


def start_profiler(*, on_gpu: bool) -> None:
    """Start recording operators in this thread, on a GPU also kernels and memory; relies on the functions that
    `torch.autograd.profiler.profile` calls. The profiler itself would create an object for each event at the end."""
    profilers: Any = torch.profiler
    kernels = on_gpu and profilers.ProfilerActivity.CUDA in profilers.supported_activities()
    if on_gpu:
        with suppress(Exception):  # an allocator that keeps no history
            # The frames of C++ would be looked up in the files of libraries, which takes seconds.
            torch.cuda.memory._record_memory_history(
                context="alloc", stacks="python", max_entries=MEMORY_ENTRIES, clear_history=True
            )
    profile: Any = _profiler.profile(use_kineto=True, profile_memory=on_gpu, use_device="cuda" if kernels else None)
    config, quiet = profile.config(), os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        _PROFILER._prepare_profiler(config, profile.kineto_activities)
        _PROFILER._enable_profiler(config, profile.kineto_activities)
    finally:
        if quiet == "99":
            os.environ.pop(_LOG_LEVEL, None)
    global _level_before
    if on_gpu and (level := _log_level()) is not None and level.value < _ERRORS_ONLY:
        _level_before, level.value = level.value, _ERRORS_ONLY  # otherwise memory that is freed now causes a warning


def stop_profiler() -> Any:
    """Stop recording; relies on `_disable_profiler`, whose result has `save(path)`."""
    global _level_before
    if _level_before is not None and (level := _log_level()) is not None:
        level.value, _level_before = _level_before, None
    return _PROFILER._disable_profiler()


_level_before: int | None = None


@contextmanager
def errors_only() -> Iterator[None]:
    """Keep warnings out of torch's C++ log meanwhile, from all threads."""
    level = _log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, max(level.value, _ERRORS_ONLY)
    try:
        yield
    finally:
        level.value = before


@contextmanager
def no_errors_of_watchdogs() -> Iterator[None]:
    """Keep errors out of torch's C++ log meanwhile, and until the watchdogs that exist now have ended: they poll
    groups that are being aborted, and log the error that they get. Uses may overlap. Does nothing for a user who has
    set a lower level."""
    global _silences
    level, watchdogs = _log_level(), _watchdogs()
    with _silence:
        if level is None or not (_silences or level.value == _ERRORS_ONLY):
            level = None
        else:
            level.value, _silences = _SILENT, _silences + 1
    try:
        yield
    finally:
        if level is not None:
            until_s = time.monotonic() + _WATCHDOGS_S
            while watchdogs & _watchdogs() and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
            with _silence:
                _silences -= 1
                level.value = _SILENT if _silences else _ERRORS_ONLY


_silence, _silences = threading.Lock(), 0
_LOOK_S = 0.05
_WATCHDOGS_S = 30.0
"""Seconds after which errors are logged again though a watchdog goes on, of a group that nobody has aborted."""


def _watchdogs() -> set[str]:
    """Return the numbers of the threads that watch groups of this process; none where the system names no threads."""
    found = set()
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            if thread.read_text().rstrip().endswith(_WATCHDOG):
                found.add(thread.parent.name)
    return found


def _log_level() -> ctypes.c_int | None:
    """Return the level of torch's C++ log as a writable value; relies on `FLAGS_caffe2_log_level` in its library."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def event_count(result: Any) -> int:
    """Return the number of events in a result of `stop_profiler`; relies on its `events`."""
    return len(result.events())


def memory_history(*, wanted: bool) -> bytes:
    """Stop recording memory. Return the GPU allocator's events since `start_profiler`, in the format of
    pytorch.org/memory_viz; empty if not wanted, or if the device has failed. Relies on `_snapshot` and
    `_record_memory_history`."""
    try:
        snapshot = pickle.dumps(torch.cuda.memory._snapshot()) if wanted else b""
        torch.cuda.memory._record_memory_history(enabled=None)
    except Exception:  # noqa: BLE001 - an error of torch, from a device that has failed
        return b""
    return snapshot


def before_profilers(call: Callable[[], None] | None) -> None:
    """Call a function before any other profiler of torch starts in this process; None to stop doing so. Relies on
    `profile._prepare_trace`, which both of torch's profilers call."""
    original = getattr(_profiler.profile._prepare_trace, "__wrapped__", _profiler.profile._prepare_trace)
    if call is None:
        _profiler.profile._prepare_trace = original  # type: ignore[method-assign]
        return

    @wraps(original)
    def prepare(profile: Any) -> Any:
        call()
        return original(profile)

    _profiler.profile._prepare_trace = prepare  # type: ignore[method-assign]
