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
from jupyter_distrib.kernel.capture.program import as_typed
from jupyter_distrib.kernel.session import cell_order
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.settings.cell_options import Options
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
    def of(cls, current: Session, options: Options, *, asks: bool = False) -> World:
        """Return the ranks that a cell with these options would have.

        Args:
            current: The session.
            options: Its options, completed with all defaults.
            asks: Whether to ask the pool for its GPUs, since the cell is to be started there.
        """
        size, assumed = options.size, list[str]()
        known = [worker for group in current.pools.groups(options.pool) for worker in group.workers]
        gpus = _gpus_of_pool(current, options) if asks and size.gpus else None
        ranks = size.fewest or len(known) or len(gpus or ())
        if not size.gpus or gpus == []:
            return cls(ranks=ranks or size.ranks(0))
        if not ranks:
            ranks = ASSUMED_RANKS
            assumed.append(f"{ranks} ranks are assumed: say how many with --gpus N.")
        of_ranks = (worker.device_name for worker in known if worker.device.startswith("cuda"))
        names = (size.gpu_type, *of_ranks, *(gpus or ()))
        gpu = next(filter(None, names), "").partition(" (")[0]
        if not gpu:
            gpu = ASSUMED_GPU
            assumed.append(f"GPUs of type {gpu} are assumed: name another with --gpu-type.")
        if gpu_types.memory_bytes(gpu) is None:
            assumed.append(f"how much memory a GPU of type {gpu} has is not known here.")
        return cls(ranks=ranks, gpu=gpu, assumed=tuple(assumed))


def _gpus_of_pool(current: Session, options: Options) -> list[str] | None:
    """Return the names of a pool's GPUs; None if they are unknown."""
    status = current.pools.connect(options.pool or "", options.pool_options).ask()
    if status.gpus:
        return [gpu.name for gpu in status.gpus]
    if not status.nodes:
        return None
    return [node.gpu_type for node in status.nodes for _ in range(node.gpus)]


@data_class
class Play:
    """One dry run to be made."""

    cell: m.Cell
    packed: payload.Packed
    setting: m.Setting
    world: World
    setups: tuple[m.Setup, ...] = ()
    batch_factor: float = 1.0
    """The factor by which the batches of the user's data loaders are larger than written."""

    @property
    def command(self) -> m.Execute:
        plan = {
            "device": self.world.device,
            "ranks": self.world.ranks,
            "gpu": self.world.gpu,
            "gpu_bytes": self.world.gpu_bytes,
            "batch_factor": self.batch_factor,
        }
        return m.Execute(
            run="dry",
            group="dry",
            ranks=(0,),
            cell=self.cell,
            inputs=_without_large(self.packed),
            setting=self.setting,
            setups=self.setups,
            label=json.dumps(plan),
        )


def play(plays: Sequence[Play]) -> list[DryRun]:
    """Play rank 0 of each cell in a process of its own, all at once. Return their findings."""
    running: list[_Process] = []
    until_s = time.monotonic() + LIMIT_S
    try:
        for each in plays:
            running.append(_Process(each.command))
        for process in running:
            process.send()
        while waiting := [process for process in running if process.report is None]:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            for process in select.select(waiting, [], [], left_s)[0]:
                process.read()
    finally:
        for process in running:
            process.end()
    reports = [process.report or {"end": "refused", "why": _too_slow(LIMIT_S)} for process in running]
    return [_answer(report, each) for report, each in zip(reports, plays, strict=True)]


def setting(cell: m.Cell, options: Options) -> m.Setting:
    """Return the setting of the played rank; `options` are complete."""
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
        self.report: dict[str, Any] | None = None
        """The report, once the process has ended; None if it ended without one."""
        self._command, self._said = command, bytearray()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(theirs.fileno())

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `read` notices it
            Link(self._sock).send(self._command)

    def read(self) -> None:
        """Read what the process has sent; it closes its end after its report."""
        piece = b""
        with suppress(ConnectionResetError):
            piece = self._sock.recv(1 << 16)
        self._said += piece
        if piece:
            return
        if self._said:
            self.report = json.loads(self._said)
            return
        code = self._process.wait()
        self._errors.seek(0)
        self.report = {"end": "refused", "why": _died(code, self._errors.read())}

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._sock.close()
        self._errors.close()

    def _start(self, fd: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[3])
        env = process_environment.variables()
        before = env.get("PYTHONPATH")
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(fd), str(os.getpid())],  # -P: no modules of the folder /
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
            cwd="/",
            env={
                **env,
                "PYTHONPATH": root if not before else f"{root}{os.pathsep}{before}",
                "CUDA_VISIBLE_DEVICES": "",  # it plays a GPU, and must not open one
                "TOKENIZERS_PARALLELISM": "false",
            },
        )


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


def _answer(report: dict[str, Any], play: Play) -> DryRun:
    cell, world = play.cell, play.world
    answer = DryRun(
        strategy=_written(play.setting),
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
        batch=report["batch"],
        samples=report["samples"],
        passes_peak_bytes=report["passes_peak_bytes"],
        peak_bytes=report["peak_bytes"],
        by_kind=report["by_kind"],
        by_line=by_line,
        guesses=guesses,
        sources=_sources(cell, [*by_line, *guesses]),
        notes=report["notes"],
        effects=report["effects"],
        memory_here_bytes=report["memory_here_bytes"],
    )


def _written(setting: m.Setting) -> str:
    """Return the strategy with its options, as one writes them."""
    options = (f"--{name.replace('_', '-')} {value}".strip() for name, value in setting.strategy_options.items())
    return " ".join((setting.strategy, *options))


def _error(told: dict[str, Any] | None) -> DryError | None:
    if told is None:
        return None
    frames = [(name, line, as_typed(text)) for name, line, text in told["frames"]]
    return DryError(type_name=told["type"], text=told["text"], notes=told["notes"], frames=frames)


def _sources(cell: m.Cell, lines: Sequence[Line]) -> dict[Line, str]:
    texts = {name: source.splitlines() for name, source in ((cell.filename, cell.source), *cell.sources.items())}
    return {
        (name, number): as_typed(texts[name][number - 1].strip())
        for name, number in lines
        if name in texts and 0 < number <= len(texts[name])
    }
