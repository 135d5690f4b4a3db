"""A real kernel, driven as a front end drives it: cells in, outputs out."""

from __future__ import annotations

import os
import queue
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_client.manager import KernelManager

from jupyter_distrib.kernel.sidebar import bridge

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ROOT = Path(__file__).parent.parent
ABORTS_THE_NEXT = version("ipykernel").startswith("6.")
"""Whether a kernel aborts the cell that comes right after a failed one, as ipykernel 6 does."""


@dataclass
class Outcome:
    """What a cell left in the notebook."""

    status: str = ""
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    """`text/plain` of the cell's value."""
    result_html: str = ""
    displays: dict[str, str] = field(default_factory=dict)
    """The last `text/plain` of each display."""
    displays_html: dict[str, str] = field(default_factory=dict)
    """The last `text/html` of each display."""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    """As shown, without colours, and without the address of a page."""
    address: str = ""
    """The page of the documentation that the traceback names."""
    kinds: set[str] = field(default_factory=set)
    """Mime types of the displays."""
    news: list[dict[str, Any]] = field(default_factory=list)
    """What the kernel told the sidebar meanwhile."""
    page: str = ""
    """What a `?` shows, without colours."""
    updates: list[dict[str, object]] = field(default_factory=list)
    """What widgets were told."""
    open_widgets: set[str] = field(default_factory=set)
    messages: int = 0
    """Messages that carry output."""
    size_bytes: int = 0
    wall_s: float = 0.0

    @property
    def view(self) -> str:
        """All displays, one after another."""
        return "\n".join(self.displays.values())

    @property
    def text(self) -> str:
        """Everything that can be read under the cell."""
        return "\n".join(filter(None, (self.stdout, self.stderr, self.view, self.result, self.traceback)))

    @property
    def live(self) -> dict[str, object]:
        """The state of the widgets, all together."""
        return {name: value for update in self.updates for name, value in update.items()}


class Notebook:
    """One kernel. `cell` runs a cell and waits for its end; `start`, `until` and `finish` do the same in steps."""

    def __init__(
        self,
        folder: Path,
        env: dict[str, str] | None = None,
        *,
        below: Sequence[str] = (),
        python: str = sys.executable,
        module: str = "ipykernel_launcher",
        sockets: Path | None = None,
    ) -> None:
        """`module` is that of the kernel; `sockets` is the beginning of the paths of unix sockets to use in place of
        ports."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        of_kernel = {**os.environ, "PYTHONPATH": path, **(env or {})}
        reached = {"transport": "ipc", "ip": str(sockets)} if sockets else {}
        for attempts_left in (2, 1, 0):
            self.manager = KernelManager(kernel_name="python3", **reached)
            self.manager.kernel_spec.argv = [*below, python, "-m", module, "-f", "{connection_file}"]
            self.manager.start_kernel(cwd=str(folder), env=of_kernel)
            self.client: Any = self.manager.client()
            self.client.start_channels()
            try:
                self.client.wait_for_ready(timeout=60)
                break
            except RuntimeError:  # jupyter_client chooses ports that are free, and another process may take them first
                self.client.stop_channels()
                self.manager.shutdown_kernel(now=True)
                if not attempts_left:
                    raise
        self._outcome, self._message, self._began_s = Outcome(), "", 0.0
        self._ended = False
        self._bundles: dict[str, dict[str, str]] = {}
        """The last bundle of each display, whichever cell it was sent from."""
        self._closed: set[str] = set()

    def __enter__(self) -> Notebook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def cell(self, code: str, timeout_s: float = 60.0, cell_id: str = "") -> Outcome:
        self.start(code, cell_id)
        return self.finish(timeout_s)

    def ok(self, code: str) -> Outcome:
        """Run a cell that has to succeed."""
        outcome = self.cell(code)
        assert outcome.status == "ok", outcome.text
        return outcome

    def fails(self, code: str) -> Outcome:
        """Run a cell that has to fail."""
        outcome = self.cell(code)
        assert outcome.status == "error", outcome.text
        return outcome

    def forget(self) -> None:
        """Take away the names that cells have bound; `%reset` does more, and takes 0.2 s."""
        self.ok(
            "for _name in [name for name in globals() if name[0] != '_' and name not in get_ipython().user_ns_hidden]:\n"
            "    del globals()[_name]"
        )

    def start(self, code: str, cell_id: str = "", *, keyboard: bool = False) -> None:
        """Send a cell; with its id, as JupyterLab does it, which then is given widgets; with a keyboard, as a console."""
        self._outcome, self._began_s, self._ended = Outcome(), time.monotonic(), False
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": keyboard,
        }
        metadata = {"cellId": cell_id} if cell_id else {}
        message = self.client.session.msg(
            "execute_request", {**content, "stop_on_error": not ABORTS_THE_NEXT}, metadata=metadata
        )
        self.client.shell_channel.send(message)
        self._message = message["header"]["msg_id"]

    def until(self, text: str, timeout_s: float = 60.0) -> Outcome:
        """Wait until this text can be read under the running cell."""
        if not self.shows(text, timeout_s):
            raise AssertionError(f"the cell ended without {text!r}:\n{self._outcome.text}")
        return self._outcome

    def shows(self, text: str, timeout_s: float = 60.0) -> bool:
        """Wait until this text can be read under the running cell; False if the cell ends without."""
        assert len(text) > 2 or not text.isascii(), f"{text!r} is also part of what the view says while a cell waits"
        deadline = time.monotonic() + timeout_s
        while text not in self._outcome.text and text not in str(self._outcome.live):
            if self._take(deadline):
                return False
        return True

    def shows_html(self, text: str, timeout_s: float = 60.0) -> bool:
        """Wait until the HTML under the running cell has this text; False if the cell ends without."""
        deadline = time.monotonic() + timeout_s
        while not any(text in html for html in self._outcome.displays_html.values()):
            if self._take(deadline):
                return False
        return True

    def finish(self, timeout_s: float = 60.0) -> Outcome:
        """Wait for the end of the running cell."""
        deadline = time.monotonic() + timeout_s
        while not self._ended:
            self._take(deadline)
        outcome = self._outcome
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == self._message:
                outcome.status = reply["content"]["status"]
                pages = [
                    part["data"]["text/plain"]
                    for part in reply["content"].get("payload", ())
                    if part["source"] == "page"
                ]
                outcome.page = _COLOUR.sub("", "\n".join(pages))
                outcome.wall_s = time.monotonic() - self._began_s
                return outcome

    def asked(self, prompt: str = "", timeout_s: float = 15.0) -> str:
        """Wait until the running cell asks its user for a line, with this in the prompt."""
        message = self.client.get_stdin_msg(timeout=timeout_s)
        asked = str(message["content"]["prompt"])
        assert prompt in asked, asked
        return asked

    def types(self, *lines: str, prompt: str = "") -> None:
        """Answer the questions of the running cell, one after another."""
        for line in lines:
            self.asked(prompt)
            self.client.input(line)

    def settled(self, display: str, widget: str) -> dict[str, str]:
        """What a display of an earlier cell shows in the end, once this widget of it is closed."""
        while widget not in self._closed:
            self._note(self.client.get_iopub_msg(timeout=30))
        return self._bundles[display]

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """As the front end's restart button does it."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def _take(self, deadline: float) -> bool:
        """Take in one message; True if the cell has ended."""
        try:
            message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"nothing more came in time:\n{self._outcome.text}") from None
        self._note(message)
        if message["parent_header"].get("msg_id") != self._message:
            return False
        self._ended = self._fold(message["msg_type"], message["content"])
        return self._ended

    def _note(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if display := content.get("transient", {}).get("display_id"):
            self._bundles[display] = content["data"]
        elif message["msg_type"] == "comm_close":
            self._closed.add(content["comm_id"])

    def _fold(self, kind: str, content: dict[str, Any]) -> bool:
        outcome = self._outcome
        if kind == "status":
            return bool(content["execution_state"] == "idle")
        if kind == "execute_input":
            return False
        if content.get("comm_id") == bridge.COMM:  # nothing of it can be seen below the cell
            outcome.news.append(content["data"])
            return False
        outcome.messages += 1
        outcome.size_bytes += len(str(content))
        if kind == "stream":
            setattr(outcome, content["name"], getattr(outcome, content["name"]) + content["text"])
        elif kind == "execute_result":
            outcome.result = content["data"].get("text/plain", "")
            outcome.result_html = content["data"].get("text/html", "")
        elif kind in ("display_data", "update_display_data"):
            key = content.get("transient", {}).get("display_id") or f"display {outcome.messages}"
            outcome.displays[key] = content["data"].get("text/plain", "")
            outcome.displays_html[key] = content["data"].get("text/html", "")
            outcome.kinds |= content["data"].keys()
        elif kind == "comm_open":
            outcome.open_widgets.add(content["comm_id"])
            outcome.updates.append(content["data"].get("state", {}))
        elif kind == "comm_msg":
            outcome.updates.append(content["data"].get("state", {}))
        elif kind == "comm_close":
            outcome.open_widgets.discard(content["comm_id"])
        elif kind == "error":
            outcome.ename, outcome.evalue = content["ename"], content["evalue"]
            shown = _COLOUR.sub("", "\n".join(content["traceback"]))
            outcome.traceback, _, outcome.address = shown.partition("\nMore: ")
        return False


def ask(book: Notebook, **content: Any) -> dict[str, Any]:
    """One request on the control channel, and its answer."""
    message = book.client.session.msg(bridge.REQUEST, content)
    book.client.control_channel.send(message)
    while True:
        reply = book.client.get_control_msg(timeout=20)
        if reply["parent_header"].get("msg_id") == message["msg_id"]:
            answer: dict[str, Any] = reply["content"]
            return answer
