"""Another process that holds leases of GPUs, as the agent of another environment, user or cluster does."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from jupyter_distrib.agent.gpus.devices import Gpu

_CODE = """
import os, sys
from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.gpus.leases import Leases
from jupyter_distrib.system.event_loop import Loop
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))  # now: the interpreter may be in a folder that is root's alone
loop = Loop()
leases = Leases(loop)
def take():
    gpu = Gpu(index=0, uuid=sys.stdin.readline().strip(), name="", memory_bytes=1, used_bytes=0)
    print(leases.lease(gpu, "other.ipynb (kernel 7)"), flush=True)
loop.watch(0, take)
loop.run()
"""


class Holder:
    """A process that takes leases when it is told, and answers who asks for them.

    Args:
        uid: The user whose process it is; None: this one.
    """

    def __init__(self, uid: int | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *([] if uid is None else [str(uid)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


_STRANGER = """
import os, socket, sys
uid, name, answer = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
os.setgid(uid) if uid != os.getuid() else None
os.setuid(uid)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0jupyter_distrib-" + name)
listener.listen(16)
print(flush=True)
while True:
    sock, _ = listener.accept()
    for byte in (answer[:1], answer[1:]) if len(sys.argv) > 4 else (answer,):
        try:
            sock.send(byte)
        except OSError:
            pass
    kept = sock
"""


class Stranger:
    """A program that is no agent, binds a GPU's name, and sends these bytes to whoever asks.

    Args:
        in_parts: Whether the first byte comes alone.
    """

    def __init__(self, gpu: Gpu, uid: int, answer: bytes, *, in_parts: bool = False) -> None:
        words = [str(uid), gpu.uuid, answer.hex(), *(["parts"] if in_parts else [])]
        self.process = subprocess.Popen([sys.executable, "-c", _STRANGER, *words], stdout=subprocess.PIPE)

    def __enter__(self) -> Stranger:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
