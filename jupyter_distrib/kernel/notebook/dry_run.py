"""Dry runs: starts a process that plays one rank of a cell, and waits for its report. In the thread that executes the
cell.

    cell, inputs, options   --m.Execute-->   python -m jupyter_distrib.dry_run.process   --JSON-->   DryRun

The process is thrown away after its answer, after `LIMIT_S`, and when the user stops the cell. Nothing is acquired or
queued, and nothing of the notebook changes. Large values do not travel: zeros stand for their contents.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib import gpu_types
from jupyter_distrib.kernel.session import cell_order
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.settings import Settings
from jupyter_distrib.kernel.views.dry_run import DryError, DryRun, Line
from jupyter_distrib.serialization import payload
from jupyter_distrib.system import process_environment
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link

LIMIT_S = 120.0
SENT_BYTES = 1 << 20
"""Size up to which the contents of a value are sent."""
ASSUMED_RANKS, ASSUMED_GPU = 8, "H100"
_MODULE = "jupyter_distrib.dry_run.process"


@data_class
class World:
    """The ranks that are played."""

    ranks: int
    gpu: str = ""
    """The type of their GPUs; empty for CPU ranks."""
    assumed: tuple[str, ...] = ()
    """Sentences on what was not known and had to be assumed."""

    @property
    def device(self) -> str:
        return "cuda:0" if self.gpu else "cpu"

    @property
    def gpu_bytes(self) -> int:
        """The memory of each GPU; 0 if it is unknown, or there is none."""
        return (gpu_types.memory_bytes(self.gpu) or 0) if self.gpu else 0

    @classmethod
    def of(cls, current: Session, options: Options) -> World:
        """Return the ranks that a cell with these options would have, as far as that is known without asking."""
        size, assumed = options.size, list[str]()
        known = [worker for group in current.pools.groups(options.pool) for worker in group.workers]
        ranks = size.count or len(known)
        if not size.gpus:
            return cls(ranks=ranks or size.ranks(0))
        if not ranks:
            ranks = ASSUMED_RANKS
            assumed.append(f"{ranks} ranks are assumed: say how many with --gpus N.")
        names = (size.gpu_type, *(worker.device_name for worker in known if worker.device.startswith("cuda")))
        gpu = next(filter(None, names), "").partition(" (")[0]
        if not gpu:
            gpu = ASSUMED_GPU
            assumed.append(f"GPUs of type {gpu} are assumed: name another with --gpu-type.")
        if gpu_types.memory_bytes(gpu) is None:
            assumed.append(f"how much memory a GPU of type {gpu} has is not known here.")
        return cls(ranks=ranks, gpu=gpu, assumed=tuple(assumed))


def dry_run(current: Session, cell: m.Cell, packed: payload.Packed, options: Options, settings: Settings) -> DryRun:
    """Play rank 0 of a cell. Return what it has shown.

    Args:
        current: The session.
        cell: The cell.
        packed: Its inputs.
        options: Its options as given.
        settings: The settings with which they were read.

    Raises:
        OptionsError, DistributedError: The strategy refuses the run.
    """
    filled = cell_order.for_strategy(settings.filled(options))
    return play(cell, packed, _setting(cell, filled), World.of(current, filled), current.setups.to_send())


def play(
    cell: m.Cell, packed: payload.Packed, setting: m.Setting, world: World, setups: tuple[m.Setup, ...] = ()
) -> DryRun:
    """Play rank 0 of a cell in a process of its own. Return what it has shown."""
    plan = {"device": world.device, "ranks": world.ranks, "gpu": world.gpu, "gpu_bytes": world.gpu_bytes}
    command = m.Execute(
        run="dry",
        group="dry",
        ranks=(0,),
        cell=cell,
        inputs=_without_large(packed),
        setting=setting,
        setups=setups,
        label=json.dumps(plan),
    )
    report = _Process(command).report(LIMIT_S)
    return _answer(report, cell, setting.strategy, world)


def _setting(cell: m.Cell, options: Options) -> m.Setting:
    now = cell_order.ProcessState.now(remote=False)
    path = now.path
    if cell.script:
        folder = os.path.dirname(os.path.join(now.directory, cell.script))
        path = (folder, *(each for each in path if each != folder))
    return m.Setting(
        env={**now.env, **options.env},
        directory=now.directory,
        umask=now.umask,
        path=path,
        libraries=now.libraries,
        strategy=options.strategy or "none",
        strategy_options=options.strategy_options,
    )


def _without_large(packed: payload.Packed) -> m.Parcel:
    """Return the inputs with the sizes of large buffers in place of their contents."""
    return m.Parcel(
        data=packed.data,
        sizes=tuple(view.nbytes for view in packed.buffers),
        inline=tuple(bytes(view) if view.nbytes <= SENT_BYTES else b"" for view in packed.buffers),
    )


class _Process:
    """The process of one dry run."""

    def __init__(self, command: m.Execute) -> None:
        self._command = command

    def report(self, limit_s: float) -> dict[str, Any]:
        """Return its report; also when it ends without one, or not in time. Ends it in any case."""
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as errors, ours:
            with theirs:
                process = self._start(theirs.fileno(), errors)
            try:
                with suppress(BrokenPipeError, ConnectionResetError):
                    Link(ours).send(self._command)
                said = _read(ours, time.monotonic() + limit_s)
            finally:
                _end(process)
            if said is None:
                return {"end": "refused", "why": _too_slow(limit_s)}
            errors.seek(0)
            return json.loads(said) if said else {"end": "refused", "why": _died(process.returncode, errors.read())}

    def _start(self, fd: int, errors: Any) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[3])
        env = process_environment.variables()
        before = env.get("PYTHONPATH")
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(fd), str(os.getpid())],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            cwd="/",
            env={
                **env,
                "PYTHONPATH": root if not before else f"{root}{os.pathsep}{before}",
                "CUDA_VISIBLE_DEVICES": "",  # it plays a GPU, and must not open one
                "TOKENIZERS_PARALLELISM": "false",
            },
        )


def _read(sock: socket.socket, until_s: float) -> bytes | None:
    """Return all that the process says until it closes its end; None if that takes too long."""
    said = bytearray()
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([sock], [], [], left_s)[0]:
            try:
                piece = sock.recv(1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return bytes(said)
            said += piece
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process with all that it has started, if it has not just ended by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.0 if process.poll() is None else None)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _too_slow(limit_s: float) -> str:
    return (
        f"The cell has not taken two steps of its optimizer within {duration(limit_s)}, so it cannot be run dry as it "
        "is: give it less to do before the training, such as less data to prepare."
    )


def _died(code: int, errors: bytes) -> str:
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    return (
        f"The process of the dry run {how}{last}. Code that needs real memory or a real GPU, such as a library's own "
        "kernel, cannot be run dry; this says nothing about a real run."
    )


def _answer(report: dict[str, Any], cell: m.Cell, strategy: str, world: World) -> DryRun:
    answer = DryRun(
        strategy=strategy,
        ranks=world.ranks,
        gpu=world.gpu,
        gpu_bytes=world.gpu_bytes,
        assumed=world.assumed,
        refused=report.get("why", ""),
        wall_s=report.get("wall_s", 0.0),
    )
    if report["end"] == "refused":
        return answer
    by_line = {(name, line): size for name, line, size in report["by_line"]}
    guesses = {(name, line): count for name, line, count in report["guesses"]}
    return replace(
        answer,
        error=_error(report.get("error")),
        steps=report["steps"],
        peak_bytes=report["peak_bytes"],
        by_kind=report["by_kind"],
        by_line=by_line,
        guesses=guesses,
        sources=_sources(cell, [*by_line, *guesses]),
        notes=report["notes"],
        files=report["files"],
        memory_here_bytes=report["memory_here_bytes"],
    )


def _error(told: dict[str, Any] | None) -> DryError | None:
    if told is None:
        return None
    frames = [(name, line, text) for name, line, text in told["frames"]]
    return DryError(type_name=told["type"], text=told["text"], notes=told["notes"], frames=frames)


def _sources(cell: m.Cell, lines: Sequence[Line]) -> dict[Line, str]:
    texts = {name: source.splitlines() for name, source in ((cell.filename, cell.source), *cell.sources.items())}
    return {
        (name, number): texts[name][number - 1].strip()
        for name, number in lines
        if name in texts and 0 < number <= len(texts[name])
    }
