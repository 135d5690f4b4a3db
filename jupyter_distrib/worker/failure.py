"""Describes a rank's exception: type, text and the frames of the user's code. Runs in the rank's main thread."""

from __future__ import annotations

import errno
import itertools
import linecache
import os
import re
import shutil
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jupyter_distrib.interfaces import identity, stand_ins
from jupyter_distrib.interfaces.strategy import TrainingStrategy
from jupyter_distrib.libraries import known
from jupyter_distrib.serialization import exceptions, payload
from jupyter_distrib.system import file_owner, open_files
from jupyter_distrib.system.formatting import size
from jupyter_distrib.system.network_interfaces import gloo_hint, nccl_hint
from jupyter_distrib.system.process import NO_KEYBOARD, TOO_MANY_PROCESSES
from jupyter_distrib.wire import messages as m

T = TypeVar("T")

_MAX_FRAMES = 60
_MAX_CAUSES, _MAX_PARTS = 5, 10
_MAX_MESSAGE = 20_000

ADD_STRATEGY = (
    "This cell has no process group: add --strategy ddp to its first line (or call init_process_group in it)."
)
_NO_NCCL = (
    "NCCL is for GPUs, and these ranks have none: ask init_process_group for gloo, or for no backend at all, which is "
    "gloo on CPU ranks and NCCL on GPU ranks; or run it with --backend-fallback."
)
_NO_CUDA = "These ranks have no GPU: use torch.device('cuda' if torch.cuda.is_available() else 'cpu')."
_BROKEN_HOROVOD = (
    "Horovod does not build with this torch: uninstall horovod, and run %distributed_compat horovod in the notebook, "
    "which then serves import horovod.torch."
)
_OUT_OF_MEMORY = (
    "The GPU is out of memory: torch reports it in this way where the driver does not report the use of the GPU, as on "
    "a MIG slice. Use smaller batches, or delete what you do not need."
)
_NO_LOOP = (
    "A cell runs in an event loop only if it awaits something: `await` the task in this cell, or call asyncio.run()."
)
_NO_FILE = "A cell has no file path: run the script with %distributed_run, or with %run in the cell."
_NO_PACKAGE = (
    "Only a module of a package can import relatively: run a script as %distributed_run -m package.module (or python "
    "-m package.module, if it has distributed functions), from the folder of the package, or name the package in the "
    "import."
)
_CUT_FILE = (
    "The file may be one that another rank is writing: open(path, 'wb') on every rank empties it for all of them. Give "
    "torch.save the path instead of the file, or write it on one rank (`if rank == 0:`) and call "
    "torch.distributed.barrier() before it is read."
)
_NO_GROUP = "Default process group has not been initialized"
_HINTS = {
    "bdb.BdbQuit": NO_KEYBOARD,
    "no running event loop": _NO_LOOP,
    "name '__file__' is not defined": _NO_FILE,
    "attempted relative import with no known parent package": _NO_PACKAGE,
    **dict.fromkeys(("doesn't have NCCL built in", "only supported with GPUs, no GPUs found"), _NO_NCCL),
    **dict.fromkeys(("Torch not compiled with CUDA enabled", "_cuda_setDevice", "Found no NVIDIA driver"), _NO_CUDA),
    **{
        f"No module named '{name}'": f"Install it: pip install 'jupyter_distrib[{x}]'"
        for name, x in known.extras().items()
    },
    **{
        f"No module named '{name}'": f"Run %distributed_compat {platform} in the notebook: it serves these imports."
        for name, platform in stand_ins.top_names().items()
    },
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED": _OUT_OF_MEMORY,
    "Extension horovod.torch has not been built": _BROKEN_HOROVOD,
}


def describe(
    error: BaseException,
    *,
    run: str,
    by_value: bool,
    absent: Mapping[str, str] | None = None,
    groupless: str = ADD_STRATEGY,
    depth: int = 0,
) -> m.Failure:
    """Return the description of an exception, its cause and its context, each with its object pickled.

    For `absent` see `Cell`; `groupless` is a note for an exception about a missing process group.
    """
    absent = absent or {}
    name, message = type_name(type(error)), _text_of(error)
    cause = error.__cause__  # which may be false, as an exception with a length is
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return m.Failure(
        type_name=name,
        message=message,
        frames=frames_of(error.__traceback__),
        notes=(
            *_wrong_line(error),
            *_notes(error),
            *_parts(error),
            *_cut_file(error, f"{name}: {message}"),
            *_hints(f"{name}: {message}", groupless),
            *_limit(error, depth),
            *_semaphores(error),
            *_too_many_processes(error, message),
            *_story(error, absent),
            *_plain_model(error),
        ),
        parcel=_parcel_of(error, by_value=by_value, run=run),
        cause=describe(cause, run=run, by_value=by_value, absent=absent, groupless=groupless, depth=depth + 1)
        if cause is not None and depth < _MAX_CAUSES
        else None,
        during=cause is not None and error.__cause__ is None,
        code=_exit_status(error) if isinstance(error, SystemExit) else None,
    )


def _parcel_of(error: BaseException, *, by_value: bool, run: str) -> m.Parcel | None:
    packed = exceptions.pack_exception(error, by_value=by_value, run=run)
    if packed is None:
        return None
    parcel, fd = payload.to_parcel(packed)
    if fd is None:
        return parcel
    os.close(fd)  # for an exception that carries megabytes, only its text is sent
    return None


def groupless(strategy: str, *, everyone: bool) -> str:
    """Return why a cell has no process group, with advice; empty if it has destroyed its own."""
    if not everyone:
        add = "" if strategy != "none" else " and add --strategy ddp"
        return f"Only some of the ranks run this cell, so it has no process group: leave out --on{add}."
    return ADD_STRATEGY if strategy == "none" else ""


def _cut_file(error: BaseException, text: str) -> Iterator[str]:
    if _CUT.match(text) and identity.world_size() > 1:
        files = [tb.tb_frame.f_code.co_filename for tb in _walk(error.__traceback__)]
        if not files or not files[-1].endswith(_OBJECTS):
            yield _CUT_FILE


def _hints(text: str, groupless: str) -> Iterator[str]:
    if groupless and _NO_GROUP in text:
        yield groupless
    yield from (hint for words, hint in _HINTS.items() if words in text)
    if hint := _shared_memory(text) or nccl_hint(text) or gloo_hint(text):
        yield hint
    if found := _NOT_SENT.search(text):
        sent = found[1].partition(".")[0]
        yield f"The file needs {found[1]} of the notebook, which this cell does not name: add --with {sent}."


_CUT = re.compile(
    r"EOFError: Ran out of input|_pickle\.UnpicklingError: pickle data was truncated"
    r"|RuntimeError: PytorchStreamReader failed (?:reading zip archive|finding central directory)"
)
"""Messages of pickle and torch for a file that ends too early."""
_OBJECTS = os.path.join("distributed", "distributed_c10d.py")
"""The end of the path of the file in which torch unpickles objects of other ranks."""
_NOT_SENT = re.compile(r"Can't (?:get attribute|resolve path) '([\w.]+)' on (?:module )?<module '__main__'")
"""The message of pickle for a class of the notebook that the rank does not have."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only its size is read
_STARTERS = ("subprocess.py", os.path.join("multiprocessing", "popen_fork.py"))
"""Ends of the paths of the files in which Python forks; elsewhere the same error may come from an empty pipe."""
_SEMAPHORES = os.path.join("multiprocessing", "synchronize.py")
_NO_ROOM = re.compile(
    r"NCCL[\s\S]*(?:creating shared memory segment|failed to extend \S*/nccl-)"
    r"|unable to (?:write to file|allocate shared memory|mmap|resize|open shared memory)[\s\S]*No space left on device"
    r"|DataLoader worker[\s\S]*(?:Bus error|out of shared memory)"
)
"""Messages of NCCL and of data loaders when /dev/shm is full."""


def _shared_memory(text: str) -> str:
    """Return the size of /dev/shm with advice, for an error that comes from a small one; else nothing."""
    if not _NO_ROOM.search(text) or not SHARED_MEMORY.exists():
        return ""
    if "NCCL" in text:
        return _room(", or keep NCCL from using it with --env NCCL_SHM_DISABLE=1, which is slower")
    return _room(", or load in the rank itself, with num_workers=0" if "DataLoader" in text else "")


def _room(instead: str) -> str:
    total, _, free = shutil.disk_usage(SHARED_MEMORY)
    return (
        f"{SHARED_MEMORY} has {size(total)}, of which {size(free)} are free. If that is too little, give the container "
        f"more (docker run --shm-size=8g; on Kubernetes a volume in memory){instead}."
    )


def _semaphores(error: BaseException) -> Iterator[str]:
    """Yield why /dev/shm cannot hold a lock or queue of multiprocessing, which are files in it."""
    if not isinstance(error, OSError) or not SHARED_MEMORY.exists():
        return
    if not any(tb.tb_frame.f_code.co_filename.endswith(_SEMAPHORES) for tb in _walk(error.__traceback__)):
        return
    if error.errno == errno.ENOSPC:
        yield _room(", or use no processes: DataLoader(num_workers=0)")
    elif error.errno in (errno.EROFS, errno.EACCES):
        yield (
            f"Locks and queues of multiprocessing are files in {SHARED_MEMORY}, where this user cannot write: mount it "
            "writable for everybody, or use no processes: DataLoader(num_workers=0)."
        )


def _too_many_processes(error: BaseException, text: str) -> Iterator[str]:
    """Yield advice where Python, or C code such as gloo, could start no process or thread."""
    if isinstance(error, RuntimeError):
        found = "start new thread" in text or text == os.strerror(errno.EAGAIN)
    else:
        files = (tb.tb_frame.f_code.co_filename for tb in _walk(error.__traceback__))
        found = isinstance(error, BlockingIOError) and any(each.endswith(_STARTERS) for each in files)
    if found:
        yield f"A process or thread could not be started: {TOO_MANY_PROCESSES}, or use fewer ranks or loader workers."


def _limit(error: BaseException, depth: int) -> Iterator[str]:
    if depth == 0 and (note := open_files.advice_on(error)):
        yield note


_NAMESPACES = ("globals()", "locals()", "vars()", "user_ns")


def _story(error: BaseException, absent: Mapping[str, str]) -> Iterator[str]:
    """Yield the reason why a name used by the cell, or by a function of the notebook, is missing on this rank."""
    tracebacks = list(_walk(error.__traceback__))
    if isinstance(error, KeyError) and tracebacks and error.args:
        last = tracebacks[-1]
        line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
        if any(each in line for each in _NAMESPACES) and isinstance(name := error.args[0], str) and name in absent:
            yield absent[name]
    if isinstance(error, NameError) and (story := absent.get(error.name or "")):
        names = tracebacks[-1].tb_frame.f_globals if tracebacks else {}
        if (
            names.get("__name__", names.get("__module__")) == "__main__"
        ):  # `get_type_hints` evaluates strings among a class's names
            yield story


_IN_PLACE = {
    "module": "leave out `.module`",
    "no_sync": "leave it out: the gradients of several backward passes add up without it",
    "clip_grad_norm_": "write torch.nn.utils.clip_grad_norm_(model.parameters(), ...)",
    "backward": "write loss.backward()",
    "step": "write optimizer.step()",
    "save_checkpoint": "write jupyter_distrib.save(folder, model=model)",
    "load_checkpoint": "write jupyter_distrib.load(folder, model=model)",
    **dict.fromkeys(
        ("join", "register_comm_hook", "state_dict_type", "summon_full_params"),
        "wrap the model in the cell yourself to have it: such a model is left unchanged",
    ),
}
"""Names that models have once they are wrapped in torch's classes or DeepSpeed's, with what a cell writes instead."""


def _plain_model(error: BaseException) -> Iterator[str]:
    """Yield what to write in place of an attribute of a wrapper, for a cell that expects it of a model which a
    strategy distributes."""
    if not isinstance(error, AttributeError) or (instead := _IN_PLACE.get(error.name or "")) is None:
        return
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    if module is not None and isinstance(error.obj, module) and isinstance(identity.cell.strategy, TrainingStrategy):
        yield f"Under this strategy the name stands for the plain model, which has no `{error.name}`: {instead}."


def type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt that this exception is, or that code caught before it exited; else None."""
    caught = error.__context__ if isinstance(error, SystemExit) else error
    return caught if isinstance(caught, KeyboardInterrupt) else None


def frames_when_stopped(error: BaseException) -> tuple[m.Frame, ...]:
    """Return the frames where a rank was stopped, even if code caught the interrupt and exited."""
    frames = frames_of(error.__traceback__)
    caught = error.__context__ if isinstance(error, SystemExit) else None
    return frames if caught is None else frames + frames_of(caught.__traceback__)


def frames_of(traceback: types.TracebackType | None) -> tuple[m.Frame, ...]:
    """Return the frames outside this package, outermost first; the middle of a very deep stack is left out."""
    tracebacks = list(_walk(traceback))
    theirs = [tb for tb in tracebacks if not file_owner.is_own(tb.tb_frame.f_code.co_filename)]
    # This package's frames only for its own errors.
    shown = ends_of(theirs or tracebacks)  # first, since a cell may have set a limit of a million frames
    return tuple(frame_at(tb.tb_frame.f_code, tb.tb_lineno, tb.tb_lasti) for tb in shown)


def ends_of(frames: Sequence[T]) -> tuple[T, ...]:
    """Return the frames without the middle of a very deep stack."""
    if len(frames) > _MAX_FRAMES:
        return (*frames[: _MAX_FRAMES // 2], *frames[-_MAX_FRAMES // 2 :])
    return tuple(frames)


def _walk(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def frame_at(code: types.CodeType, lineno: int | None, instruction: int) -> m.Frame:
    """Describe the source location of an instruction, given by its byte index."""
    line, end_line, first, last = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    one_line = line is not None and line == end_line == lineno
    return m.Frame(
        filename=code.co_filename,
        line=lineno or 0,
        function=code.co_name,
        text=linecache.getline(code.co_filename, lineno or 0).strip(),
        first_column=first if one_line and first is not None else -1,
        last_column=last if one_line and last is not None else -1,
    )


def _text_of(error: object, what: str = "exception") -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a user's own __str__
        return f"<str() of the {what} failed with {type(broken).__name__}>"
    return (
        text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}... ({len(text) - _MAX_MESSAGE} more characters)"
    )


def _notes(error: BaseException) -> list[str]:
    try:
        notes = getattr(error, "__notes__", ())
    except Exception:  # noqa: BLE001 - a user's own attribute
        return []
    return [_text_of(note, "note") for note in (notes if isinstance(notes, list | tuple) else [notes])]


def _wrong_line(error: BaseException) -> Iterator[str]:
    """Yield the file and the line that could not be compiled, as Python shows them: no frame is at that line."""
    if isinstance(error, SyntaxError) and isinstance(error.text, str):
        try:
            lines = traceback.format_exception_only(error)
        except Exception:  # noqa: BLE001 - its attributes may be of any type
            return
        yield from (line.rstrip() for line in itertools.takewhile(lambda line: line.startswith("  "), lines))


def _parts(error: BaseException, before: str = "") -> Iterator[str]:
    """Yield a line for each exception in a group, with its place: its own text only counts them."""
    if not isinstance(error, BaseExceptionGroup):
        return
    for number, each in enumerate(error.exceptions[:_MAX_PARTS], 1):
        frames = [frame for frame in frames_of(each.__traceback__) if not file_owner.is_library(frame.filename)]
        text = _text_of(each)
        place = f" ({frames[-1].filename}, line {frames[-1].line})" if frames else ""
        yield f"  {before}{number}. {type_name(type(each))}{f': {text}' if text else ''}{place}"
        yield from (f"    {note}" for note in _notes(each))
        yield from _parts(each, f"{before}{number}.")
    if len(error.exceptions) > _MAX_PARTS:
        yield f"  and {len(error.exceptions) - _MAX_PARTS} more"


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1
