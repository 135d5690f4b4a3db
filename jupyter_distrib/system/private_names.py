"""The private names of other software that this package uses: all of them, with the versions that have them, and
what happens without them. Any process; imports none of that software. `tests/system/test_private_names.py` looks
each of them up in what is installed, and `tests/repository/test_private_names.py` finds uses of other names, or uses
in other files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jupyter_distrib.system import process_environment

_NONE: Mapping[str, Any] = MappingProxyType({})


class Library(NamedTuple):
    """The private names of one library, or of Python itself, that are used.

    An object is `module`, `module:Class`, or `module:Class()` for attributes that its instances or results have.
    """

    name: str
    known: str
    """The versions with which this package was tested."""
    files: tuple[str, ...]
    """The only modules that use the names."""
    needed: Mapping[str, str] = _NONE
    """Required names by object, separated by spaces."""
    spared: Mapping[str, tuple[str, str]] = _NONE
    """Optional names by object, and what happens if they are missing."""
    changing: Mapping[str, tuple[str, str]] = _NONE
    """By object and name, with a space between, the first and the last version with that name; empty if all earlier or
    all later ones have it. The code looks for it before it uses it."""


class MissingNameError(ImportError):
    """This version of a library lacks a private name that this package needs."""


def check(library: Library) -> None:
    """Raise a readable error if a loaded module lacks a required name.

    Raises:
        MissingNameError: The message names what is missing, the version that lacks it, and the versions that have it.
    """
    missing = [
        f"{where}.{name}".replace(":", ".")
        for where, names in library.needed.items()
        if "()" not in where and where.partition(":")[0] in sys.modules
        for name in names.split()
        if not has(found(where), name)
    ]
    if missing:
        raise MissingNameError(
            f"{library.name} {process_environment.version(library.name)} has no {' and no '.join(missing)}, which "
            f"jupyter_distrib needs: install {library.name} {library.known}, or a newer jupyter_distrib."
        )


def found(where: str) -> Any:
    """Return a loaded module, or an object in it; None if there is no such object."""
    module, _, path = where.partition(":")
    owner: Any = sys.modules[module]
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    return owner


def has(owner: object, name: str) -> bool:
    """Return whether an object has an attribute, without computing it where that is a property."""
    return hasattr(type(owner), name) or hasattr(owner, name)


def every(library: Library) -> Iterator[str]:
    """Yield every listed object and name of a library, with a space in between."""
    for where, names in library.needed.items():
        yield from (f"{where} {name}" for name in names.split())
    for where, (names, _) in library.spared.items():
        yield from (f"{where} {name}" for name in names.split())
    yield from library.changing


_FSDP = "torch.distributed.fsdp:fully_shard()"
_C10D = "torch.distributed.distributed_c10d"
_STEP = {
    "_get_fsdp_state()": "_modules_to_run_forward",
    "_get_fsdp_state()._comm_ctx": "all_gather_state post_forward_order",
    "_get_fsdp_state()._state_ctx": "all_states iter_forward_root post_backward_final_callback_queued",
    "param_group": (
        "_all_gather_result _post_reduce_event _all_reduce_state _reshard_after_forward_event _partial_reduce_output "
        "_post_forward_indices _training_state _to_sharded"
    ),
}
"""The names of the state that a step of FSDP leaves behind; from 2.13 on torch discards it itself."""

TORCH = Library(
    name="torch",
    known="2.9 to 2.15",
    files=("system/private_torch.py", "worker/pytorch/private.py"),
    needed={
        _C10D: (
            "_get_default_group _get_default_store _update_default_pg _abort_process_group _coalescing_manager _world"
        ),
        f"{_C10D}:_world": "pg_names pg_group_ranks pg_map pg_backend_config pg_coalesce_state group_count",
        "torch.distributed": "_broadcast_coalesced Logger",
        "torch.distributed:ProcessGroup": "_get_backend _device_types _end_coalescing",
        "torch._C._distributed_c10d:Backend": "_get_sequence_number_for_group",
        "torch._C._distributed_c10d:ProcessGroupGloo": "_set_default_timeout",
        "torch.distributed:Reducer": "_rebuild_buckets _autograd_hook",
        "torch.distributed.rendezvous": "_env_rendezvous_handler _rendezvous_handlers",
        "torch.distributed.utils": "_sync_module_states",
        "torch.nn.parallel:DistributedDataParallel": (
            "_update_process_group _set_params_and_buffers_to_ignore_for_model _lazy_init"
        ),
        "torch:Tensor": "_version _backward_hooks _post_accumulate_grad_hooks",
        "torch.optim:Optimizer()": (
            "_optimizer_step_pre_hooks _optimizer_step_post_hooks _optimizer_state_dict_pre_hooks "
            "_optimizer_state_dict_post_hooks _optimizer_load_state_dict_pre_hooks "
            "_optimizer_load_state_dict_post_hooks"
        ),
        "torch:TypedStorage()": "_untyped_storage",
        "torch:UntypedStorage": "_cdata",
        "torch.autograd:Variable": "_execution_engine",
        "torch.autograd.profiler": "_prepare_profiler _enable_profiler _disable_profiler",
        "torch.autograd.profiler:profile": "_prepare_trace",
        "torch.nn.modules.batchnorm": "_BatchNorm",
        "torch.nn.modules.module": "_EXTRA_STATE_KEY_SUFFIX _forward_unimplemented",
        "torch.nn.utils.parametrize": "_inject_new_class _inject_property",
        "torch.nn:Module()": (
            "_parameters _buffers _compiled_call_impl _forward_pre_hooks _forward_hooks _state_dict_pre_hooks "
            "_load_state_dict_pre_hooks _load_state_dict_post_hooks _forward_pre_hooks_with_kwargs "
            "_forward_hooks_with_kwargs _forward_hooks_always_called"
        ),
        "torch.nn.functional:mse_loss()": "_saved_reduction _saved_target",
        "torch:div()": "_saved_other",
        "torch:sum()": "_saved_self_sym_sizes",
        "torch:compile()": "_orig_mod",
        "torch.utils.data.dataloader": "_BaseDataLoaderIter",
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_shutdown_workers",
        "torch.utils.data:DataLoader": "_get_iterator",
        "torch.utils.data:DataLoader()": "_iterator",
        "torch.utils._pytree": "tree_leaves tree_map_only",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch._tensor": "_rebuild_from_type_v2",
        "torch._C": "PyTorchFileReader",
        "torch.distributed.device_mesh:DeviceMesh()": "_dim_group_names",
        "torch.distributed._composable.contract": "STATE_KEY REGISTRY_KEY",
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
        _FSDP: "_is_fsdp_managed_module _fsdp_use_orig_params",
        f"{_FSDP}._get_fsdp_state()": "_is_root _comm_ctx _state_ctx _device_handle _training_state",
        f"{_FSDP}._get_fsdp_state()._comm_ctx": "all_gather_stream",
        f"{_FSDP}.param_group": "mesh_info post_forward_mesh_info fsdp_params",
        f"{_FSDP}.param_group.mesh_info": "__post_init__",
        f"{_FSDP}.parameter": "_unsharded_param _module_info sharded_param",
        f"{_FSDP}.parameter._module_info": "module param_name shared_modules shared_param_names",
        "torch._C._functorch": "maybe_current_level",
    },
    spared={
        "torch._C._distributed_c10d": (
            "_dump_fr_trace _dump_nccl_trace",
            "the view of ranks that wait for one another names no collectives",
        ),
        "torch.distributed:new_group().options": ("_timeout", "a stalled run is noticed as if torch had no limit"),
        "torch._C": ("_cuda_clearCublasWorkspaces", "torch has no CUDA"),
        "torch.cuda.memory": ("_record_memory_history _snapshot", "a profile has no history of the GPU's memory"),
        "torch._utils": ("_validate_loaded_sparse_tensors", "sparse tensors that were sent once stay in memory"),
        "torch._tensor_str": ("PRINT_OPTS", "`torch.set_printoptions` of the notebook does not hold on the ranks"),
        "torch._dynamo": ("OptimizedModule", "it is loaded at the first `torch.compile`, not before"),
        "torch._dynamo.trace_rules": (
            "add",
            "a compiled function that calls backward() fails under a strategy, or a model is not one graph",
        ),
        # Pickles have these; others are refused.
        "torch.serialization": ("_get_layout", "checkpoints that are shown to be safe are not read"),
        "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING", "the same"),
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper()": (
            "_checkpoint_wrapped_module",
            "names in checkpoints say that a part is computed again in the backward pass",
        ),
        "torch.distributed": (
            "_functional_collectives",
            "a rank that waits in it is shown as waiting in the user's own line",
        ),
    },
    changing={
        "torch.distributed.nn.jit.instantiator _TEMP_DIR": ("", "2.10"),
        "torch.distributed.device_mesh _mesh_resources": ("", "2.9"),
        "torch.distributed.device_mesh:DeviceMesh _get_root_mesh": ("2.10", ""),
        "torch.distributed.device_mesh:DeviceMesh() _pg_registry": ("2.10", ""),
        f"{_FSDP} reset_iter_state": ("2.13", ""),
        f"{_FSDP}._get_fsdp_state() _fsdp_param_group": ("", "2.12"),
        f"{_FSDP}._get_fsdp_state() _fsdp_param_groups": ("2.12", ""),
        **{f"{_FSDP}.{where} {name}": ("", "2.12") for where, names in _STEP.items() for name in names.split()},
    },
)
TORCH_DRY = Library(
    name="torch",
    known="2.11 to 2.13",
    files=(
        "dry_run/device_guard.py",
        "dry_run/fake_cuda.py",
        "dry_run/fake_tensors.py",
        "dry_run/ledger.py",
        "dry_run/recurrent.py",
        "dry_run/world.py",
    ),
    needed={
        "torch._C": "_is_any_autocast_enabled _swap_tensor_impl _get_accelerator",
        "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode init_gpu_context unset_fake_temporarily",
        "torch.utils._python_dispatch": "TorchDispatchMode is_traceable_wrapper_subclass",
        "torch:ops.aten": (
            "_local_scalar_dense _to_copy _unique2 _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _cudnn_rnn _cudnn_rnn_backward"
        ),
        "torch": "_VF _cudnn_rnn",
        "torch:_VF": "_pack_padded_sequence _pad_packed_sequence",
        "torch:Tensor": "_indices _values",
        "torch:ops.aten.mm.default": "_schema",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
        "torch.optim.optimizer": "_foreach_supported_types",
        "torch.nn.parallel.distributed": "_verify_param_shape_across_processes _sync_module_states",
        "torch.distributed:Reducer": "_rebuild_buckets",
        "torch.distributed.tensor": "_sharding_prop",
        "torch.amp.grad_scaler:GradScaler": "_maybe_opt_step",
        "torch.cuda": "_DeviceGuard _lazy_init _sleep _is_compiled _device_count_nvml",
        "torch.distributed.device_mesh:DeviceMesh": "_flatten",
        "torch.nn:Module": "_call_impl",
        "torch.nn:Module()": "_buffers _parameters",
    },
    changing={"torch._C _ensureCUDADeviceGuardSet": ("2.11", "")},
)
"""The names that dry runs use in a process of their own; no rank needs them."""
CLOUDPICKLE = Library(
    name="cloudpickle",
    known="3.0 to 3.1",
    files=("serialization/definitions.py",),
    needed={
        "cloudpickle.cloudpickle": (
            "_class_setstate _function_setstate _get_or_create_tracker_id _lookup_class_or_track "
            "_should_pickle_by_reference _DYNAMIC_CLASS_TRACKER_BY_ID"
        ),
        "cloudpickle.cloudpickle:Pickler": "dispatch_table reducer_override",
        "cloudpickle.cloudpickle:Pickler()": "globals_ref",
    },
)
IPYTHON = Library(
    name="ipython",
    known="8.18 to 9.18",
    files=("kernel/sidebar/cell_outputs.py",),
    spared={
        "IPython.core.displayhook:DisplayHook": (
            "exec_result",
            "the sidebar shows a cell under the number of the one before",
        )
    },
)
IPYKERNEL = Library(
    name="ipykernel",
    known="6.29 to 7.4",
    files=("kernel/notebook/widget_model.py", "kernel/sidebar/cell_outputs.py"),
    spared={
        "ipykernel.zmqshell:ZMQInteractiveShell()": (
            "_last_traceback",
            "a failed cell that ran without a front end has no traceback in the notebook's file",
        ),
        "ipykernel.kernelbase:Kernel()": ("control_handlers", "the sidebar's requests wait for the end of the cell"),
    },
    changing={"ipykernel.comm.comm:BaseComm() _reply_subshell_id": ("7.4", "")},
)
PANDAS = Library(
    name="pandas",
    known="3.1",
    files=("libraries/display_settings.py",),
    needed={"pandas._config.config": "_registered_options _global_config"},
    spared={"pandas": ("_config", "`pandas.set_option` of the notebook does not hold on the ranks")},
)
ACCELERATE = Library(
    name="accelerate",
    known="1.15",
    files=("libraries/known.py", "worker/environment/cell_environment.py"),
    spared={
        "accelerate.state:PartialState": (
            "_shared_state",
            "Accelerate's knowledge of a cell's group outlives the cell, and it is not known that one is there",
        )
    },
)
TRANSFORMERS = Library(
    name="transformers",
    known="5.23",
    files=("libraries/transformers.py",),
    needed={"transformers:TrainingArguments()": "_setup_devices _n_gpu"},
    spared={
        "transformers:PreTrainedModel": ("_no_split_modules", "fsdp chooses the modules that it shards by their size")
    },
)
PYDANTIC = Library(
    name="pydantic",
    known="2.14",
    files=("libraries/pydantic.py",),
    spared={"pydantic": ("_internal", "a function with `validate_call` takes the notebook with it, or is refused")},
)
TORCHMETRICS = Library(
    name="torchmetrics",
    known="1.9",
    files=("libraries/torchmetrics.py",),
    needed={"torchmetrics.metric:Metric": "_wrap_update"},
)
DATASETS = Library(
    name="datasets",
    known="5.2",
    files=("libraries/known.py",),
    spared={
        "datasets:Dataset.from_dict()": ("_fingerprint", "its columns are read instead"),
        "datasets:IterableDataset()": (
            "_distributed _ex_iterable",
            "a stream that is split by hand is split once more, and one with `skip` or `take` by its shards",
        ),
    },
)
MLFLOW = Library(
    name="mlflow",
    known="3.17",
    files=("libraries/mlflow.py", "libraries/mlflow_rank.py", "libraries/mlflow_store.py"),
    needed={
        "mlflow.tracking.fluent": "_active_run_stack _last_active_run_id",
        "mlflow:MlflowClient()": "_tracking_client",
        "mlflow.tracking": "_tracking_service _model_registry",
    },
    spared={
        "mlflow.tracking.fluent": (
            "_active_experiment_id _last_logged_model_id _ACTIVE_MODEL_CONTEXT",
            "`mlflow.set_experiment` is not followed, and the last model of a cell is known to the next",
        ),
        "mlflow.tracking._tracking_service.utils": ("_tracking_uri", "only variables say where the store is"),
        "mlflow.tracking._model_registry.utils": ("_registry_uri", "only variables say where the registry is"),
        "mlflow.environment_variables": ("_MLFLOW_ACTIVE_MODEL_ID", "there is no such variable to forget"),
        "mlflow.utils.import_hooks": ("_post_import_hooks", "autologging of an earlier cell begins with an import"),
        "mlflow.tracing.provider:provider.once": ("_done", "spans that a cell leaves open are parents in the next"),
    },
)
DEEPSPEED = Library(
    name="deepspeed",
    known="0.19",
    files=("libraries/deepspeed.py",),
    needed={
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": "_register_deepspeed_module",
    },
    spared={
        "deepspeed.runtime.engine:DeepSpeedEngine()": (
            "_support_torch_style_backward",
            "`loss.backward()` is passed to the engine, of which there can then be one",
        )
    },
)
RAY = Library(
    name="ray",
    known="2.60",
    files=("pools/ray/serve.py",),
    needed={
        "ray._private.client_mode_hook": "client_mode_wrap",
        "ray._private.state": "available_resources_per_node",
    },
)
PYSPARK = Library(
    name="pyspark",
    known="4.3",
    files=("compat/spark/distributors.py", "pools/spark/application.py"),
    needed={
        "pyspark.ml.torch.distributor:TorchDistributor": "_train_on_dataframe",
        "pyspark:SparkContext()": "_jsc",
    },
)
PYTHON = Library(
    name="Python",
    known="3.11 to 3.14",
    files=("*",),
    needed={
        "asyncio": "_get_running_loop _set_running_loop",
        "atexit": "_run_exitfuncs",
        "bz2:BZ2File()": "_fp",
        "concurrent.futures:ProcessPoolExecutor()": "_processes",
        "concurrent.futures:ThreadPoolExecutor()": "_threads",
        "ctypes:CDLL()": "_name",
        "functools": "_lru_cache_wrapper",
        "importlib.metadata:Distribution": "_normalized_name",
        "importlib.util": "_find_spec",
        "importlib._bootstrap": "_find_and_load_unlocked",
        "lzma:LZMAFile()": "_fp",
        "logging:Formatter()": "_fmt _style",
        "logging:Formatter()._style": "_defaults",
        "multiprocessing.context": "_default_context",
        "multiprocessing.context:_default_context": "_default_context",
        "pickle": "_Pickler",
        "ssl": "_create_default_https_context _create_unverified_context",
        "threading": "_shutdown",
        "weakref:finalize": "_registry",
    },
    spared={
        "dis": ("_parse_exception_table", "an exception group of ranks is shown as itself if no code can catch it"),
        "asyncio:Task": ("_log_destroy_pending", "the warning about a task that has not ended comes twice"),
        "os:environ": ("_data", "its variables are decoded once more"),
        "warnings": ("_warn_unawaited_coroutine", "warnings about coroutines name this package's files"),
        "signal": ("_signal", "the public functions are used, which are slower"),
    },
    changing={
        "asyncio.tasks _swap_current_task": ("3.12", ""),
        "asyncio:DefaultEventLoopPolicy() _local": ("", "3.13"),
        "asyncio:DefaultEventLoopPolicy()._local _loop": ("", "3.13"),
    },
)
LIBRARIES = (
    TORCH, TORCH_DRY, CLOUDPICKLE, IPYTHON, IPYKERNEL, PANDAS, ACCELERATE, TRANSFORMERS, PYDANTIC, TORCHMETRICS,
    DATASETS, MLFLOW, DEEPSPEED, RAY, PYSPARK, PYTHON,
)  # fmt: skip
