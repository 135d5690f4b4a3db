"""The forkserver: a process that has imported torch and the worker's code, and forks clean ranks in milliseconds.

    agent --Fork + descriptors--> forkserver --fork--> helper --fork--> rank, rank, ... ; helper exits
                                                                       (the agent, a subreaper, becomes their parent)

Single-threaded; never initialises CUDA; holds no user state. It serves as soon as torch is imported. When the agent
asks for it, it forks a second forkserver that goes on to import the modules that the first optimizer, DDP or FSDP would
import (2 s on a small machine); the agent changes over to that one when it is ready.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from jupyter_distrib.interfaces import framework
from jupyter_distrib.system import open_files, private_names, process, process_environment, signals
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire import versions
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.environment import bytecode, local_modules, threads

_CPP_LOG = "TORCH_CPP_LOG_LEVEL"


def main(agent_pid: int, first_fd: int, preloaded_fd: int) -> None:
    """Serve on the first link; a forked copy serves on the second once it has imported more."""
    process.die_with_parent(agent_pid)
    signals.reset()  # the agent ignores some
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bytecode.distrust_old()
    gc.disable()  # imported objects stay: repeated collections of all of them would take a tenth of torch's import

    if refusal := versions.too_old(process_environment.version("torch")):
        sys.exit(refusal)
    try:
        with threads.loading(), _without_warnings_of_cpp():
            framework.load(framework.TORCH)  # regardless of the environment: only ranks with torch are forked
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.exit(f"torch is not installed for ranks: `{sys.executable} -m pip install torch`, or another --python.")
    except private_names.MissingNameError as error:
        sys.exit(str(error))
    from jupyter_distrib.worker.process import main as worker_main  # noqa: F401 - preloaded for the ranks

    serve(Link(socket.socket(fileno=first_fd)), agent_pid, socket.socket(fileno=preloaded_fd))


@contextmanager
def _without_warnings_of_cpp() -> Iterator[None]:
    """Keep torch's C++ code from writing warnings into cells, unless the user has set its log level, which it reads
    when it is imported."""
    if _CPP_LOG in os.environ:
        yield
        return
    os.environ[_CPP_LOG] = "ERROR"
    try:
        yield
    finally:
        del os.environ[_CPP_LOG]


def preload(agent_pid: int, preloaded: socket.socket) -> None:
    """Import libraries in the preloaded forkserver, then serve."""
    process.die_with_parent(agent_pid)
    gc.disable()
    with threads.loading():
        assert framework.current is not None
        for _ in framework.current.preload():
            pass
    from jupyter_distrib.interfaces import strategy

    strategy.load_built_in()
    serve(Link(preloaded), agent_pid)


def serve(link: Link, agent_pid: int, preloaded: socket.socket | None = None) -> None:
    """Fork ranks on request until the agent closes the link; `preloaded` is the link of a preloaded forkserver."""
    early = preloaded is not None
    local_modules.of_forkserver = local_modules.LocalModules()
    _leave_libraries_in_place()
    if not early:
        gc.collect()
        process.gather_memory()
    gc.freeze()
    gc.enable()
    link.send(m.ForkserverReady(pid=os.getpid(), early=early))
    while True:
        try:
            command, fds = link.receive()
        except EOFError:
            return
        if isinstance(command, m.Preload) and preloaded is not None:
            if process.fork_orphan() == 0:
                link.sock.close()
                return preload(agent_pid, preloaded)
            preloaded.close()
        elif isinstance(command, m.Fork):
            _fork_ranks(link, preloaded, command, fds, early)


def _leave_libraries_in_place() -> None:
    """Cancel the finalizers by which torch removes its operators from its tables one by one at exit. They would make a
    rank copy the tables although all its memory is about to be freed (50 ms a rank)."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # noqa: SLF001 - no public way to all of them


def _fork_ranks(link: Link, preloaded: socket.socket | None, command: m.Fork, fds: list[int], early: bool) -> None:
    """Fork the ranks through a helper process, which replies and exits; if it cannot, the forkserver replies."""
    descriptors = Descriptors(fds)
    try:
        if not descriptors.complete:
            raise open_files.error()
        helper = os.fork()
        if helper == 0:
            _help(link, preloaded, command, fds, early)
        _, status = os.waitpid(helper, 0)
        code = os.waitstatus_to_exitcode(status)
        reason = f"the process that forks them ended (exit code {code}): try again." if code else ""
    except OSError as error:
        reason = _cannot_fork(error)
    descriptors.close()
    if reason:
        link.send(m.ForkFailed(number=command.number, reason=f"the ranks could not be started: {reason}"))


def _help(link: Link, preloaded: socket.socket | None, command: m.Fork, fds: list[int], early: bool) -> NoReturn:
    """Fork all of the ranks or none, and exit. Never returns."""
    status = 1
    pids: list[int] = []
    try:
        gone, alive = os.pipe()
        for index, order in enumerate(command.orders):
            pid = os.fork()
            if pid == 0:
                link.sock.close()
                if preloaded is not None:
                    preloaded.close()
                os.close(alive)
                _become_rank(order, fds, index, early=early, gone=gone)
            pids.append(pid)
        link.send(m.Forked(number=command.number, pids=tuple(pids)))
        status = 0
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        reason = f"rank {command.orders[len(pids)].rank} could not be started: {_cannot_fork(error)}"
        link.send(m.ForkFailed(number=command.number, reason=reason))
        status = 0
    except Exception:  # noqa: BLE001 - a helper must never fall back into the forkserver's loop
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _cannot_fork(error: OSError) -> str:
    if error.errno == errno.EAGAIN:
        return f"{process.TOO_MANY_PROCESSES}, or use fewer ranks."
    return f"the system cannot fork: {open_files.advice_on(error) or error.strerror}."


def _become_rank(order: m.WorkerOrder, fds: list[int], index: int, *, early: bool, gone: int) -> None:
    """Run as this rank, and never return. The pipe `gone` closes when the helper has exited."""
    try:
        own_fds = fds[4 * index : 4 * index + 4]
        for fd in fds:
            if fd not in own_fds:
                os.close(fd)
        _open_archives_anew()
        from jupyter_distrib.worker.process.main import run_worker  # loaded long ago

        run_worker(order, *own_fds, early=early, gone=gone)
    except BaseException:  # noqa: BLE001 - a rank must never fall back into the forkserver's loop
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _open_archives_anew() -> None:
    """Forget the archives in which the metadata of packages were found: the ranks would share the position in the open
    file, and read one another's parts. A host that gets this package by its connection has it in an archive."""
    if (metadata := sys.modules.get("importlib.metadata")) is not None:
        metadata.MetadataPathFinder().invalidate_caches()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
