"""The relay of one host, at the far end of a command's standard input and output. `bootstrap` starts it there.

    coordinator ==command==> PipedRelay --link--> agent --> ranks

The main thread makes the calls that come, one after another; the relay's own thread sends messages of the agent; a
third thread sends keep-alives. When its input ends or is silent, it waits for another connection (`takeover.py`); if
none comes in time, it ends, and with it the agent and all ranks.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jupyter_distrib.agent.gpus import choice, devices, inventory
from jupyter_distrib.agent.gpus.leases import holder_elsewhere
from jupyter_distrib.agent.gpus.torch_build import torch_build
from jupyter_distrib.coordinator import relay
from jupyter_distrib.coordinator.relay_inbox import RelayInbox
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command import takeover
from jupyter_distrib.system import control_groups, network_interfaces
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.pipe_link import PipeLink

ALIVE_S = 1.0
"""Seconds between keep-alives."""
SILENT_ALIVES = 12
"""Number of missed keep-alives after which the other side counts as gone."""
PART_BYTES = 1 << 20
END_S = 5.0
"""Seconds to wait for the agent to end its ranks and remove its folder."""
_CALLS = ("describe", "bring", "add_part", "store", "discard")


class PipedInbox(RelayInbox):
    """Forwards messages from the agent at once."""

    def __init__(self, send: Callable[[m.Message], None]) -> None:
        super().__init__()
        self._send = send
        self._gathered = b""
        """Frames to be sent together with the next one."""

    def put(self, frame: bytes, content: Any, *, more: bool = False) -> None:
        if content is not None:
            self._pass_on(b"")
            _send_content(self._send, 0, content)
            self._send(m.RelayPassed(frames=frame, has_content=True))
        elif more:
            self._gathered += frame
        else:
            self._pass_on(frame)

    def _pass_on(self, frame: bytes) -> None:
        if frames := self._gathered + frame:
            self._gathered = b""
            self._send(m.RelayPassed(frames=frames))

    def end(self) -> None:
        with suppress(OSError):  # the pipe is gone, too
            self._pass_on(b"")
            self._send(m.RelayEnded())

    def wait_for_end(self) -> None:
        """Return nothing: the events of a cell are already on their way."""


def _send_content(send: Callable[[m.Message], None], number: int, content: Any) -> None:
    """Send a large value in parts, so that keep-alives and other answers can be sent in between."""
    view = memoryview(content).cast("B")
    for start in range(0, max(1, view.nbytes), PART_BYTES):
        part = bytes(view[start : start + PART_BYTES])
        send(m.RelayContent(number=number, part=part, size_bytes=view.nbytes))


class PipedRelay:
    """The host's side of the pipe.

    Args:
        folder: Private to it; removed in the end.
    """

    def __init__(self, link: PipeLink, folder: str) -> None:
        self._link, self._folder = link, folder
        self._relay: relay.Relay | None = None
        self._waits = False
        """Whether the main thread is waiting for a call, and so would notice a keep-alive."""
        self._ended = threading.Event()
        self._limit_s = SILENT_ALIVES * ALIVE_S
        self._holder: tuple[Any, ...] = ()

    def serve(self) -> None:
        """Execute incoming calls until the coordinator is gone."""
        threading.Thread(target=self._keep_alive, name="jupyter_distrib-alive", daemon=True).start()
        with suppress(EOFError, OSError):
            while True:
                self._waits = True
                message = self._link.receive()
                self._waits = False
                if isinstance(message, m.RelayCall):
                    self._obey(message)
        self.end()

    def _obey(self, call: m.RelayCall) -> None:
        try:
            contents, value = None, self._call(call)
            if call.method == "logs":
                contents = tuple(name for name, _ in value)
                for _, content in value:
                    _send_content(self._link.send, call.number, content)
                value = None
        except Exception as error:  # noqa: BLE001 - reported by the caller
            if call.number:
                return self._link.send(
                    m.RelayFailed(number=call.number, type_name=type(error).__name__, text=str(error))
                )
            return traceback.print_exc()
        if call.number and not is_answered_only_on_failure(call.method, call.arguments):
            self._link.send(m.RelayReturned(number=call.number, value=value, contents=contents))

    def _call(self, call: m.RelayCall) -> Any:
        arguments: Any = call.arguments
        match call.method:
            case "start":
                try:
                    return self._start(**arguments[0])
                except OSError as error:
                    raise PoolError(f"no agent can be started in {self._folder} ({relay.reason(error)}).") from None
            case "use_address":
                self._started.address = str(arguments[0])
                return None
            case "gpus":
                return gpus_here(*arguments)
            case "logs":
                return self._started.logs(*arguments)
            case "end":
                return self.end()
            case "send":
                frame, *part = arguments
                return self._started.send(bytes(frame), *part)
            case "execute":
                frame, *more = arguments
                return self._started.execute(bytes(frame), *more)
            case method if method in _CALLS:
                return getattr(self._started, method)(*arguments)
        raise ValueError(f"there is no call {call.method!r}")

    @property
    def _started(self) -> relay.Relay:
        assert self._relay is not None, "it has not been started"
        return self._relay

    def _start(
        self,
        label: str,
        session: str,
        interface: str,
        env: Mapping[str, str],
        takeover: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Start the agent; return the facts needed to plan the worker group. `takeover` has the arguments of
        `_outlive`; without them, the relay ends with its pipes."""
        address, outer = own_address(interface)
        self._relay = relay.Relay(
            self._folder, label, session, address=address, env=env, inbox=PipedInbox(self._link.send)
        )
        if takeover:
            self._outlive(**takeover)
        return {
            "folder": self._folder,
            "address": address,
            "outer": outer,
            "machine": relay.machine(),
            "cpus": control_groups.cores(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        }

    # ------------------------------------------------------------------------------------------------ ending

    def _outlive(self, secret: str, limit_s: float, holder: Sequence[Any], *, input_shows_the_end: bool) -> None:
        """Go on for a while when the pipes break.

        Args:
            secret: The secret that the bringer of other pipes has to know.
            limit_s: Seconds to wait for them.
            holder: The result of `takeover.identity` in the coordinator.
            input_shows_the_end: See `PipeLink`.
        """
        self._limit_s, self._holder = limit_s, tuple(holder)
        takeover.listen(self._folder, secret, self._link)
        self._link.input_shows_the_end = input_shows_the_end
        self._link.outlives_its_pipes = True

    def _keep_alive(self) -> None:
        """Send keep-alives, in a thread, until the other side is gone for good."""
        heard, silent = -1, 0
        while not self._ended.wait(ALIVE_S):
            is_silent = heard == self._link.reads
            heard, silent = self._link.reads, silent + (self._waits or self._link.is_broken) if is_silent else 0
            with suppress(OSError):  # the main thread ends
                self._link.send_alive()
            if silent >= SILENT_ALIVES:
                self._link.break_off()
            if silent * ALIVE_S >= self._limit_s or takeover.is_gone(self._holder):
                self.end()

    def end(self) -> None:
        """End the agent, its ranks and this process."""
        self._ended.set()
        if self._relay is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self._relay.end()
        os._exit(0)


def is_answered_only_on_failure(method: str, arguments: Sequence[Any]) -> bool:
    """Return whether a call sends a cell without a content: the answer that it has come would only cost time."""
    return method == "send" and len(arguments) == 1


def own_address(interface: str) -> tuple[str, str]:
    """Return the address by which other hosts probably reach this one, and the address of its default route. The first
    is the address of the interface, if one is named, or else the address of the ssh connection.

    Raises:
        ValueError: There is no such interface.
    """
    known = network_interfaces.addresses()
    nowhere = ("192.0.2.1", "2001:db8::1")  # addresses of no machine (RFC 5737, RFC 3849)
    outer = next(filter(None, map(network_interfaces.source, nowhere)), "127.0.0.1")
    if interface and interface not in known:
        raise ValueError(f"it has no network interface {interface} with an address, but {', '.join(known)}")
    came_by = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return known[interface] if interface else next(iter(came_by), outer), known.get(interface, outer)


def main(folder: str, reading: str, writing: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a session that ends with its connection
    PipedRelay(PipeLink(int(reading), int(writing)), folder).serve()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """The GPUs of a host that its user may see."""

    names: tuple[str, ...] = ()
    """Name of each GPU."""
    holders: tuple[str, ...] = ()
    """Holder of each GPU of the requested type; empty for a free one."""
    problem: str = ""
    """Reason why none of them can be used, and what to do."""

    @property
    def free(self) -> int:
        return self.holders.count("")


def gpus_here(gpu_type: str, limit_s: float) -> dict[str, Any]:
    """Ask the driver and return the fields of `HostGpus`; blocks until it answers, or has not for so many seconds."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if words is None else tuple(filter(None, words.split(",")))
    there = inventory.read_now(limit_s)
    if problem := choice.problem_of(there, torch_build()):
        return {"problem": problem}
    try:
        found = devices.visible(there.gpus, chosen)
    except devices.UnknownDevice:  # the agent reports the error
        found = []
    fitting = devices.of_type(found, gpu_type) if gpu_type else found
    return {"names": tuple(gpu.name for gpu in found), "holders": tuple(map(holder_elsewhere, fitting))}
