"""Makes torch accept tensors without values where it expects real ones. Process of a dry run; installed once.

The replacements, each for something that would otherwise fail:

    numbers from a tensor             guessed, and the line recorded (`Ledger.guess`)
    states of random numbers          left as they are
    `Module.to`, `.data =`            tensors are swapped, without the checks that only real ones pass
    for-loop optimizers               torch would take them for tensors of unknown types: the usual ones are used
    attention, recurrent layers       a GPU's kernels in place of the plain matrices and steps
    DataLoader workers, pinned memory in this process: a worker would have no fake tensors
    DistributedDataParallel           torch's own reducer, whose collectives have no result to wait for
    GradScaler                        always steps: gradients count as finite
    `torch.compile`                   left out: it saves memory, so the numbers are an upper bound
    `torch.save`, checks of values    left out: there are none
"""

# ruff: noqa: SLF001 - private names, listed in `system/private_names.py`
from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from jupyter_distrib.dry_run import recurrent
from jupyter_distrib.dry_run.ledger import Ledger, aten

_NUMPY = {
    torch.float64: "f8",
    torch.float32: "f4",
    torch.float16: "f2",
    torch.int64: "i8",
    torch.int32: "i4",
    torch.int16: "i2",
    torch.int8: "i1",
    torch.uint8: "u1",
    torch.bool: "?",
}
_OF_A_GPU = (
    "can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)
_WITH_GRADIENT = "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
_FLASH_WIDTH = 256
Loaded = tuple[int, int]
"""Size of the batches of a data loader, and number of its samples; 0 if unknown."""


unfaked = unset_fake_temporarily
"""Returns a context in which tensors have values again."""


def new_mode() -> FakeTensorMode:
    """Return a mode in which tensors have no values, but may be combined with tensors that have."""
    FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment,method-assign]
    module: Any = importlib.import_module("torch._subclasses.fake_tensor")
    module.init_gpu_context = lambda *_: None
    return FakeTensorMode(allow_non_fake_inputs=True)


def install(ledger: Ledger, mode: FakeTensorMode, batch_factor: float) -> list[Loaded]:
    """Install all replacements. Return batches and samples of the user's data loaders, to which new ones are added.

    Args:
        ledger: The ledger of this dry run.
        mode: The mode that makes tensors fake.
        batch_factor: The factor by which these batches are made larger.
    """
    loaders: list[Loaded] = []
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    importlib.import_module("torch.distributed.fsdp")
    _give_numbers(ledger)
    _keep_states_of_generators()
    _swap_tensors()
    _use_kernels_of_gpus()
    recurrent.install(ledger.guess, mode)
    _load_data_here(loaders, ledger.is_users, batch_factor)
    _reduce_without_others()
    _make_meshes_of_real_tensors()
    _leave_out()
    _count_resized(ledger)
    return loaders


# ------------------------------------------------------------------------------------------------ values


def _give_numbers(ledger: Ledger) -> None:
    fake: Any = FakeTensor

    def number(tensor: Any) -> Any:
        usual = 1.0 if tensor.dtype.is_floating_point else 1
        return ledger.guess(False if tensor.dtype is torch.bool else usual)

    def tolist(tensor: Any) -> Any:
        if tensor.constant is not None:
            return tensor.constant.tolist()
        if tensor.dim() == 0:
            return number(tensor)
        return [number(tensor)] * len(tensor) if tensor.dim() == 1 else [each.tolist() for each in tensor]

    def numpy(tensor: Any, *_: Any, **__: Any) -> Any:
        if tensor.device.type != "cpu":
            raise TypeError(_OF_A_GPU.format(device=tensor.device))
        if tensor.requires_grad:
            raise RuntimeError(_WITH_GRADIENT)
        if tensor.constant is not None:
            with unset_fake_temporarily():
                return tensor.constant.numpy()
        np: Any = importlib.import_module("numpy")
        return ledger.guess(np.ones(tuple(tensor.shape), dtype=_NUMPY.get(tensor.dtype, "f4")))

    fake.tolist, fake.numpy = tolist, numpy
    fake.__array__ = lambda tensor, dtype=None, **_: numpy(tensor) if dtype is None else numpy(tensor).astype(dtype)
    fake.__format__ = lambda tensor, spec: format(tensor.item(), spec) if tensor.dim() == 0 else repr(tensor)
    fake.pin_memory = lambda tensor, *_: tensor
    fake.is_pinned = lambda tensor, *_: False
    fake.record_stream = lambda tensor, *_: None
    fake.__deepcopy__ = _copy
    tensor_class: Any = torch.Tensor
    tensor_class.share_memory_ = lambda tensor: tensor


def _keep_states_of_generators() -> None:
    """Let a generator ignore a state on which ranks agree, since that has no values here."""
    everything: Any = torch
    real: Any = torch.Generator
    set_rng_state = torch.set_rng_state

    class Kind(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

    class Generator(real, metaclass=Kind):  # type: ignore[misc]
        def set_state(self, state: Any) -> Any:
            return self if isinstance(state, FakeTensor) else super().set_state(state)

    everything.Generator = Generator
    everything.set_rng_state = lambda state: None if isinstance(state, FakeTensor) else set_rng_state(state)


def _copy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        with torch.no_grad():
            copy: Any = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _swap_tensors() -> None:
    fake, utils = FakeTensor, torch.utils
    data: Any = torch.Tensor.data

    def set_data(tensor: Any, value: Any) -> None:
        if isinstance(value, FakeTensor) and (value.device != tensor.device or value.dtype != tensor.dtype):
            needs_gradient = tensor.requires_grad
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made = torch.nn.Parameter(value, needs_gradient) if is_parameter else value.detach()
            swap(tensor, made.requires_grad_(needs_gradient))
        else:
            data.__set__(tensor, value)

    fake.data = property(data.__get__, set_data)  # type: ignore[assignment]
    utils.swap_tensors = swap


def swap(one: Any, other: Any) -> None:
    """Swap two tensors, as `torch.utils.swap_tensors` does, but although weak references to them exist."""
    for each in (one, other):
        vars(each)
    one.__class__, other.__class__ = other.__class__, one.__class__
    of_one, of_other = dict(vars(one)), dict(vars(other))
    for each, attributes in ((one, of_other), (other, of_one)):
        vars(each).clear()
        vars(each).update(attributes)
    torch._C._swap_tensor_impl(one, other)


@contextmanager
def unpickled(mode: FakeTensorMode, device: str, ledger: Ledger, *, shards: bool) -> Iterator[None]:
    """Make tensors that the block unpickles fake, with tensors of an accelerator on this device.

    Args:
        mode: The mode that makes tensors fake.
        device: The device.
        ledger: The ledger of this dry run.
        shards: Whether the strategy shards what earlier cells have left in shards on the ranks.
    """
    before = {id(each) for each in _tensors()}
    yield
    with torch.no_grad():
        for each in [each for each in _tensors() if id(each) not in before and not isinstance(each, FakeTensor)]:
            ledger.counts = not (shards and hasattr(each, "was_sharded"))
            fake = _on(device, each, mode) if each.is_meta else mode.from_tensor(each)
            swap(each, fake)
            ledger.adopt(each)
    ledger.counts = True


def _tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def _on(device: str, tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


# ------------------------------------------------------------------------------------------------ kernels


def _use_kernels_of_gpus() -> None:
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    optimizer._foreach_supported_types.append(FakeTensor)
    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = _attention(functional.scaled_dot_product_attention)


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(  # noqa: PLR0917 - torch's own parameters
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        three = query, key, value
        fits = query.dim() == 4 and len({(each.device, each.dtype, each.shape[-1]) for each in three}) == 1
        if query.device.type != "cuda" or not fits:
            return original(*three, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa and key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        half = query.dtype in (torch.float16, torch.bfloat16)
        if attn_mask is None and half and query.shape[-1] <= _FLASH_WIDTH:
            flash = aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        bias = _bias(attn_mask, query, key)
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

    return functools.wraps(original)(scaled_dot_product_attention)


def _bias(mask: Any, query: Any, key: Any) -> Any:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    return mask.expand(*query.shape[:3], key.shape[2])


# ------------------------------------------------------------------------------------------------ data and ranks


_OF_WORKERS = (
    "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout",
    "pin_memory_device", "worker_init_fn",
)  # fmt: skip


def _load_data_here(loaders: list[Loaded], is_users: Callable[[str], bool], batch_factor: float) -> None:
    loader: Any = importlib.import_module("torch.utils.data").DataLoader
    original = loader.__init__

    @functools.wraps(original)  # other code reads its signature
    def begin(self: Any, *args: Any, **keywords: Any) -> None:
        for name in _OF_WORKERS:
            keywords.pop(name, None)
        args = args[:5]
        size = args[1] if len(args) > 1 else keywords.get("batch_size", 1)
        if isinstance(size, int) and is_users(sys._getframe(1).f_code.co_filename):
            loaders.append((size, _length(args[0] if args else keywords.get("dataset"))))
            args, keywords["batch_size"] = args[:1] + args[2:], max(1, round(size * batch_factor))
            keywords |= dict(zip(("shuffle", "sampler", "batch_sampler"), args[1:], strict=False))
            args = args[:1]
        original(self, *args, **keywords)

    loader.__init__ = begin


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        return 0


def _reduce_without_others() -> None:
    parallel: Any = importlib.import_module("torch.nn.parallel.distributed")
    parallel._verify_param_shape_across_processes = lambda *_, **__: True
    parallel._sync_module_states = lambda *_, **__: None
    original = parallel.DistributedDataParallel.__init__

    def reduced(_: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    reduced.__annotations__.clear()  # torch compares the annotations with classes, and these are strings

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **keywords: Any) -> None:
        keywords["find_unused_parameters"] = False
        original(self, *args, **keywords)
        self.register_comm_hook(None, reduced)

    parallel.DistributedDataParallel.__init__ = begin
    world: Any = dist
    world.Reducer._rebuild_buckets = lambda _: False
    world.Reducer.prepare_for_forward = lambda _: None  # in a CUDA build it times the pass with events of a GPU
    world.Logger.set_runtime_stats_and_log = lambda _: None


def _make_meshes_of_real_tensors() -> None:
    meshes: Any = importlib.import_module("torch.distributed.device_mesh")
    mesh = meshes.DeviceMesh
    for name in ("__init__", "__getitem__", "_flatten"):
        if hasattr(mesh, name):
            setattr(mesh, name, _unfaked(getattr(mesh, name)))
    replace_everywhere("init_device_mesh", meshes.init_device_mesh, _unfaked(meshes.init_device_mesh))


def _unfaked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args, **keywords)

    return call


def replace_everywhere(name: str, original: Any, new: Any) -> None:
    """Replace a function in every module that has imported it by its name."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            with suppress(Exception):  # a module that computes its attributes
                if vars(module).get(name) is original:
                    setattr(module, name, new)


# ------------------------------------------------------------------------------------------------ the rest


def _leave_out() -> None:
    everything: Any = torch

    def compile(model: Any = None, **_: Any) -> Any:  # noqa: A001 - torch's name
        return model if model is not None else lambda function: function

    everything.compile = compile
    everything.nn.Module.compile = lambda *_, **__: None
    everything.save = lambda *_, **__: None
    torch.distributions.Distribution.set_default_validate_args(False)  # checks of values
    scaler: Any = importlib.import_module("torch.amp.grad_scaler").GradScaler
    scaler._maybe_opt_step = lambda _, optimizer, state, *args, **keywords: optimizer.step(*args, **keywords)


def _count_resized(ledger: Ledger) -> None:
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    def resize_(self: Any, size: int) -> Any:
        out = original(self, size)
        ledger.resized(self)
        return out

    storage.resize_ = resize_
