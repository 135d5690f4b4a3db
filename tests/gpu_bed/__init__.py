"""A machine with feigned GPUs, for tests with real kernels, agents and ranks, on a machine that has none.

    with GpuBed(count=8) as bed, bed.notebook() as book:
        book.ok("%%distributed --gpus 8\\nlocal_rank")
        bed.gpus[3]["lost"] = True              # any field of `FIELDS`, while everything runs ...
        bed.write()                             # ... is what the next question to the driver is answered with

`notebook` starts a kernel whose PYTHONPATH begins with `on_path/`, and so its agent's and its ranks' does. Python
imports the `sitecustomize` there. It puts a feigned C library behind the real `pynvml`, and a feigned `set_device`
(`device_count`, `mem_get_info`, `synchronize`, ...) into `torch.cuda`. All that they tell is in one folder:

    bed.json          the machine: `bed.state`, of which `bed.gpus` is the list of GPUs; see `FIELDS` and `STATE`
    contexts/PID      the bytes that a rank holds, by UUID: a context as soon as it is up, more after
                      `import feigned_cuda; feigned_cuda.hold(10 << 30)` in a cell; gone with the process
    groups/PID        the worker group of a rank
    violations        one line whenever a rank made a context on a GPU where another worker group's rank had one
    calls             each call of the feigned C library: pid, thread, function

Kernels of one bed share an agent, unless `notebook(OMP_DISPLAY_ENV="false")` or the like gives one a load-time variable
of its own: then there are two agents on the same GPUs. Nothing here makes tensors on a GPU: a cell may use everything
but `device`. Agents of a bed are ended with it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link
from tests.notebook import ROOT, Notebook
from tests.processes import wait_until, wait_until_gone

ON_PATH = Path(__file__).parent / "on_path"
GIB = 1 << 30

FIELDS: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory_bytes": 80 * GIB,
    "used_bytes": 0,  # by nobody in particular
    "processes": [],  # of others: {"pid": 7, "used_bytes": 1}
    "memory": "ok",  # or NOT_SUPPORTED, NO_PERMISSION
    "lost": False,
    "permitted": True,  # or a scheduler has given it to another job
    "mig_mode": None,  # or 0, 1
    "mig": [],  # slices: {"uuid": "MIG-...", "name": ..., "memory_bytes": ...} and other fields
    "compute_mode": 0,  # 3: EXCLUSIVE_PROCESS
    "mps": False,  # whether an MPS server looks after its processes
    "display": False,
    "percent": 0,  # or None: not measured
    "address": "",  # on the PCI bus, as NVML writes it: 00000000:DC:00.0
    "speed": 1,  # CUDA's own order is by speed
}
"""The fields of a GPU beside its `uuid`."""
STATE: dict[str, Any] = {
    "init": {"error": "", "seconds": 0.0},  # of nvmlInit: DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, ...
    "hangs": False,  # whether no function of the driver's library returns
    "set_device": {"error": "", "seconds": 0.0},
    "synchronize": {"error": "", "seconds": 0.0},
    "context_bytes": 520 << 20,
    "torch": "12.8",  # the CUDA that it is built for; or cpu, rocm
    "driver": "580.65.06",
    "cuda_driver": 13000,
    "compiler": True,  # whether forkservers get on with importing torch's compiler, or wait in it
    "pids": True,  # whether the driver tells processes, as it does outside of containers
}
"""The fields of a machine beside its `gpus`."""


class GpuBed:
    """A machine with feigned GPUs.

    Args:
        count: How many GPUs, all alike.
        state: Other values for fields of `STATE`.
    """

    def __init__(self, count: int = 8, **state: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jd-gpus-"))
        (self.folder / "contexts").mkdir()
        (self.folder / "groups").mkdir()
        self._tag = secrets.token_hex(4)
        self.state: dict[str, Any] = {**json.loads(json.dumps(STATE)), **state}
        self.gpus: list[dict[str, Any]] = [self.gpu(index) for index in range(count)]
        self.write()

    def gpu(self, index: int, **fields: Any) -> dict[str, Any]:
        """Describe one more GPU, for `gpus`."""
        return {"uuid": f"GPU-{self._tag}-{index:04d}", **json.loads(json.dumps(FIELDS)), **fields}

    def slice(self, index: int, position: int, **fields: Any) -> dict[str, Any]:
        """Describe a MIG slice, for the field `mig` of a GPU."""
        own = {"uuid": f"MIG-{self._tag}-{index:04d}-{position}", "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb"}
        memory = {"memory_bytes": 40 * GIB, "used_bytes": 0, "processes": [], "memory": "ok"}
        return {**own, **memory, **fields}

    def reset(self) -> None:
        """Have 8 GPUs again, all alike, and everything else as in the beginning."""
        self.state = json.loads(json.dumps(STATE))
        self.gpus = [self.gpu(index) for index in range(8)]
        self.write()

    def write(self) -> None:
        """Have every process see the bed as it is now."""
        fresh = self.folder / "bed.json.new"
        fresh.write_text(json.dumps({**self.state, "gpus": self.gpus}))
        fresh.rename(self.folder / "bed.json")

    def use(self, index: int, **fields: Any) -> None:
        """Change fields of one GPU, for all at once."""
        self.gpus[index] |= fields
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that put a process on this bed; none of them lets a process see a real GPU."""
        path = os.pathsep.join(filter(None, (str(ON_PATH), str(ROOT), os.environ.get("PYTHONPATH"))))
        return {"CUDA_GPU_BED": str(self.folder), "PYTHONPATH": path}

    @contextmanager
    def notebook(self, **env: str) -> Iterator[Notebook]:
        """Start a kernel with the extension loaded."""
        folder = Path(tempfile.mkdtemp(prefix="book-", dir=self.folder))
        with Notebook(folder, {**self.environment, **env}) as book:
            assert book.cell("%load_ext jupyter_distrib").status == "ok"
            yield book

    def contexts(self) -> dict[int, list[str]]:
        """Return the GPUs on which living processes have a context, by pid."""
        found = {}
        for path in (self.folder / "contexts").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if self._living(int(path.name)):
                    found[int(path.name)] = sorted(json.loads(path.read_text()))
        return found

    def numbers(self) -> dict[int, list[int]]:
        """Return the same with each GPU's number, for GPUs without slices."""
        order = {gpu["uuid"]: number for number, gpu in enumerate(self.gpus)}
        return {pid: [order[uuid] for uuid in held] for pid, held in self.contexts().items()}

    def calls(self, function: str = "") -> list[tuple[int, str, str]]:
        """Return the calls of the driver's library so far: pid, thread, function."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "calls").read_text().splitlines()
            found = [tuple(line.split(" ", 2)) for line in lines]
            return [(int(pid), thread, name) for pid, thread, name in found if function in name]
        return []

    def violations(self) -> list[str]:
        """Return what shows that a GPU was given twice."""
        with suppress(FileNotFoundError):
            return (self.folder / "violations").read_text().splitlines()
        return []

    def status(self) -> list[m.ServerStatus]:
        """Ask each agent of this bed for its status, without a kernel."""
        return [server for path in self._sockets() if (server := _asked(path)) is not None]

    def _sockets(self) -> list[Path]:
        """Return the sockets of this bed's agents: their command lines tell folder and name."""
        lines = [_text(pid, "cmdline").split("\0") for pid in self.agents()]
        return [Path(line[-3]) / f"{line[-2]}.sock" for line in lines]

    def agents(self) -> list[int]:
        """Return the pids of this bed's agents."""
        return [pid for pid in self._processes() if "jupyter_distrib.agent" in _text(pid, "cmdline")]

    def ranks_are(self, pids: Collection[int], limit_s: float = 5.0) -> bool:
        """Wait until exactly these processes have contexts; tell whether it came to that."""
        return wait_until(lambda: self.contexts().keys() == set(pids), limit_s)

    def ranks_gone(self, limit_s: float = 5.0) -> bool:
        """Wait until no process has a context on this bed; tell whether it came to that."""
        return self.ranks_are((), limit_s)

    def close(self) -> None:
        """End the agents, and with them all ranks."""
        agents = self.agents()
        for pid in agents:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        left = wait_until_gone(agents, 20)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"agents of the bed outlive SIGTERM: {left}"

    def __enter__(self) -> GpuBed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _processes(self) -> Iterator[int]:
        mark = f"CUDA_GPU_BED={self.folder}"
        for name in os.listdir("/proc"):
            if name.isdigit() and mark in _text(int(name), "environ").split("\0"):
                yield int(name)

    @staticmethod
    def _living(pid: int) -> bool:
        return _text(pid, "stat").rpartition(")")[2][1:2] not in ("", "Z", "X")


def _asked(path: Path) -> m.ServerStatus | None:
    about = {"session": "asks", "pid": os.getpid(), "label": "", "python": "", "torch": "", "cloudpickle": ""}
    with suppress(OSError, EOFError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        link = Link(sock)
        link.send(m.Hello(protocol=m.PROTOCOL, **about))  # type: ignore[arg-type]
        link.send(m.Ask(question=1))
        while not isinstance(answered := link.receive()[0], m.Answered):
            continue
        return answered.status
    return None


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""
