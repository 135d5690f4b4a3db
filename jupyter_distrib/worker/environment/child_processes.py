"""The processes that a cell starts: spawned ones (`get_context("spawn")` or `"forkserver"`) get the definitions of
notebook and cell, and forked ones exit at the end of the cell.

A spawned process begins as a new program and runs the main file of its parent, so that functions and classes are
found there by name. A cell has no such file, and to run it again would train again: its rank provides a file that
unpickles the definitions of the cell's module instead.

    rank:  multiprocessing asks for the main file  ->  a file in memory, with the pickled definitions
    child: multiprocessing runs that file as `__mp_main__`  ->  `define`

A forked process that comes to the end of the cell is not a rank: it exits as it would at the end of a script.
"""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Iterable, Mapping
from functools import _lru_cache_wrapper
from multiprocessing import resource_sharer, spawn
from typing import Any, NoReturn

import cloudpickle

from jupyter_distrib.cells import cell
from jupyter_distrib.serialization import definitions
from jupyter_distrib.serialization.picklers import NAMESPACE, LiveNamespace
from jupyter_distrib.system import process
from jupyter_distrib.system.nested_code import undecorated
from jupyter_distrib.worker.environment.shell import RankShell

_PACKAGES = "multiprocessing", "multiprocess"
"""Python's package, and its copy that pickles by dill."""
_FIRST_FD, _FDS = 100, 400
_numbers = itertools.cycle(range(_FIRST_FD, _FIRST_FD + _FDS))
"""Descriptor numbers in turn, which give successive files different paths: a fork server runs each path once."""
_open: list[int] = []
"""Descriptors of the current run's main files."""


def install() -> None:
    """Make the definitions of the cell available to processes that this rank spawns, and fork where nothing else is
    chosen."""
    original = spawn.get_preparation_data

    def with_definitions(name: str) -> dict[str, Any]:
        data = original(name)
        main = sys.modules["__main__"]
        if getattr(main, "__file__", None) is None and main.__spec__ is None:
            data["init_main_from_path"] = _main_file(vars(main))
        return data

    spawn.get_preparation_data = with_definitions
    _say_nothing_of_stopped_readers()
    if "fork" in multiprocessing.get_all_start_methods():  # only the default: the cell may choose the method itself
        default: Any = multiprocessing.context._default_context  # noqa: SLF001
        default._default_context = multiprocessing.get_context("fork")  # noqa: SLF001


def _say_nothing_of_stopped_readers() -> None:
    """Leave out the traceback that the worker of a loader prints when its reader is stopped while it takes a batch."""
    original = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        server = trace is not None and trace.tb_frame.f_code.co_filename == resource_sharer.__file__
        if not (server and isinstance(error, (ConnectionError, EOFError))):
            original(kind, error, trace)

    sys.excepthook = excepthook


def begin_cell() -> None:
    """Forget the start method that the previous cell chose, and its main files, which the processes that it spawned
    have read."""
    for fd in _open:
        os.close(fd)
    _open.clear()
    for name in _PACKAGES:
        if (package := sys.modules.get(name)) is not None:
            package.set_start_method(None, force=True)  # the method may be chosen once in the life of a program
            package.process.ORIGINAL_DIR = os.getcwd()  # where spawned processes look for a relative main file


def define(namespace: dict[str, object], data: bytes, refused: Mapping[str, str]) -> None:
    """Put the definitions into the namespace that multiprocessing uses as `__main__` in a spawned process.

    Args:
        namespace: The globals of the main file.
        data: The pickle.
        refused: Names that could not be pickled, each with the error message shown when the process looks it up.
    """
    token = NAMESPACE.set(namespace)
    try:
        namespace.update(cloudpickle.loads(data))
    finally:
        NAMESPACE.reset(token)

    def missing(name: str) -> object:
        if name in refused:
            raise TypeError(refused[name])
        raise AttributeError(name)

    namespace["__getattr__"] = missing


def _main_file(namespace: dict[str, object]) -> str:
    """Return the path of a new file with the namespace's definitions."""
    data, refused = _pickled(namespace)
    text = (
        "import base64\nfrom jupyter_distrib.worker.environment import child_processes\n"
        f"child_processes.define(globals(), base64.b64decode({base64.b64encode(data)!r}), {refused!r})\n"
    )
    with _file() as file:
        file.write(text.encode())
        file.flush()
        fd = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, next(_numbers))
    _open.append(fd)
    return f"/proc/{os.getpid()}/fd/{fd}" if os.path.exists("/proc/self/fd") else f"/dev/fd/{fd}"


def _file() -> io.BufferedRandom | Any:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("jupyter_distrib-main"), "w+b")
    return tempfile.TemporaryFile()


class DefinitionsPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles definitions by value; their globals become those of the reading process."""

    dispatch_table = definitions.DISPATCH_TABLE

    def __init__(self, file: io.BytesIO, namespace: dict[str, object]) -> None:
        super().__init__(file, protocol=5)
        self.globals_ref[id(namespace)] = LiveNamespace()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is RankShell:
            return RankShell, (LiveNamespace(),)
        if type(obj) is _lru_cache_wrapper:
            return definitions.cached_form(obj, sent=False)
        if definitions.dispatches(obj) and (form := definitions.dispatch_form(obj, sent=False)) is not None:
            return form
        return super().reducer_override(obj)


def _pickled(namespace: dict[str, object]) -> tuple[bytes, dict[str, str]]:
    """Return a pickle of the functions, classes and modules in a namespace, and the reasons why others were left
    out."""
    named = {**definitions.received_by_name(), **namespace}
    defined = {name: value for name, value in named.items() if _is_definition(value)}
    try:
        return _dumped(defined, namespace), {}
    except Exception:  # noqa: BLE001 - foreign code; the name is found below
        failed = {name: problem for name, each in defined.items() if (problem := _problem(name, each, namespace))}
    refused = {name: _sentence(name, problem, named, namespace) for name, problem in failed.items()}
    return _dumped({name: value for name, value in defined.items() if name not in failed}, namespace), refused


def _is_definition(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return True
    callables = type, types.FunctionType, _lru_cache_wrapper
    return isinstance(value, callables) and value.__module__ == "__main__"


def _dumped(values: dict[str, object], namespace: dict[str, object]) -> bytes:
    file = io.BytesIO()
    DefinitionsPickler(file, namespace).dump(values)
    return file.getvalue()


def _problem(name: str, value: object, namespace: dict[str, object]) -> str:
    try:
        _dumped({name: value}, namespace)
    except Exception as error:  # noqa: BLE001 - foreign code
        return f"{type(error).__name__}: {error}"
    return ""


def _sentence(name: str, problem: str, named: dict[str, object], namespace: dict[str, object]) -> str:
    read = sorted(each for each in _reads(named[name]) & namespace.keys() if each != name)
    culprits = [each for each in read if _problem(each, namespace[each], namespace)]
    because = f", because it reads {_quoted(culprits)}" if culprits else ""
    return f"`{name}` cannot be given to a spawned process{because} ({problem}). Create it inside the process."


def _reads(value: object) -> set[str]:
    return cell.globals_read(undecorated(value))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def leave_if_forked(rank_pid: int, error: BaseException | None = None) -> None:
    """End this process if it is not the rank but a child that user code has forked.

    Args:
        rank_pid: The rank's process.
        error: The exception that user code raised, if any.
    """
    if os.getpid() != rank_pid:
        _end_forked(error)


def _end_forked(error: BaseException | None) -> NoReturn:
    """Exit at once: exit handlers, locks and threads belong to the rank."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        status = 1
        traceback.print_exception(error)
    process.flush_streams()
    os._exit(status & 0xFF)
