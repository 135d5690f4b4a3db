"""The forkserver of dry runs, and its forks, each of which plays rank 0 of a cell on fake tensors and reports its
findings.

    kernel  --m.Execute, a socket, a file for errors-->  forkserver  --fork-->  process of a dry run
       ^                                                     |  its exit code                |  a report as JSON
       +--------------------- the socket --------------------+-------------------------------+

The forkserver imports what every dry run needs, which takes longer than most dry runs, and holds nothing of a cell. It
ends its forks when the kernel closes the link. A fork plays once: torch is then full of replacements.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from jupyter_distrib.dry_run import side_effects
from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization.tensors import GRAPH_ELSEWHERE
from jupyter_distrib.system import file_owner, private_names, process, signals
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.environment import threads

STEPS = 2
"""Steps of each optimizer after which the cell has shown its peak: the second begins with all states."""
WITHOUT_VALUES = (
    "DynamicOutputShapeException", "DataDependentOutputException", "UnsupportedOperatorException",
    "UnsupportedFakeTensorException", "GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound",
)  # fmt: skip
"""Errors by which torch refuses an operation on tensors without values."""
NO_KERNEL = ("no fake impl", "data is not allocated yet", "Cannot access data pointer")
"""Words of torch's errors where foreign code has asked for values."""
_WITHOUT_RULE = re.compile(r"There was no rule registered for HigherOrderOperator (\w+)")
"""The error of an operator that calls the user's functions, such as `torch.cond`."""
_WITHOUT_KERNEL = re.compile(r"Could not run '(.*?)' with arguments from the '")
"""Torch's error where it has no kernel for a kind of tensor, such as sparse ones of a GPU in a build without CUDA."""
_OTHER_KIND = "is already associated to a python object of type FakeTensor"
"""Words of torch's error where it cannot make a tensor of a special class, such as a parameter of a lazy layer."""
_FAKE_GRAPH = "Tried to backward() through example input"
"""Words of torch's error where a gradient reaches a tensor that the notebook has computed."""
MOST_STEPS = 24
"""Steps of one optimizer after which the others are no longer waited for."""


def main(fd: int, kernel_pid: int) -> None:
    process.die_with_parent(kernel_pid)
    signals.reset()  # the kernel may ignore some
    with suppress(Exception):  # a fork will raise it again, and report it
        _load()
    _serve(Link(socket.socket(fileno=fd)))


def _load() -> None:
    """Import what dry runs need and no cell decides. Nothing may start a thread: a fork would not have it."""
    gc.disable()  # imported objects stay
    with threads.loading():
        from jupyter_distrib.dry_run import fake_cuda, world  # noqa: F401 - preloaded for the forks
        from jupyter_distrib.interfaces import strategy
        from jupyter_distrib.worker import failure  # noqa: F401
        from jupyter_distrib.worker.environment import bytecode, cell_environment, setups  # noqa: F401
        from jupyter_distrib.worker.pytorch.pytorch import PyTorch

        for _ in PyTorch().preload():
            pass
        strategy.load_built_in()
    bytecode.distrust_old()
    gc.freeze()
    gc.enable()


def _serve(link: Link) -> None:
    """Fork a process for each dry run, and tell the kernel how it has ended; until the kernel closes the link."""
    playing: dict[int, socket.socket] = {}
    wake, awake = os.pipe()
    os.set_blocking(awake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(awake, warn_on_full_buffer=False)
    with suppress(EOFError):
        while True:
            ready = select.select([link.fileno(), wake], [], [])[0]
            if wake in ready:
                os.read(wake, select.PIPE_BUF)
            while link.fileno() in ready or link.has_frame:
                ready.clear()
                others = (link.fileno(), wake, awake, *(each.fileno() for each in playing.values()))
                pid, sock = _fork(link, others)
                playing[pid] = sock
            for pid in list(playing):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _send_end(playing.pop(pid), os.waitstatus_to_exitcode(status))
    for pid in playing:
        os.kill(pid, signal.SIGKILL)
    for pid in playing:
        os.waitpid(pid, 0)
    os.killpg(0, signal.SIGKILL)  # this process too, and what the cells have started


def _fork(link: Link, others: Sequence[int]) -> tuple[int, socket.socket]:
    """Fork the process of the dry run that the kernel asks for next, without the other descriptors. Return its number,
    and the socket to the kernel."""
    command, (fd, errors_fd) = link.receive()
    assert isinstance(command, m.Execute)
    sock, own_pid = socket.socket(fileno=fd), os.getpid()
    if (pid := os.fork()) == 0:
        for each in others:
            os.close(each)
        _play(command, sock, errors_fd, own_pid)
    os.close(errors_fd)
    return pid, sock


def _send_end(sock: socket.socket, code: int) -> None:
    """Send the exit code after the report. Processes that the cell has forked may still have the socket."""
    with sock, suppress(BrokenPipeError, ConnectionResetError):  # the kernel waits no longer
        sock.sendall(b"\n%d" % code)
        sock.shutdown(socket.SHUT_RDWR)


def _play(command: m.Execute, sock: socket.socket, errors_fd: int, forkserver_pid: int) -> NoReturn:
    """Make the dry run in this fork."""
    try:
        process.die_with_parent(forkserver_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(errors_fd, 2)
        os.close(errors_fd)
        began_s = time.monotonic()
        try:
            report = DryRun(command).report()
        except BaseException as error:  # noqa: BLE001 - the kernel reports the error
            report = {"end": "refused", "why": str(error) or type(error).__name__, "trace": traceback.format_exc()}
        report["wall_s"] = time.monotonic() - began_s
        sock.sendall(json.dumps(report).encode())
    except BaseException:  # noqa: BLE001 - a fork must never fall back into the forkserver's loop
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)  # Python would free tensors that torch's C++ does not expect


class DryRun:
    """One dry run."""

    def __init__(self, command: m.Execute) -> None:
        self._command = command
        self._plan: dict[str, Any] = json.loads(command.label)
        self._notes: list[str] = []
        self._steps: dict[int, int] = {}
        self._optimizers: list[Any] = []

    def report(self) -> dict[str, Any]:
        from jupyter_distrib.dry_run import device_guard

        on_gpu = self._plan["device"].startswith("cuda")
        if on_gpu and (problem := device_guard.problem()):
            return {"end": "refused", "why": problem}
        if on_gpu:
            device_guard.install()
        return self._played()

    def _played(self) -> dict[str, Any]:
        import torch

        from jupyter_distrib.dry_run import fake_cuda, fake_tensors, ledger

        plan = self._plan
        private_names.check(private_names.TORCH_DRY)
        self._mode = fake_tensors.new_mode()
        self._ledger = books = ledger.Ledger(plan["device"].partition(":")[0], self._is_users(), self._mode)
        if plan["device"].startswith("cuda"):
            fake_cuda.install(books, name=plan["gpu"], size_bytes=plan["gpu_bytes"])
        self._loaders = fake_tensors.install(books, self._mode, plan["batch_factor"])
        self._follow(torch)
        begin = self._environment()
        report = self._run(begin)
        books.mark_modules()
        return {**report, **self._memory()}

    def _is_users(self) -> Callable[[str], bool]:
        cell = self._command.cell
        files = {cell.filename, *cell.sources, *(each.cell.filename for each in self._command.setups)}

        @cache
        def is_users(file: str) -> bool:
            return file in files or (not file.startswith("<") and file_owner.is_users(file))

        return is_users

    # ------------------------------------------------------------------------------------------------ the cell

    def _environment(self) -> Callable[[], Any]:
        """Make this process the rank. Return a function that begins the strategy, which returns one for the cell."""
        from jupyter_distrib.dry_run import world
        from jupyter_distrib.interfaces import framework, identity
        from jupyter_distrib.worker.environment.cell_environment import CellEnvironment
        from jupyter_distrib.worker.output import displaying, reporting
        from jupyter_distrib.worker.pytorch import randomness

        plan, command = self._plan, self._command
        framework.load()
        assert framework.current is not None
        side_effects.switch_saving_off()
        order = m.WorkerOrder(
            group="dry",
            worker="dry",
            agent_pid=os.getppid(),
            rank=0,
            world_size=plan["ranks"],
            local_rank=0,
            local_world_size=plan["ranks"],
            device=plan["device"],
            visible_devices="" if plan["device"].startswith("cuda") else None,
            threads=1,
        )
        identity.assume(order)
        displaying.install()
        framework.current.groups = groups = world.play(plan["ranks"])
        groups.begin(command.run)
        randomness.begin()
        identity.cell = identity.CellState()
        for text in CellEnvironment(order, groups).prepare(command.setting):
            self._notes.append(text)
        identity.cell.reporter = reporting.Reporter(command.run, 0, _unsent)
        identity.cell.displayer = displaying.Displayer(command.run, 0, _unsent)
        side_effects.switch_trackers_off()
        self._effects = side_effects.RealEffects(self._ledger.is_users)
        sys.addaudithook(self._effects.on_event)
        return self._begin_strategy

    def _begin_strategy(self) -> Any:
        from jupyter_distrib.cells import cell
        from jupyter_distrib.dry_run import fake_tensors
        from jupyter_distrib.interfaces import identity, strategy
        from jupyter_distrib.serialization import payload
        from jupyter_distrib.worker.environment import rank_environment

        command = self._command
        self._set_up()
        module = cell.fresh_module()
        sys.modules["__main__"] = module
        names = module.__dict__
        names |= rank_environment.names(command, names)
        cell.add_sources(command.cell)
        data, buffers = _inputs(command.inputs)
        with fake_tensors.unfaked():
            shards = command.setting.strategy == "fsdp"
            with fake_tensors.unpickled(self._mode, self._plan["device"], self._ledger, shards=shards):
                payload.unpack_inputs(data, buffers, names, device="meta")
            chosen = identity.cell.strategy = strategy.load(command.setting.strategy)()
            chosen.begin(
                strategy.StrategyRun(
                    options=command.setting.strategy_options,
                    filename=command.cell.filename,
                    everyone=True,
                    names=names,
                    exchange=lambda text: (text,) * self._plan["ranks"],
                    note=self._notes.append,
                )
            )
        return lambda: cell.execute(command.cell, names, chosen.adapted)

    def _set_up(self) -> None:
        """Run the set-ups of the notebook, as a rank does before its first cell."""
        from jupyter_distrib.worker.environment.setups import Setups

        setups = Setups(self._plan["device"], _unsent)
        for each in setups.missing(self._command):
            setups.run(each, self._command.run)

    def _run(self, begin: Callable[[], Any]) -> dict[str, Any]:
        from jupyter_distrib.dry_run.ledger import ACTIVATIONS

        report: dict[str, Any] = {"end": "ended"}
        try:
            with self._mode, self._ledger:
                run = begin()
                self._ledger.phase = ACTIVATIONS
                run()
        except BaseException as error:  # noqa: BLE001 - the user's own, SystemExit and Finished
            if not self._ledger.finished:
                report = {"end": "error", **self._error_report(error)}
        if self._ledger.finished:
            report = {"end": "stepped"}
        return report

    def _error_report(self, error: BaseException) -> dict[str, Any]:
        from jupyter_distrib.worker import failure

        described = failure.describe(error, run="dry", by_value=True, absent=self._command.cell.absent)
        frames = [each for each in described.frames if self._ledger.is_users(each.filename)]
        # For example, a PayloadError for a value that --keep has left on the ranks.
        if isinstance(error, (PayloadError, side_effects.NotWritten)):
            return {"end": "refused", "why": f"The cell cannot be run dry: {described.message}"}
        at = f" on line {frames[-1].line} ({frames[-1].text})" if frames else ""
        why = ""
        if type(error).__name__ in WITHOUT_VALUES:
            why = f"torch cannot compute {described.message.partition(chr(10))[0]}{at} without values"
        elif (
            operation := _WITHOUT_KERNEL.match(described.message) or _WITHOUT_RULE.match(described.message)
        ) is not None:
            why = f"torch cannot compute {operation[1]}{at} without values"
        elif _OTHER_KIND in described.message or (isinstance(error, AssertionError) and _is_of_fake_tensors(error)):
            why = f"torch cannot make such a tensor{at}"
        elif any(words in described.message for words in NO_KERNEL):
            why = f"A kernel that is not torch's own needs values{at}"
        if why:
            return {
                "end": "refused",
                "why": f"{why}, so the cell cannot be run dry; this says nothing about a real run.",
            }
        return {
            "error": {
                "type": "RuntimeError" if "fake_tensor" in described.type_name else described.type_name,
                "text": GRAPH_ELSEWHERE if _FAKE_GRAPH in described.message else described.message,
                "notes": list(described.notes),
                "frames": [[each.filename, each.line, each.text] for each in frames],
                "trace": "".join(traceback.format_exception(error)),
            }
        }

    # ------------------------------------------------------------------------------------------------ followed

    def _follow(self, torch: Any) -> None:
        """Notify the ledger of backward passes and of the steps of optimizers."""
        from torch.optim import optimizer as optimizers

        from jupyter_distrib.dry_run import ledger

        books, backward, begin = self._ledger, torch.autograd.backward, optimizers.Optimizer.__init__

        def run_backward(*args: Any, **keywords: Any) -> None:
            before = books.begin_backward()
            try:
                backward(*args, **keywords)
            finally:
                books.phase = before

        def begin_optimizer(optimizer: Any, *args: Any, **keywords: Any) -> None:
            begin(optimizer, *args, **keywords)
            self._optimizers.append(optimizer)

        def stepping(optimizer: Any, *_: Any) -> None:
            self._classify(optimizer)
            books.phase = ledger.STEP

        def stepped(optimizer: Any, *_: Any) -> None:
            books.phase = ledger.ACTIVATIONS
            self._classify(optimizer)
            self._count_step(optimizer)

        torch.autograd.backward = run_backward
        optimizers.Optimizer.__init__ = begin_optimizer  # type: ignore[assignment,method-assign]
        optimizers.register_optimizer_step_pre_hook(stepping)
        optimizers.register_optimizer_step_post_hook(stepped)

    def _classify(self, optimizer: Any) -> None:
        import torch

        from jupyter_distrib.dry_run import ledger

        for group in optimizer.param_groups:
            for each in group["params"]:
                self._ledger.mark(each, ledger.PARAMETERS)
                self._ledger.mark(each.grad, ledger.GRADIENTS)
                for value in optimizer.state.get(each, {}).values():
                    if isinstance(value, torch.Tensor):
                        self._ledger.mark(value, ledger.OPTIMIZER)

    def _count_step(self, optimizer: Any) -> None:
        from jupyter_distrib.dry_run.ledger import Finished

        if all(each is not optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)  # the notebook has made it
        self._steps[id(optimizer)] = steps = self._steps.get(id(optimizer), 0) + 1
        waited_for = [each for each in self._optimizers if self._steps.get(id(each), 0) < STEPS]
        if not waited_for or steps >= MOST_STEPS:
            self._ledger.finished = True
            raise Finished

    # ------------------------------------------------------------------------------------------------ the report

    def _memory(self) -> dict[str, Any]:
        peak = self._ledger.peak()
        return {
            "peak_bytes": peak.size_bytes,
            "by_kind": peak.by_kind,
            "by_line": [[*place, size] for place, size in peak.by_place.items() if place[0]],
            "guessed_lines": [[*place, count] for place, count in self._ledger.guessed_lines.items() if place[0]],
            "passes_peak_bytes": self._ledger.passes_peak_bytes,
            "batch": self._loaders[0][0] if self._loaders else 0,
            "samples": self._loaders[0][1] if self._loaders else 0,
            "steps": max(self._steps.values(), default=0),
            "operations": self._ledger.operations,
            "notes": list(dict.fromkeys(self._notes)),
            "effects": self._effects.listed(),
            "memory_here_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _is_of_fake_tensors(error: BaseException) -> bool:
    """Return whether torch's own code for tensors without values has failed, as for nested tensors (2.13)."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return any("/torch/_subclasses/" in each.filename for each in last)


def _unsent(*_: Any) -> None:
    """Drop the events that a real rank would send to the notebook."""


def _inputs(parcel: m.Parcel) -> tuple[Any, list[memoryview]]:
    """Return the pickle of the inputs and its buffers; buffers that were not sent are zeros."""
    buffers: list[memoryview] = []
    for size, sent in zip(parcel.sizes, parcel.inline, strict=True):
        buffers.append(memoryview(bytearray(sent) if len(sent) == size else mmap.mmap(-1, size)))
    return parcel.data, buffers


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
