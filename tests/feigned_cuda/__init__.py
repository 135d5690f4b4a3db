"""A CUDA runtime and an NCCL that do not exist, below torch's real CUDA build, on a machine without a GPU.

    with FeignedCuda(gpus=2) as machine, machine.notebook() as book:
        book.ok("%%distributed --gpus 2 --strategy ddp\\n...")
        machine.held_mb(0)                      # what all processes hold of GPU 0
        machine.calls("aborts")                 # the lines of calls that matter

`library/` is compiled by `build.py` and loaded before torch's own libraries (LD_PRELOAD). So what runs is torch's own
code: its caching allocator, OutOfMemoryError, AcceleratorError, streams, the reducer of DistributedDataParallel, FSDP,
ProcessGroupNCCL with its watchdog and abort. Memory is the host's, with a limit for each GPU that holds for all
processes together. A stream is a thread; a collective meets the other ranks in a file.

What it cannot show: values (kernels do nothing, but for fills), speed, CUDA graphs, cuBLAS, cuDNN, Triton, CUPTI, how
long the driver takes, and faults of NCCL itself. A rank is put on trial by variables that a cell sets in `os.environ`;
`kernels.cpp`, `nccl.cpp` and `machine.h` in `library/` name them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tests.feigned_cuda import build
from tests.notebook import ROOT, Notebook
from tests.processes import agents, wait_until_gone

COMPILED = ROOT / "artifacts/feigned_cuda"


class FeignedCuda:
    """A machine with GPUs that do not exist."""

    def __init__(self, gpus: int = 2, memory_mb: int = 8192, **env: str) -> None:
        library = build.build(COMPILED)
        self.folder = Path(tempfile.mkdtemp(prefix="jd-cuda-"))
        (self.folder / "memory").mkdir()
        self.environment = {
            "LD_PRELOAD": str(library / "libfeigned.so"),
            "LD_LIBRARY_PATH": str(library),
            "FEIGNED_CUDA": str(self.folder),
            "FEIGNED_CUDA_TAG": secrets.token_hex(4),
            "FEIGNED_CUDA_GPUS": str(gpus),
            "FEIGNED_CUDA_MEMORY_MB": str(memory_mb),
            "JUPYTER_DISTRIB_RUNTIME_DIR": str(self.folder / "run"),
            "JUPYTER_DISTRIB_LOG_DIR": str(self.folder / "logs"),
            **env,
        }

    @contextmanager
    def notebook(self, **env: str) -> Iterator[Notebook]:
        """Start a kernel with the extension loaded."""
        folder = Path(tempfile.mkdtemp(prefix="book-", dir=self.folder))
        with Notebook(folder, {**self.environment, **env}) as book:
            book.ok("%load_ext jupyter_distrib")
            yield book

    def held_mb(self, gpu: int) -> int:
        """Return what all living processes hold of a GPU."""
        return sum(self._words(pid, 8 * gpu, 8) for pid in self._living()) >> 20

    def contexts(self) -> dict[int, list[int]]:
        """Return the GPUs on which each living process has a context."""
        return {pid: [gpu for gpu in range(16) if self._words(pid, 128 + 4 * gpu, 4)] for pid in self._living()}

    def calls(self, text: str = "") -> list[str]:
        """Return the calls that matter, so far, with this in their line."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if text in line]

    def refuse(self, *, on: bool) -> None:
        """Have the driver tell neither memory nor processes, as on a MIG slice."""
        path = self.folder / "refuse"
        path.touch() if on else path.unlink(missing_ok=True)

    def hang(self, *, on: bool = True) -> None:
        """Have no function of the driver's library return, or all of them."""
        path = self.folder / "hangs"
        path.touch() if on else path.unlink(missing_ok=True)

    def lose(self, gpu: int, *, on: bool = True) -> None:
        """Have a GPU fall off the bus, or have it back."""
        path = self.folder / f"lost-{gpu}"
        path.touch() if on else path.unlink(missing_ok=True)

    def _living(self) -> list[int]:
        return [pid for path in (self.folder / "memory").iterdir() if _lives(pid := int(path.name))]

    def _words(self, pid: int, start: int, size: int) -> int:
        return int.from_bytes((self.folder / "memory" / str(pid)).read_bytes()[start : start + size], "little")

    def __enter__(self) -> FeignedCuda:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = agents(self.folder / "run")
        for pid in found:
            os.kill(pid, signal.SIGTERM)
        left = wait_until_gone(found, 60)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"they outlive SIGTERM: {left}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
