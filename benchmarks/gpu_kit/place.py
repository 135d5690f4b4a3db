"""Where a step runs: kernels on real GPUs, on feigned ones, or with CPU ranks, driven as a front end drives them."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from benchmarks import processes
from benchmarks.gpu_kit.machine import ROOT, Gpu
from benchmarks.gpu_kit.step import Where, until
from tests.notebook import Notebook, Outcome

ON_PATH = Path(__file__).resolve().parent / "on_path"
MARK = "GPU_KIT_STEP"
"""The variable by which everything that a step starts is known."""
GIB = 1 << 30
NO_NCCL = "NCCL does not take two ranks on one GPU here"
"""Begins the reason for which steps are left out; once it is known, `NO_NCCL_KNOWN` tells it to the steps behind."""
NO_NCCL_KNOWN = "GPU_KIT_NO_NCCL"
Backend = Literal["gloo", "nccl", "one"]
PID = "import os\nos.getpid()"


class Book(Notebook):
    """A kernel with the extension loaded."""

    def values(self, options: str, code: str, timeout_s: float = 60.0) -> list[Any]:
        """Run a cell on the ranks; return the value of each, which must be a literal."""
        outcome = self.cell(f"%%distributed {options} --out _kit\n{code}", timeout_s)
        assert outcome.status == "ok", outcome.text[-1500:]
        found: list[Any] = literal_eval(self.ok("print(repr(list(_kit)))").stdout)
        return found

    def settled(self, options: str) -> list[int]:
        """Return the pids of ranks that will stay: all that is imported beside the first cells has been."""
        self.values(options, PID)
        until(lambda: re.search(r"forkserver ready(?! \()", self.ok("%distributed_status").text), 20.0, 0.2)
        for _ in range(20):
            before = self.values(options, PID)
            time.sleep(0.3)
            if (now := self.values(options, PID)) == before:
                return now
        raise AssertionError("the ranks are exchanged again and again")

    def stopped(
        self, code: str, flags: list[Path], after_s: float = 0.0, limit_s: float = 30.0
    ) -> tuple[float, Outcome]:
        """Run a cell, interrupt it when all its ranks have touched their flags; return how long that took."""
        for flag in flags:
            flag.unlink(missing_ok=True)
        self.start(code)
        if until(lambda: all(flag.exists() for flag in flags), limit_s, 0.005) is None:
            self.interrupt()
            raise AssertionError(f"the ranks did not begin within {limit_s:g} s: {self.finish(20).text[-1500:]}")
        time.sleep(after_s)
        began_s = time.monotonic()
        self.interrupt()
        outcome = self.finish(limit_s)
        return time.monotonic() - began_s, outcome


class Place:
    """The machine as one step sees it."""

    def __init__(self, where: Where, gpus: tuple[Gpu, ...] = (), *, keep: bool = False) -> None:
        """With `keep` the caller removes the folder, once it has read the logs."""
        self.where, self.gpus, self._keep = where, gpus, keep
        self.folder = Path(tempfile.mkdtemp(prefix="p-"))
        self.bed: Any = None
        """The feigned GPUs, if they are."""
        self._stack = ExitStack()

    def __enter__(self) -> Place:
        if self.where == "bed":
            from tests.gpu_bed import GpuBed

            self.bed = self._stack.enter_context(GpuBed(count=1))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def on_gpu(self) -> bool:
        return self.where == "gpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"

    def ranks(self, count: int = 1) -> str:
        """Return the options for so many ranks."""
        return f"--ranks {count}" if self.where == "cpu" else f"--gpus {count}"

    @property
    def memory_bytes(self) -> int:
        """The memory of the first GPU."""
        return self.gpus[0].memory_bytes if self.gpus else 0

    def environment(self, twice: Backend | None = None, *, all_gpus: bool = False, **more: str) -> dict[str, str]:
        """Return the variables of a kernel of this place.

        Args:
            twice: Two ranks on one GPU, with this backend.
            all_gpus: Show all GPUs, not the first alone.
            more: Other variables.
        """
        first = [ON_PATH]
        out = {
            "JUPYTER_DISTRIB_RUNTIME_DIR": str(self.folder / "run"),
            "JUPYTER_DISTRIB_LOG_DIR": str(self.folder / "logs"),
            "JUPYTER_DISTRIB_IDLE_S": "120",
        }
        if self.bed is not None:
            own = self.bed.environment
            first.append(Path(own["PYTHONPATH"].split(os.pathsep)[0]))
            out["CUDA_GPU_BED"] = own["CUDA_GPU_BED"]
        elif self.on_gpu and not all_gpus:
            uuid = self.gpus[0].uuid
            out["CUDA_VISIBLE_DEVICES"] = f"{uuid},{uuid}#2" if twice else uuid
            out["GPU_KIT_GPU"] = uuid
        if twice and self.where != "cpu":
            out |= {"GPU_KIT_TWICE": twice, "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
        path = [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {**out, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}

    @contextmanager
    def notebook(self, twice: Backend | None = None, *, all_gpus: bool = False, **more: str) -> Iterator[Book]:
        """Start a kernel with the extension loaded; all kernels of a step share one runtime folder, hence an agent."""
        folder = Path(tempfile.mkdtemp(prefix="book-", dir=self.folder))
        with Book(folder, self.environment(twice, all_gpus=all_gpus, **more)) as book:
            book.ok("%load_ext jupyter_distrib")
            yield book

    def flags(self, name: str, count: int) -> list[Path]:
        """Return files by which ranks can tell that they have come to a line; `flag_line` makes the line."""
        return [self.folder / f"{name}-{rank}" for rank in range(count)]

    def flag_line(self, name: str) -> str:
        return f"open({str(self.folder / name)!r} + f'-{{rank}}', 'w').close()"

    def used_bytes(self) -> int:
        """Return what is used of the first GPU, by anybody, as the driver tells it."""
        if self.bed is not None:
            used = [held for each in self._feigned_contexts() for held in each.values()]
            return sum(used)
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(self.gpus[0].uuid)
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()

    def _feigned_contexts(self) -> Iterator[dict[str, int]]:
        import json

        for pid in self.bed.contexts():
            try:
                yield json.loads((self.bed.folder / "contexts" / str(pid)).read_text())
            except OSError:
                continue


def running(word: str) -> list[int]:
    """Return processes of this step with this word in their command lines."""
    found = []
    for pid in processes.marked(MARK, os.environ.get(MARK, "none")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(pid)
    return found


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
