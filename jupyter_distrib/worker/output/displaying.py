"""The function `display(...)` on a rank: an object that is more than text becomes a MIME bundle for the notebook.

Runs in the rank, in the thread that displays. A rank is not an IPython kernel, so IPython's own `display`,
`update_display` and `clear_output` are replaced in it by the functions of this file when a cell first imports
IPython. IPython's formatters give the representation of an object. In the same way the widgets of `tqdm.notebook`
become bars that the record can parse.
"""

from __future__ import annotations

import base64
import importlib.abc
import importlib.machinery
import json
import os
import secrets
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from jupyter_distrib.interfaces import identity
from jupyter_distrib.libraries import known, setting
from jupyter_distrib.system import process_environment
from jupyter_distrib.system.formatting import size as size_text
from jupyter_distrib.wire import messages as m

MAX_BYTES = 10_000_000
"""Largest display in bytes; larger ones slow the browser down."""
SEND_EVERY_S = 0.1
MAX_WAITING = 100
"""Maximum number of displays that may wait; if they come faster, the notebook gets the newest ones."""
_NOT_FOR_VIEWS = ("application/javascript", "application/vnd.jupyter.widget-view+json")
"""MIME types not sent to the notebook: code that must not run on behalf of a rank, and widgets whose model is not in
the kernel."""
_PLAIN = ("application/json", "application/pdf")
"""MIME types whose plain text says enough."""
BACKEND = "module://jupyter_distrib.worker.output.matplotlib_backend"
"""Matplotlib's name for the ranks' backend."""
Event = m.Displayed | m.Cleared | m.Noted
_SHOWN = ("text/html", "text/markdown", "text/latex", "image/")
"""The beginnings of the MIME types that views can show, besides plain text."""


class Displayer:
    """Sends the displays of one rank in one run."""

    def __init__(self, run: str, rank: int, send: Callable[[Event], None]) -> None:
        self._run, self._rank, self._send = run, rank, send
        self._lock = threading.RLock()
        """Reentrant, since a finalizer that displays something may be called in the middle of a display."""
        self._waiting: list[Event] = []
        self._clear_first: m.Cleared | None = None
        """A clearing that takes effect with the next display."""
        self._noted: set[str] = set()
        """Kinds of displays that were left out, with a note."""
        self._clears = 0
        """The number of calls of `clear_output`."""
        self._sent_at_s = float("-inf")
        self._timer: threading.Timer | None = None

    def show(self, data: dict[str, str], metadata: dict[str, object], display_id: str, *, update: bool) -> None:
        event = m.Displayed(
            run=self._run,
            rank=self._rank,
            data=data,
            metadata=metadata,
            display_id=display_id,
            update=update,
            at_s=time.monotonic(),
        )
        with self._lock:
            if self._clear_first and not update:
                self._waiting = [old for old in self._waiting if old is self._clear_first]
                self._clear_first = None
            if update:
                self._waiting = [old for old in self._waiting if not _is_update_of(old, display_id)]
            self._waiting = [*self._waiting, event][-MAX_WAITING:]
        self._soon()

    def clear(self, *, wait: bool) -> None:
        """Remove all displays and printed text; with `wait`, only when there is new output."""
        with self._lock:
            self._clears += 1
            event = m.Cleared(run=self._run, rank=self._rank, number=self._clears, wait=wait, at_s=time.monotonic())
            before = [old for old in self._waiting if old is not self._clear_first] if wait else []
            self._waiting = [*before, event]
            self._clear_first = event if wait else None
            _mark_output(self._clears, wait=wait)
        self._soon()

    def leave_out(self, kind: str) -> None:
        """Add a note, once for each kind, that a display of this MIME type cannot be shown."""
        if kind not in self._noted:
            self._noted.add(kind)
            text = (
                f"a display of {kind} is left out, since it needs code in the page: end the cell with the object, and "
                "the notebook shows what the ranks return"
            )
            self._send(m.Noted(run=self._run, rank=self._rank, text=text))

    def close(self) -> None:
        """Send the waiting displays; called before the rank reports that it has returned."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _soon(self) -> None:
        if self._timer is not None:
            return
        wait_s = self._sent_at_s + SEND_EVERY_S - time.monotonic()
        if wait_s <= 0:
            return self._flush()
        self._timer = threading.Timer(wait_s, self._flush)
        self._timer.daemon = True
        self._timer.start()

    def _flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._sent_at_s, self._timer = time.monotonic(), None
        for event in waiting:
            self._send(event)


def _mark_output(number: int, *, wait: bool) -> None:
    """Mark the place of a clearing in the printed text, by an escape sequence that terminals ignore."""
    code = f"\x1b]distrib-clear;{number}{';wait' if wait else ''}\x07".encode()
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(OSError, ValueError, AttributeError):  # the cell may have closed or replaced it
            stream.flush()
            os.write(fd, code)


def _is_update_of(event: Event, display_id: str) -> bool:
    return isinstance(event, m.Displayed) and event.update and event.display_id == display_id


# ---------------------------------------------------------------------------------------------------- what cells call


def display(
    *objects: Any,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    transient: Mapping[str, Any] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    **keywords: Any,
) -> Any:
    """Show objects as IPython's `display` does: the notebook shows them under the rank. Text is printed."""
    if clear:
        clear_output(wait=True)
    given = secrets.token_hex(8) if display_id is True else display_id or ""
    for item in objects:
        if isinstance(item, str) and not raw and not given:
            print(item)
            continue
        data, details = (dict(item), {}) if raw else _format(item, include, exclude)
        publish(data, {**details, **(metadata or {})}, transient={**(transient or {}), "display_id": given}, **keywords)
    if not given:
        return None
    from IPython.display import DisplayHandle

    return DisplayHandle(given)  # type: ignore[no-untyped-call]


def update_display(item: Any, *, display_id: str, **keywords: Any) -> None:
    """Replace the display with this id."""
    display(item, display_id=display_id, update=True, **keywords)


def clear_output(wait: bool = False) -> None:
    """Remove the displays and the printed text of this rank. The log keeps the text."""
    if identity.cell.displayer is not None:
        identity.cell.displayer.clear(wait=wait)


def publish(
    data: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    transient: Mapping[str, Any] | None = None,
    update: bool = False,
    **_: Any,
) -> None:
    """Show a MIME bundle, as IPython's `publish_display_data` does."""
    display_id = str((transient or {}).get("display_id") or "")
    bundle = {kind: _content(value) for kind, value in data.items() if kind not in _NOT_FOR_VIEWS}
    rich = [kind for kind in data if kind.startswith("application/") and kind not in _PLAIN]
    if rich and identity.cell.displayer is not None and not any(kind.startswith(_SHOWN) for kind in bundle):
        identity.cell.displayer.leave_out(rich[0])
    size_bytes = sum(map(len, bundle.values()))
    if size_bytes > MAX_BYTES:
        too_large = f"A display of {size_text(size_bytes)} is left out; up to {size_text(MAX_BYTES)} are shown."
        bundle = {"text/plain": f"{too_large} Save it to a file, or make it smaller."}
    if bundle.keys() == {"text/plain"} and not display_id:
        print(bundle["text/plain"])
    elif bundle and identity.cell.displayer is not None:
        identity.cell.displayer.show(bundle, _plain(metadata or {}), display_id, update=update)
    elif bundle:
        _publish_here(bundle, metadata, display_id, update)


def _publish_here(bundle: dict[str, str], metadata: Mapping[str, Any] | None, display_id: str, update: bool) -> None:
    """Show a bundle outside of a rank: in the kernel (the inline pool) or a script."""
    if not process_environment.in_ipython():
        print(bundle.get("text/plain", ""))
        return
    transient = {"display_id": display_id} if display_id else {}
    shell: Any = sys.modules["IPython.core.interactiveshell"]
    shell.InteractiveShell.instance().display_pub.publish(bundle, metadata, transient=transient, update=update)


def _content(value: Any) -> str:
    match value:
        case str():
            return value
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            return _json(value)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except (TypeError, ValueError):  # keys that are not strings, or numbers that JSON does not have
        return json.dumps(str(value))


def _plain(metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return metadata that JSON can represent, else an empty dict."""
    try:
        plain: dict[str, object] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError):
        return {}
    return plain


def _format(item: Any, include: Any, exclude: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return _formatter().format(item, include=include, exclude=exclude)  # type: ignore[no-any-return]


@cache
def _formatter() -> Any:
    from IPython.core.formatters import DisplayFormatter

    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _png)
    return formatter


def _png(figure: Any) -> str | None:
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, fmt="png", bbox_inches="tight", base64=True)  # type: ignore[no-any-return, no-untyped-call]


def show_figures() -> None:
    """Display the figures that matplotlib has open, and close them."""
    pyplot = sys.modules["matplotlib.pyplot"]
    try:
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
    finally:
        pyplot.close("all")


def close() -> None:
    """Show the cell's open figures, as a notebook does, and send the waiting displays."""
    try:
        if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None and pyplot.get_backend() == BACKEND:
            show_figures()
    except Exception:  # noqa: BLE001 - figures that cannot be drawn do not make the cell fail
        traceback.print_exc()
    finally:
        if (displayer := identity.cell.displayer) is not None:
            identity.cell.displayer = None
            displayer.close()


# ---------------------------------------------------------------------------------------------------- IPython's names


def install() -> None:
    """Install the import hook that replaces functions of other packages; called once in a rank."""
    sys.meta_path.insert(0, _Finder())


def _replace_functions(module: types.ModuleType) -> None:
    module.__dict__.update(
        display=display, update_display=update_display, clear_output=clear_output, publish_display_data=publish
    )


_REPLACED = {
    "IPython.core.display_functions": _replace_functions,
    **known.mends(),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Loads certain modules as Python does, and replaces parts of them before other code sees them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        replace = _REPLACED.get(fullname)
        if replace is None and fullname not in setting.waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if replace is not None:
                    replace(module)
                setting.imported(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
