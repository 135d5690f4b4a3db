"""Dry runs: starts a process that plays one rank of cells, and waits for its reports. In the thread that executes the
cell.

    cell, inputs, options   --m.Execute-->   python -m jupyter_distrib.dry_run.process   --JSON-->   DryRun

The process imports torch once, and forks for each dry run of one answer. It is thrown away after the answer, after
`LIMIT_S`, and when the user stops the cell. Nothing is acquired or queued, and nothing of the notebook changes. Large
values do not travel: zeros stand for their contents.
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
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

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
_ENDING_S = 0.5
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


class Forkserver:
    """The process that plays the cells of one answer, each in a fork of its own. A context manager: the process starts
    at its beginning, and is gone at its end, with everything that the cells have started."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + LIMIT_S
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        ours, theirs = socket.socketpair()
        self._link = Link(ours)
        with theirs:
            self._process = self._start(theirs.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()  # the process ends itself then, unless it still imports
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        self._kill()
        self._errors.close()

    def play(self, plays: Sequence[Play]) -> list[DryRun]:
        """Play rank 0 of each cell, all at once. Return their findings."""
        with ExitStack() as stack:
            running = [stack.enter_context(_Running()) for _ in plays]
            for each, to_play in zip(running, plays, strict=True):
                with suppress(BrokenPipeError, ConnectionResetError):  # `read` notices it
                    each.begin(self._link, to_play.command)
            while waiting := [each for each in running if not each.ended]:
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    break
                for each in select.select(waiting, [], [], left_s)[0]:
                    each.read()
            return [_answer(self._report(each), to_play) for each, to_play in zip(running, plays, strict=True)]

    def _report(self, running: _Running) -> dict[str, Any]:
        if not running.ended:
            return {"end": "refused", "why": _too_slow(LIMIT_S)}
        if running.code == 0:
            return running.report()
        if running.code is not None:
            return {"end": "refused", "why": _died(running.code, running.errors)}
        code = self._kill()
        return {"end": "refused", "why": _died(code, self._errors)}

    def _kill(self) -> int:
        """Kill the process, if it lives, and everything that it has started. Return its exit code."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

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


class _Running:
    """One dry run in a fork: the socket of its report, and the file of its errors."""

    def __init__(self) -> None:
        self.ended = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._ours, self._theirs = socket.socketpair()
        self._said = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._theirs.close()
        self._ours.close()
        self.errors.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def begin(self, link: Link, command: m.Execute) -> None:
        """Have the forkserver make the dry run, which gets the other ends."""
        with self._theirs:
            link.send(command, [self._theirs.fileno(), self.errors.fileno()])

    def read(self) -> None:
        """Read what has been sent: the report, and the exit code on a line of its own."""
        piece = b""
        with suppress(ConnectionResetError):
            piece = self._ours.recv(1 << 16)
        self._said += piece
        self.ended = not piece

    @property
    def code(self) -> int | None:
        """The exit code of the fork; None if the forkserver has ended before it could tell."""
        code = self._said.rpartition(b"\n")[2] if b"\n" in self._said else b""
        return int(code) if code else None

    def report(self) -> dict[str, Any]:
        """Return what a fork has found that has ended with exit code 0."""
        report: dict[str, Any] = json.loads(self._said.rpartition(b"\n")[0])
        return report


def setting(cell: m.Cell, options: Options) -> m.Setting:
    """Return the setting of the played rank; `options` are complete."""
    now = cell_order.ProcessState.now()
    path = now.path
    if cell.script:
        folder = os.path.dirname(os.path.join(now.directory, cell.script))
        path = (folder, *(each for each in path if each != folder))
    return m.Setting(
        env={**now.env(remote=False), **options.env},
        directory=now.directory,
        umask=now.umask,
        path=path,
        argv=now.argv,
        package=now.package,
        libraries=now.libraries.values,
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


def _too_slow(limit_s: float) -> str:
    return (
        f"The cell has not taken two steps of its optimizer within {duration(limit_s)}, so it cannot be run dry as it "
        "is: give it less to do before the training, such as less data to prepare."
    )


def _died(code: int, errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
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
    guessed_lines = {(name, line): count for name, line, count in report["guessed_lines"]}
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
        guessed_lines=guessed_lines,
        sources=_sources(cell, [*by_line, *guessed_lines]),
        notes=report["notes"],
        effects=report["effects"],
        memory_here_bytes=report["memory_here_bytes"],
    )


def _written(setting: m.Setting) -> str:
    """Return the strategy with its options, as one writes them."""
    options = (f"--{name.replace('_', '-')} {value}".strip() for name, value in setting.strategy_options.items())
    return " ".join((setting.strategy, *options))


def _error(error: dict[str, Any] | None) -> DryError | None:
    if error is None:
        return None
    frames = [(name, line, as_typed(text)) for name, line, text in error["frames"]]
    return DryError(type_name=error["type"], text=error["text"], notes=error["notes"], frames=frames)


def _sources(cell: m.Cell, lines: Sequence[Line]) -> dict[Line, str]:
    texts = {name: source.splitlines() for name, source in ((cell.filename, cell.source), *cell.sources.items())}
    return {
        (name, number): as_typed(texts[name][number - 1].strip())
        for name, number in lines
        if name in texts and 0 < number <= len(texts[name])
    }
