"""Another process that holds leases of GPUs, as the agent of another environment, user or cluster does."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from jupyter_distrib.agent.devices import Gpu

_CODE = """
import sys
from jupyter_distrib.agent.devices import Gpu
from jupyter_distrib.agent.gpu_leases import Leases
from jupyter_distrib.system.event_loop import Loop
loop = Loop()
leases = Leases(loop)
def take():
    gpu = Gpu(index=0, uuid=sys.stdin.readline().strip(), name="", memory_bytes=1, used_bytes=0)
    print(leases.take(gpu, "other.ipynb (kernel 7)"), flush=True)
loop.watch(0, take)
loop.run()
"""


class Holder:
    """A process that takes leases when it is told, and answers who asks for them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hold(self, gpu: Gpu) -> bool:
        """Have it take a GPU; return whether that was free."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{gpu.uuid}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"

    def __enter__(self) -> Holder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
