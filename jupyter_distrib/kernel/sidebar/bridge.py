"""The requests of front ends to this kernel (stop a run, choose a pool, show a log ...), and the news for them.

`handle` takes a request and answers at once; a longer action goes on in a thread, and its end is news. Requests come
as `distrib_request` on the kernel's control channel, which is served in a thread of its own, also while a cell runs.
`control_handlers` is an attribute of ipykernel, not a documented interface: where it is missing, requests come on a
comm on which the kernel never speaks.

News are messages on one comm with a fixed id, sent only when something has changed, from a thread of its own. The
first one, at `%load_ext`, reaches pages that are open already. Until a page has requested something, further ones are
sent only while a run goes on for some time, for a page that is opened meanwhile; so short cells pay for none. Only
the kernel sends on this comm, since a comm on which both sides send is served only when the running cell has ended
(ipykernel 6, and 7.4). It is never opened, so that a front end without our sidebar does not notice it; the sidebar
finds it with `comm_info_request` and listens on the iopub channel. The overview of an idle kernel does not change, so
nothing is sent, and the server may end a kernel that is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.interactiveshell import InteractiveShell

from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.terminal_stream import styled_lines
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.settings.cell_options import GroupSize
from jupyter_distrib.kernel.settings.settings import SIDEBAR
from jupyter_distrib.kernel.sidebar.cell_outputs import CellPlace, Cells, Shown
from jupyter_distrib.system import record_file
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.kernel.session.status import PoolStatus
    from jupyter_distrib.kernel.sidebar.overview import UnchangedParts
    from jupyter_distrib.kernel.sidebar.pool_forms import PoolForms


COMM = "jupyter_distrib-events"
_GATHER_S = 0.1
"""Seconds during which changes are collected into one message, so that there are at most ten a second."""
_LOOK_S = 1.0
"""Interval of reading the progress of a run."""
_BEAT_S = 2.0
"""Maximum seconds until a reloaded page gets news from a kernel that is busy with a cell."""
REQUEST, REPLY = "distrib_request", "distrib_reply"
REQUEST_COMM = "jupyter_distrib-requests"
LOG_BYTES = 200_000
"""Size of the part at the end of a rank's log that is shown first."""
ALL_LOG_BYTES = 1_000_000
"""The same of all ranks that are shown together: a page waits 5 s for an answer, and Stop waits behind it."""
WHOLE_LOG_BYTES = 8_000_000
"""Maximum size shown of the logs of all ranks that are shown together; the files have all of it."""


class _Broadcast:
    """The sender of the overview that `look` returns, to front ends, whenever it has changed.

    Args:
        look: Returns the present overview.
        active: Returns whether something runs, so that the overview changes by itself.
    """

    def __init__(self, look: Callable[[], dict[str, Any]], active: Callable[[], bool]) -> None:
        from comm import create_comm, get_comm_manager

        self._overview, self._active = look, active
        self._comm = create_comm(target_name=COMM, comm_id=COMM, primary=False)
        get_comm_manager().register_comm(self._comm)
        self._news, self._pages, self._closing = threading.Event(), threading.Event(), threading.Event()
        self.changed: Callable[[], None] = self._news.set
        """Requests that the overview be sent soon; from any thread."""
        self._last: Mapping[str, Any] = {}
        self._sent_s = 0.0
        threading.Thread(target=self._send_changes, name="jupyter_distrib-news", daemon=True).start()

    def note_page(self) -> None:
        """Send every change from now on: there is a page."""
        self._pages.set()
        self._news.set()

    def send(self, kind: str, content: Mapping[str, Any], now_s: float | None = None) -> None:
        """Send another message at once; from any thread. `now_s` is in seconds since the epoch; by default the present
        time."""
        # Never under the key "state": nbclient would take it for a widget's state and save it in the notebook.
        self._comm.send({"kind": kind, kind: content, "now_s": time.time() if now_s is None else now_s})

    def close(self) -> None:
        from comm import get_comm_manager

        self._closing.set()
        self.note_page()
        self.send("closed", {})
        get_comm_manager().unregister_comm(self._comm)

    def _send_changes(self) -> None:
        while not self._closing.is_set():
            self._wait()
            self._news.clear()
            if self._closing.is_set():
                return
            if self._pages.is_set() or not self._last or self._active():
                with suppress(Exception):  # it reads pools of other packages; the next change is sent all the same
                    self._send_if_changed()

    def _wait(self) -> None:
        """Wait for a change, and then for others: a moment or, before there is a page, until short runs have ended."""
        goes_on = self._active()
        if self._pages.is_set():
            self._news.wait(_LOOK_S if goes_on else None)
            self._closing.wait(_GATHER_S)
        else:
            if not goes_on:
                self._news.wait()
            self._pages.wait(_BEAT_S if self._last else _GATHER_S)

    def _send_if_changed(self) -> None:
        at_s, now_s, overview = time.time(), time.monotonic(), self._overview()
        if overview == self._last and not (self._active() and now_s - self._sent_s >= _BEAT_S):
            return
        self._last, self._sent_s = overview, now_s
        self.send("overview", overview, at_s)


class SidebarObserver(Observer):
    """An observer that sends a stall and the end of a run to the sidebar at once; progress is sent once a second."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if isinstance(event, (m.Ended, m.Stalled, m.Moved)):
            self._changed()


class FrontEnd:
    """The bridge to all front ends of this kernel: their requests, and the news for them."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._kernel = shell, shell.kernel
        self._pools: dict[str, PoolStatus] = {}
        """The last known status of each pool."""
        self._unchanged: UnchangedParts | None = None
        """The parts of the last overview that the next one reuses."""
        self._doing: dict[str, str] | None = None
        self._trouble: dict[str, Any] | None = None
        self._forms: PoolForms | None = None
        self._following: session.Session | None = None
        """The session whose runs are followed, since a page has requested something."""
        self._pages_lock, self._is_closed = threading.Lock(), False
        self.cells = Cells(shell, lambda settled: self._news.send("settled", settled))
        self._news = _Broadcast(self._overview, self._active)
        self._route = self._listen()
        shell.events.register("pre_run_cell", self.cells.began)
        shell.events.register("post_run_cell", self.cells.ended)
        session.current().on_change = self._news.changed
        if self._route == "comm":  # while cells run, it would hear of no page
            self._note_page()
        self._news.changed()  # pages that are open already learn of this kernel

    # ------------------------------------------------------------------------------------------------ channels

    def _listen(self) -> str:
        handlers = getattr(self._kernel, "control_handlers", None)
        if isinstance(handlers, dict):
            handlers[REQUEST] = self._on_control
            return "control"
        from comm import get_comm_manager

        get_comm_manager().register_target(REQUEST_COMM, self._on_open)
        return "comm"

    def _note_page(self) -> None:
        """Send every change from now on."""
        with self._pages_lock:
            if self._following is not None or self._is_closed:
                return
            self._following = current = session.current()
            current.observers.own.append(self._follow)
        for run in [each for each in current.history if not each.done()]:
            run.observers.add(SidebarObserver(self._news.changed))
        self._news.note_page()

    async def _on_control(self, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        self._note_page()
        answer = self.handle(parent["content"])
        self._kernel.session.send(stream, REPLY, answer, parent, ident)

    def _on_open(self, comm: Any, opening: Mapping[str, Any]) -> None:
        comm.on_msg(lambda message: self._on_message(message["content"]["data"]))

    def _on_message(self, request: Mapping[str, Any]) -> None:
        self._note_page()
        self._news.send("answer", {"to": request.get("id"), **self.handle(request)})

    def close(self) -> None:
        if self._forms is not None:
            self._forms.end_trial()
        with self._pages_lock:
            self._is_closed = True
            if self._following is not None:
                self._following.observers.own.remove(self._follow)
        session.current().on_change = None
        self._shell.events.unregister("pre_run_cell", self.cells.began)
        self._shell.events.unregister("post_run_cell", self.cells.ended)
        if self._route == "control":
            self._kernel.control_handlers.pop(REQUEST, None)
        else:
            from comm import get_comm_manager

            get_comm_manager().unregister_target(REQUEST_COMM, self._on_open)
        self._news.close()

    def _overview(self) -> dict[str, Any]:
        from jupyter_distrib.kernel.sidebar.overview import UnchangedParts, overview  # %load_ext does not wait for it

        current, trouble = session.current(), self._trouble
        settings, reason = current.choices.readable_settings()
        if reason:
            trouble = {"text": reason, "at_s": 0.0}
        self._unchanged = self._unchanged or UnchangedParts()
        seen = overview(current, settings, self._pools, self._unchanged)
        more = {
            "route": self._route,
            "doing": self._doing,
            "trouble": trouble,
            "trial": self._forms and self._forms.trial,
            "views": self.cells.views(),
        }
        return {**seen, **more}

    def _seen(self) -> dict[str, Any]:
        return {"now_s": time.time(), "overview": self._overview()}

    def show(self, shown: Shown) -> None:
        self.cells.show(shown)
        self._news.changed()

    def _follow(self, run: ObservedRun) -> SidebarObserver:
        return SidebarObserver(self._news.changed)

    def _active(self) -> bool:
        """Return whether a run is in progress. Runs that had ended in the last overview are not checked."""
        ended = self._unchanged.ended if self._unchanged is not None else {}
        return not all(run.done() for run in [each for each in session.current().history if each not in ended])

    # ------------------------------------------------------------------------------------------------ requests

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a request; from any thread. The answer has `ok` and, if that is False, `error`, a sentence."""
        try:
            return {"ok": True, **self._done(request)}
        except DistributedError as error:
            return {"ok": False, "error": str(error)}
        except Exception as error:  # noqa: BLE001 - a front end that gets no answer would wait
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _done(self, request: Mapping[str, Any]) -> dict[str, Any]:
        current = session.current()
        match request.get("op"):
            case "overview":
                return self._seen()
            case "stop":
                current.find_run(_text(request, "run")).cancel(force=bool(request.get("force")))
                self._news.changed()
            case "move_up":
                current.queue.move_up(current.find_run(_text(request, "run")))
                self._news.changed()
            case "stacks":
                current.find_run(_text(request, "run")).link.ask_stacks()
            case "pick":
                settings = current.settings
                pool = _one_of(request, "pool", settings.pools) if "pool" in request else None
                strategy = _one_of(request, "strategy", settings.strategies) if "strategy" in request else None
                size = _size(request["size"]) if "size" in request else None
                current.choices.pick(pool=pool, strategy=strategy, size=size)
                self._news.changed()
                return self._seen()  # the next choice adds to this one
            case "unpick":
                current.choices.unpick()
                self._news.changed()
                return self._seen()
            case "start" | "resize" | "restart" as op:
                self._start_ranks(op, _one_of(request, "pool", current.settings.pools), request)
            case "stop_ranks":
                settings, _ = current.choices.readable_settings()
                current.pools.stop_ranks(_one_of(request, "pool", settings.pools), SIDEBAR)
            case "refresh":
                threading.Thread(target=self._ask, name="jupyter_distrib-ask", daemon=True).start()
            case "logs":
                return self._log(request)
            case "history" | "history_table" | "compare" | "page" as op:
                return self._handle_history_request(op, request)
            case "drawing":
                from jupyter_distrib.kernel.views import page_code

                return {
                    "drawing": {"script": page_code.script(page_code.PAGE), "style": page_code.style(page_code.PAGE)}
                }
            case "view":
                return {"view": self.cells.view(_text(request, "run"))}
            case "settled":
                return {"settled": self.cells.unsaved(request.get("live", ()), request.get("loaded_ms"))}
            case "saved":
                self.cells.note_saved(request["runs"], request.get("saved_ms") or 0.0)
            case "repair":
                return {"granted": self.cells.grant_repair(tuple(request["runs"]), _text(request, "page"))}
            case "pool_forms" | "try_pool" | "end_trial" | "write_pool" | "trust_pool" as op:
                return self._handle_form_request(op, request)
            case "dismiss":
                self._trouble = None
                self._news.changed()
            case op:
                raise OptionsError(
                    f"this version of jupyter_distrib does not know the request {op!r}: restart the kernel."
                )
        return {}

    def _handle_history_request(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        from jupyter_distrib.kernel.sidebar import overview, run_page  # not needed before somebody looks

        if op == "compare":
            session.current().history_writer.flush()
            return run_page.compared([str(name) for name in request["runs"]])
        if op == "page":
            return run_page.page(session.current(), _text(request, "run"), str(request.get("against") or ""))
        session.current().history_writer.flush()
        listed = overview.saved_runs if op == "history" else overview.table_of_saved_runs
        return listed(str(request.get("words", "")))

    def _handle_form_request(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        from jupyter_distrib.kernel.sidebar.pool_forms import PoolForms  # not needed before somebody opens a form

        if self._forms is None:
            self._forms = PoolForms(self._news.changed)
        answer = self._forms.handle(op, request)
        self._news.changed()
        return {**answer, **self._seen()}

    def _start_ranks(self, op: str, pool: str, request: Mapping[str, Any]) -> None:
        """Start ranks in a thread, which may take seconds; the front end can stop them meanwhile."""
        if self._doing is not None:
            raise OptionsError(f"the {self._doing['pool']} pool is still being started; stop it, or wait.")
        if (size := _size(request)) != GroupSize():
            session.current().choices.resize(pool, size, SIDEBAR)
        self._doing, self._trouble = {"op": op, "pool": pool}, None
        self._news.changed()

        def work() -> None:
            pools = session.current().pools
            try:
                match op:
                    case "start":
                        pools.start_ranks(pool)
                    case "resize":
                        pools.resize(pool, by=SIDEBAR)
                    case _:
                        pools.restart_ranks(pool, SIDEBAR)
            except (DistributedError, OSError) as error:
                self._trouble = {"text": str(error), "at_s": time.time()}
            finally:
                self._doing = None
                self._ask()

        threading.Thread(target=work, name=f"jupyter_distrib-{op}", daemon=True).start()

    def _ask(self) -> None:
        """Ask every used pool for its nodes and for the holders of its devices."""
        from jupyter_distrib.kernel.session.status import pool_status

        current = session.current()
        for connection in current.pools.connections:
            with suppress(DistributedError):
                self._pools[connection.facts.pool] = pool_status(connection, current)
        self._news.changed()

    def _log(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from jupyter_distrib.kernel.sidebar import run_page

        path = run_page.log_file(session.current(), _text(request, "run"), int(request["rank"]))
        among = max(1, int(request.get("among") or 1))
        most = WHOLE_LOG_BYTES // among if request.get("whole") else min(LOG_BYTES, ALL_LOG_BYTES // among)
        text, skipped = _end_of(path, most)
        lines = [{"text": line, "spans": spans} for line, spans in styled_lines(text)]
        return {"lines": lines, "skipped_bytes": skipped, "path": str(path)}


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise OptionsError(f"the request {request.get('op')} has no {name}.")
    return value


def _one_of(request: Mapping[str, Any], name: str, choices: Mapping[str, Any]) -> str:
    value = _text(request, name)
    if value not in choices:
        raise OptionsError(f"there is no {name} {value}; there are: {', '.join(choices)}.")
    return value


def _size(request: Mapping[str, Any]) -> GroupSize:
    """Return the size in a request; `GroupSize()` for the pool's default."""
    gpus, ranks, gpu_type = (request.get(name) for name in ("gpus", "ranks", "gpu_type"))
    for number in (gpus, ranks):
        if number is not None and (not isinstance(number, int) or not 0 < number <= 1000):
            raise OptionsError(f"the number of ranks must be 1 to 1000, not {number!r}.")
    if ranks and (gpus or gpu_type):
        raise OptionsError("ranks have GPUs or are CPU ranks, not both.")
    return GroupSize(count=gpus or ranks, gpus=not ranks, gpu_type=gpu_type or "")


def _end_of(path: Path, most_bytes: int) -> tuple[str, int]:
    """Return the end of a file, starting at the beginning of a line, and the number of bytes before it."""
    try:
        with record_file.opened(path) as file:
            skipped = max(0, file.seek(0, 2) - most_bytes)
            file.seek(skipped)
            data = file.read()
    except OSError:
        return "", 0
    if skipped:
        whole = data.partition(b"\n")[2]
        skipped += len(data) - len(whole)
        data = whole
    return data.decode("utf-8", "backslashreplace"), skipped


# ---------------------------------------------------------------------------------------------------- of this kernel


_installed: FrontEnd | None = None


def install(shell: InteractiveShell) -> None:
    """Start serving the front ends of this shell's kernel; a shell in a terminal has none."""
    global _installed
    if _installed is None and getattr(shell, "kernel", None) is not None:
        _installed = FrontEnd(shell)


def remove() -> None:
    global _installed
    if _installed is not None:
        _installed.close()
    _installed = None


def handle(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a front end's request, received on any channel; from any thread."""
    if _installed is None:
        return {"ok": False, "error": "jupyter_distrib is not loaded in this kernel: run %load_ext jupyter_distrib."}
    return _installed.handle(request)


def show(shown: Shown) -> None:
    """Notify pages that a view can be drawn."""
    if _installed is not None:
        _installed.show(shown)


class FinalDisplay(Protocol):
    """The last state of a display."""

    view: str
    """The name by which pages find it among the outputs of the cell."""
    data: dict[str, Any]
    """Its MIME bundle."""
    metadata: dict[str, Any]


def keep_final_view(display: FinalDisplay, *, model_id: str, place: CellPlace, detached: bool) -> None:
    """Keep the final view of a run, or of the runs of a sweep, for the pages; see `Cells.keep_final_view`.

    Args:
        display: The display of the view.
        model_id: The id of the widget in the display; empty if there was none.
        place: The execution of the cell with the display.
        detached: Whether the cell may have ended before.
    """
    if _installed is not None:
        output = {"output_type": "display_data", "data": dict(display.data), "metadata": dict(display.metadata)}
        view = {"run": display.view, "model": model_id, "output": output}
        _installed.cells.keep_final_view(place, view, detached=detached)


def route() -> str:
    """Return the channel on which requests reach this kernel: `control`, `comm`, or empty if it serves none."""
    return "" if _installed is None else _installed._route  # noqa: SLF001 - same file
