"""The uses of parts of torch that torch does not promise to keep, for processes that may not have loaded it: it is
never imported here. Ranks have further ones in `worker/pytorch/private.py`; `system/private_names.py` lists the names.
"""

# ruff: noqa: SLF001 - this file is for private parts

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

COLLECTIVES = "_functional_collectives.py"
"""The file, in `torch/distributed`, of the collectives that `torch.compile` can trace."""
COMPILER = "torch._dynamo"
"""The module that `torch.compile` loads."""
ITERATOR_MAKER = "_get_iterator"
"""The method by which a data loader makes the iterator of one pass."""
ITERATOR_CLASS = "_BaseDataLoaderIter"
"""The class of these iterators."""
LAST_ITERATOR = "_iterator"
"""The attribute of a data loader with the iterator that it uses again."""
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The names under which `torch.compile` and activation checkpointing keep the module that they wrap."""
MEMORY_FORMAT = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
LAYOUT = "torch.serialization._get_layout"
"""The functions that the description of a checkpoint names in its pickle."""
CALLS_ANOTHER = "torch._tensor._rebuild_from_type_v2"
"""The function in pickles of tensors that calls the function that is its first argument."""
STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
"""Module and name of the class by which that pickle names the place of an entry in a file."""
FSDP_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""The attributes that `fully_shard` sets on each module that it takes care of."""
HOOKS = frozenset(
    {
        "_forward_pre_hooks",
        "_forward_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
"""The attributes of a module with hooks by their number."""
HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""The attributes with the numbers of hooks that are called in a different way."""
HOOKS_OF_OPTIMIZERS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""The attributes of an optimizer with hooks by their number."""


def is_extra_state(key: str) -> bool:
    """Return whether the state of a model has under this name what `get_extra_state()` returns."""
    return bool(key.rpartition(".")[2] == sys.modules["torch.nn.modules.module"]._EXTRA_STATE_KEY_SUFFIX)


def hooks_of(tensor: Any) -> dict[str, Any]:
    """Return the attributes of a leaf that hold hooks by their number: those for its gradient, and those for the time
    when it has been added up."""
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    return {name: hooks for name in names if (hooks := getattr(tensor, name, None))}


def has_gradient_hook(tensor: Any) -> bool:
    """Return whether a tensor has hooks for its gradient; relies on `_backward_hooks`."""
    return bool(tensor._backward_hooks)


def identity(storage: Any) -> int:
    """Return the identity of a storage: its address in C++, since torch may make several Python objects for it. Relies
    on `_cdata`."""
    address: int = storage._cdata
    return address


def untyped(storage: Any) -> Any:
    """Return the storage without a type behind one with a type, whose public methods warn that it is deprecated; relies
    on `_untyped_storage`."""
    return storage._untyped_storage


def compiled(function: Any) -> tuple[Any, Any] | None:
    """Return what `torch.compile` has made a function with, and the function as it was; None for another function.
    Relies on the module of the former, which stands in the closure."""
    contexts = f"{COMPILER}.eval_frame"
    if function.__globals__.get("__name__") != contexts or not hasattr(function, "__wrapped__"):
        return None
    for cell in function.__closure__ or ():
        if type(cell.cell_contents).__module__ == contexts:
            return cell.cell_contents, function.__wrapped__
    return None


def parametrized(module: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the class of a module before `torch.nn.utils.parametrize` has changed it, and the names of the tensors
    that it computes since; None for another module. Relies on that class's place among the bases of the new one."""
    if type(module).__module__ != "torch.nn.utils.parametrize" or not hasattr(module, "parametrizations"):
        return None
    return type(module).__bases__[0], tuple(module.parametrizations)


def new_parametrized(cls: Any, names: tuple[str, ...]) -> Any:
    """Return a module without contents of the class that `parametrize` makes for these names; relies on
    `_inject_new_class` and `_inject_property`."""
    parametrize = sys.modules["torch.nn.utils.parametrize"]
    module = cls.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def has_forward(cls: Any) -> bool:
    """Return whether modules of a class can be called; relies on the name of the function that takes its place."""
    return getattr(cls.forward, "__name__", "") != "_forward_unimplemented"


def unwrapped(module: Any) -> Any:
    """Return the user's own module behind a wrapper of `torch.compile`, else the module itself; relies on
    `_orig_mod`."""
    return getattr(module, "_orig_mod", module)


def is_compiled_in_place(module: Any) -> bool:
    """Return whether `module.compile()` was called; relies on `_compiled_call_impl`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def saved_reduction(node: Any) -> int | None:
    """Return the number of the reduction that a loss has saved in its graph; relies on `_saved_reduction`."""
    number: int | None = getattr(node, "_saved_reduction", None)
    return number


def saved_divisor(node: Any) -> Any:
    """Return the divisor that a division has saved in its graph, or None; relies on `_saved_other`."""
    with suppress(Exception):  # as for a target, see below
        return getattr(node, "_saved_other", None)
    return None


def summed_sizes(node: Any) -> tuple[int, ...] | None:
    """Return the shape of what a sum has added up, or an index has selected from; relies on `_saved_self_sym_sizes`."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else tuple(map(int, sizes))


def saved_target(node: Any) -> Any:
    """Return the target that a loss has saved in its graph, or None; relies on `_saved_target`."""
    with suppress(Exception):  # freed or changed by now, or a user's hook raises: backward() reports it
        return getattr(node, "_saved_target", None)
    return None


def forget_sparse_tensors() -> None:
    """Empty the list in which torch keeps every unpickled sparse tensor until `torch.load` checks them; relies on
    `_validate_loaded_sparse_tensors`, which empties it."""
    check: Callable[[], None] | None
    check = getattr(sys.modules.get("torch._utils"), "_validate_loaded_sparse_tensors", None)
    if check is not None:
        check()


def print_options(torch: Any) -> Any:
    """Return the object with the options of `torch.set_printoptions`; relies on `PRINT_OPTS`."""
    return getattr(torch._tensor_str, "PRINT_OPTS", None)


def has_iterator(loader: Any) -> bool:
    """Return whether a data loader keeps the iterator of an earlier pass, for its persistent workers; relies on
    `_iterator`."""
    return getattr(loader, "_iterator", None) is not None


def drop_iterator(loader: Any) -> None:
    """Let a data loader make a new iterator for its next pass; relies on `_iterator`."""
    loader._iterator = None


def composable_keys() -> tuple[str, ...]:
    """Return the attributes in which `replicate` and `fully_shard` keep what they did to a module; none before their
    first use. Relies on `STATE_KEY` and `REGISTRY_KEY`."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    return () if contract is None else (contract.STATE_KEY, contract.REGISTRY_KEY)
