"""Reads the environment of this process: its variables, without decoding all of them again each time; which of them
programs and libraries read once, when they load; its arguments, package and umask; and the packages installed. Standard
library only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache

from jupyter_distrib.system import import_path

OWN = tuple(
    {
        os.path.dirname(os.path.dirname(path)) + os.sep
        for path in (os.path.abspath(__file__), (lambda: 0).__code__.co_filename)
    }
)
"""Folders of this package as they are, and as its code names them in tracebacks and frames: on a node of a cluster,
code may name the folder of the machine on which it was compiled."""
GPU_LOAD_TIME = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "NCCL_",
    "NVIDIA_",
    "NVTE_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
)
"""Variables that CUDA, its libraries and torch read once in a process."""
SET_BY_LIBRARIES = ("CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR")
"""Exceptions: variables that libraries set by themselves, or that other code handles."""
LOAD_TIME = (
    *GPU_LOAD_TIME,
    "LD_",
    "DYLD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "JUPYTER_DISTRIB_",
)
"""Variables that programs and libraries read at load time: kernels that differ in one get separate agents."""
NOT_LOAD_TIME = (
    "CUDA_VISIBLE_DEVICES",
    "PYTHONSTARTUP",
    "PYDEVD",
    "PYTHONBREAKPOINT",
    "PYTEST",
    "JUPYTER_DISTRIB_POOL",
    "JUPYTER_DISTRIB_STRATEGY",
    "JUPYTER_DISTRIB_CONFIG",
)
SET_ON_RANKS = frozenset(
    (
        *(f"{of}{name}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")),
        *("NODE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
        *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS")),
        *(f"JUPYTER_DISTRIB_{name}" for name in ("AGENT", "GROUP", "WORKER")),
    )
)
"""Variables that each rank has from this package, whatever the user sets."""

_OF_FLAGS = {
    "dev_mode": "PYTHONDEVMODE",
    "no_user_site": "PYTHONNOUSERSITE",
    "optimize": "PYTHONOPTIMIZE",
    "utf8_mode": "PYTHONUTF8",
}
"""Flags of an interpreter, with the variables that set them in another one."""


def for_interpreter() -> dict[str, str]:
    """Return the variables with which another interpreter runs code, and finds packages, as this one does, whatever
    the flags on its command line were: `-O`, `-s`, `-X utf8`, `-X dev`, and `-I` or `-E` against variables."""
    flags = {name: str(int(value)) for flag, name in _OF_FLAGS.items() if (value := getattr(sys.flags, flag))}
    ignored = "PYTHON" if sys.flags.ignore_environment else "\0"
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ignored)}, **flags}


def variables() -> dict[str, str]:
    """Return the content of `os.environ`."""
    return dict(present())


def present() -> Mapping[str, str]:
    """Return the content of `os.environ`, not to be changed. Every cell asks for it, in the kernel and on each rank,
    and decoding it all takes a tenth of what a cell may cost."""
    raw = getattr(os.environ, "_data", None)  # CPython keeps the environment there as the system gave it
    return os.environ if raw is None else _decoded(tuple(raw.items()))


def in_ipython() -> bool:
    """Return whether IPython runs the program of this process, as in a kernel."""
    shell = sys.modules.get("IPython.core.interactiveshell")
    return shell is not None and bool(shell.InteractiveShell.initialized())


def argv() -> tuple[str, ...]:
    """Return `sys.argv` if it is that of a script, or has arguments that the notebook has set; empty if it only tells
    how the kernel was started, names no script, or is no list of texts: the notebook may set it to anything."""
    found = getattr(sys, "argv", None)
    try:
        given = tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()
    except Exception:  # noqa: BLE001 - the user's `__str__`
        given = ()
    if not any(given):  # such as that of `python < script.py`
        return ()
    if not in_ipython():
        return given
    arguments = given[1:]
    return given if arguments and arguments != tuple(sys.orig_argv[-len(arguments) :]) else ()


def package() -> str:
    """Return the package of the program, as `python -m` or the notebook has set it; empty for none."""
    name = getattr(sys.modules["__main__"], "__package__", None)
    return name if isinstance(name, str) else ""


def version(package: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        distribution = import_path.distribution(package)
    except ModuleNotFoundError:
        return ""
    text = distribution.read_text("METADATA") or ""  # `version` would parse all of it as a mail, and torch's is long
    found = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return found[1] if found else distribution.version


@lru_cache(maxsize=1)
def _decoded(raw: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in raw}


def load_time_changes(env: dict[str, str]) -> dict[str, str]:
    """Return the changed variables that a forked rank would read too late."""
    return {name: value for name, value in env.items() if _is_load_time(name) and os.environ.get(name) != value}


def _is_load_time(name: str) -> bool:
    return name.startswith(LOAD_TIME) and not name.startswith(NOT_LOAD_TIME)


def load_time_variables() -> Iterator[str]:
    """Yield the load-time variables for interpreters that run code as this one does, each with its value."""
    return (f"{name}={value}" for name, value in for_interpreter().items() if _is_load_time(name))


def umask() -> int:
    """Return this process's umask, without changing it where the system reports it (proc_pid_status(5))."""
    try:
        status = os.open("/proc/self/status", os.O_RDONLY)
        try:  # every cell reads it: half the time of a file object
            return int(os.read(status, 256).partition(b"\nUmask:")[2].split(maxsplit=1)[0], 8)
        finally:
            os.close(status)
    except (OSError, ValueError, IndexError):
        pass
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
