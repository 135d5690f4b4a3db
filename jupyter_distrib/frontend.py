"""What the front end asks of this kernel, done: stop a run, choose a pool, start ranks, show a log.

`handle` takes a request and answers at once; what takes longer goes on in a thread, and its end is news
(`broadcast.py`). Requests come as `distrib_request` on the kernel's control channel, which is served in a thread of its
own, also while a cell runs. `control_handlers` is an attribute of ipykernel and no documented interface: where it is
missing, requests come on a comm on which the kernel never speaks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from jupyter_distrib import session, settings
from jupyter_distrib.broadcast import Broadcast
from jupyter_distrib.errors import DistributedError, OptionsError
from jupyter_distrib.overview import overview
from jupyter_distrib.pools import kinds
from jupyter_distrib.run import Run
from jupyter_distrib.settings import SIDEBAR
from jupyter_distrib.strategies import POOLS, STRATEGIES
from jupyter_distrib.streams import without_codes

REQUEST, REPLY = "distrib_request", "distrib_reply"
REQUEST_COMM = "jupyter_distrib-requests"
LOG_BYTES = 200_000
"""Of a rank's log, the end that is shown; the file has all of it."""
SETTLED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One execution of a notebook's cell."""

    cell: str
    """Its id; empty if the front end does not tell."""
    count: int
    """The number that stands beside it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Settled:
    """What a cell shows of its runs when they have ended, as a notebook file holds it."""

    place: Place
    views: list[dict[str, Any]]
    """In the order of the runs: `run`, `model`, and the last `output` of its display."""
    outcome: list[dict[str, Any]] = field(default_factory=list)
    """The value or the error of the cell."""


class FrontEnd:
    """All front ends of this kernel together: who asks, and who is told."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._kernel = shell, shell.kernel
        self._answers: dict[str, dict[str, Any]] = {}
        self._settings = settings.without_files(kinds(POOLS), STRATEGIES)
        """As they were when they could last be read."""
        self._doing: dict[str, str] | None = None
        self._trouble: dict[str, Any] | None = None
        self._settled: deque[Settled] = deque(maxlen=SETTLED)
        self._unfinished: list[tuple[Place, dict[str, Any]]] = []
        """Settled views of the cell that is running, which may still end with a value or an error."""
        self._counts: dict[str, int] = {}
        """By cell, the number of its last execution; what an earlier one showed is nobody's any more."""
        self._news = Broadcast(self._look, self._active)
        self._route = self._listen()
        session.current().on_change = self._news.changed
        shell.events.register("post_run_cell", self._cell_ended)
        self._news.changed()  # pages that look already hear that somebody is here

    # ------------------------------------------------------------------------------------------------ channels

    def _listen(self) -> str:
        handlers = getattr(self._kernel, "control_handlers", None)
        if isinstance(handlers, dict):
            handlers[REQUEST] = self._on_control
            return "control"
        from comm import get_comm_manager

        get_comm_manager().register_target(REQUEST_COMM, self._on_open)
        return "comm"

    async def _on_control(self, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        answer = self.handle(parent["content"])
        self._kernel.session.send(stream, REPLY, answer, parent, ident)

    def _on_open(self, comm: Any, opening: Mapping[str, Any]) -> None:
        comm.on_msg(lambda message: self._on_message(message["content"]["data"]))

    def _on_message(self, request: Mapping[str, Any]) -> None:
        self._news.send("answer", {"to": request.get("id"), **self.handle(request)})

    def close(self) -> None:
        session.current().on_change = lambda: None
        self._shell.events.unregister("post_run_cell", self._cell_ended)
        if self._route == "control":
            self._kernel.control_handlers.pop(REQUEST, None)
        else:
            from comm import get_comm_manager

            get_comm_manager().unregister_target(REQUEST_COMM, self._on_open)
        self._news.close()

    def _look(self) -> dict[str, Any]:
        here, trouble = session.current(), self._trouble
        try:
            self._settings = here.settings
        except OptionsError as error:  # a file that is being edited; what held before is shown with the reason
            trouble = {"text": str(error), "at_s": 0.0}
        seen = overview(here, self._settings, self._answers)
        return {**seen, "route": self._route, "doing": self._doing, "trouble": trouble}

    def _seen(self) -> dict[str, Any]:
        return {"now_s": time.time(), "overview": self._look()}

    def _active(self) -> bool:
        return any(not run.done() for run in session.current().history)

    # ------------------------------------------------------------------------------------------------ requests

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked; from any thread. The answer has `ok`, and `error`, a sentence, if it is False."""
        try:
            return {"ok": True, **self._done(request)}
        except DistributedError as error:
            return {"ok": False, "error": str(error)}
        except Exception as error:  # noqa: BLE001 - a front end that gets no answer would wait
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _done(self, request: Mapping[str, Any]) -> dict[str, Any]:
        here = session.current()
        match request.get("op"):
            case "overview":
                return self._seen()
            case "stop":
                here.find_run(_text(request, "run")).cancel(force=bool(request.get("force")))
                self._news.changed()
            case "pick":
                known = here.settings
                pool = _one_of(request, "pool", known.pools) if "pool" in request else None
                strategy = _one_of(request, "strategy", known.strategies) if "strategy" in request else None
                here.pick(pool=pool, strategy=strategy, size=_size(request["size"]) if "size" in request else None)
                return self._seen()  # the next pick is made on top of this one
            case "start" | "resize" | "restart" as op:
                self._begin(op, _one_of(request, "pool", here.settings.pools), request)
            case "stop_ranks":
                here.stop_ranks(_one_of(request, "pool", here.settings.pools), SIDEBAR)
            case "refresh":
                threading.Thread(target=self._ask, name="jupyter_distrib-ask", daemon=True).start()
            case "logs":
                return self._log(_text(request, "run"), int(request["rank"]))
            case "settled":
                return {"settled": [_as_message(each) for each in list(self._settled) if self._is_last(each)]}
            case "saved":
                self._forget(request["runs"])
            case "dismiss":
                self._trouble = None
                self._news.changed()
            case op:
                raise OptionsError(
                    f"this version of jupyter_distrib does not know the request {op!r}: restart the kernel."
                )
        return {}

    def _begin(self, op: str, pool: str, request: Mapping[str, Any]) -> None:
        """Have ranks started in a thread: that may take seconds, and the front end can stop them meanwhile."""
        if self._doing is not None:
            raise OptionsError(f"the {self._doing['pool']} pool is still being started; stop it, or wait.")
        if size := _size(request):
            session.current().pick_size(pool, size)
        self._doing, self._trouble = {"op": op, "pool": pool}, None
        self._news.changed()

        def work() -> None:
            here = session.current()
            try:
                match op:
                    case "start":
                        here.start_ranks(pool, None, None)
                    case "resize":
                        here.resize(pool, None, None, None, SIDEBAR)
                    case _:
                        here.restart_ranks(pool, SIDEBAR)
            except (DistributedError, OSError) as error:
                self._trouble = {"text": str(error), "at_s": time.time()}
            finally:
                self._doing = None
                self._ask()

        threading.Thread(target=work, name=f"jupyter_distrib-{op}", daemon=True).start()

    def _ask(self) -> None:
        """What every pool in use says of its node and of who holds its devices."""
        for connection in session.current().connections():
            with suppress(DistributedError):
                self._answers[connection.pool] = {**connection.ask(), "at_s": time.time()}
        self._news.changed()

    def _log(self, run: str, rank: int) -> dict[str, Any]:
        path = session.current().find_run(run).log_file(rank)
        text, skipped = _end_of(path, LOG_BYTES)
        return {"text": without_codes(text), "skipped_bytes": skipped, "path": str(path)}

    # ------------------------------------------------------------------------------------------------ settled output

    def settle(self, place: Place, view: dict[str, Any], *, detached: bool) -> None:
        """Keep what the view of a run has become, until a page has it in the notebook's file.

        A page that was reloaded has lost the way to the cell's output. It writes this there instead, together with the
        value or the error of the cell, which went the same way.
        """
        if detached:
            self._publish(Settled(place=place, views=[view]))
        else:
            self._unfinished.append((place, view))

    def _cell_ended(self, result: Any) -> None:
        """Called by IPython after every cell, in the thread that ran it."""
        unfinished, self._unfinished = self._unfinished, []
        if (cell := cell_id(self._shell)) and result.execution_count:
            self._counts[cell] = result.execution_count
        for place in dict.fromkeys(place for place, _ in unfinished):
            views = [view for where, view in unfinished if where == place]
            self._publish(Settled(place=place, views=views, outcome=self._outcome(result)))

    def _is_last(self, settled: Settled) -> bool:
        return self._counts.get(settled.place.cell, 0) <= settled.place.count

    def _forget(self, runs: Sequence[str]) -> None:
        """These stand in the notebook's file: whoever takes them out there does not want them back."""
        for settled in list(self._settled):
            if all(view["run"] in runs for view in settled.views):
                with suppress(ValueError):  # meanwhile others have pushed it out
                    self._settled.remove(settled)

    def _outcome(self, result: Any) -> list[dict[str, Any]]:
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            lines: Sequence[str] = getattr(self._shell, "_last_traceback", None) or []
            name = type(error).__name__
            return [{"output_type": "error", "ename": name, "evalue": str(error), "traceback": list(lines)}]
        if result.result is None:
            return []
        data, metadata = self._shell.display_formatter.format(result.result)
        count = result.execution_count
        return [{"output_type": "execute_result", "execution_count": count, "data": data, "metadata": metadata}]

    def _publish(self, settled: Settled) -> None:
        self._settled.append(settled)
        if self._is_last(settled):
            self._news.send("settled", _as_message(settled))


def _as_message(settled: Settled) -> dict[str, Any]:
    return {
        "cell": settled.place.cell,
        "count": settled.place.count,
        "views": settled.views,
        "outcome": settled.outcome,
    }


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise OptionsError(f"the request {request.get('op')} has no {name}.")
    return value


def _one_of(request: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> str:
    value = _text(request, name)
    if value not in known:
        raise OptionsError(f"there is no {name} {value}; there are: {', '.join(known)}.")
    return value


def _size(request: Mapping[str, Any]) -> dict[str, Any]:
    """How many ranks are asked for and of which kind, as `Options` has it; empty for what the pool gives by itself."""
    size = {name: request[name] for name in ("gpus", "ranks", "gpu_type") if request.get(name)}
    for name in ("gpus", "ranks"):
        if name in request and request[name] is not None:
            number = request[name]
            if not isinstance(number, int) or not 0 < number <= 1000:
                raise OptionsError(f"the number of ranks is 1 to 1000, not {number!r}.")
    if len(size.keys() & {"gpus", "ranks"}) > 1 or ("gpu_type" in size and "ranks" in size):
        raise OptionsError("ranks have GPUs or are CPU ranks, not both.")
    return size


def _end_of(path: Path, most_bytes: int) -> tuple[str, int]:
    """The end of a file, beginning with a whole line, and how many bytes are before it."""
    try:
        with path.open("rb") as file:
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
    """Listen to the front ends of this shell's kernel; a shell in a terminal has none."""
    global _installed
    if _installed is None and getattr(shell, "kernel", None) is not None:
        _installed = FrontEnd(shell)


def remove() -> None:
    global _installed
    if _installed is not None:
        _installed.close()
    _installed = None


def handle(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a front end asks, whichever way it came; from any thread."""
    if _installed is None:
        return {"ok": False, "error": "jupyter_distrib is not loaded in this kernel: run %load_ext jupyter_distrib."}
    return _installed.handle(request)


def settle(run: Run, data: Mapping[str, Any], metadata: Mapping[str, Any], *, model_id: str, place: Place) -> None:
    """See `FrontEnd.settle`.

    Args:
        run: It has ended.
        data: Of the last update of its display.
        metadata: Likewise.
        model_id: Of the widget that stood there; empty if none did.
        place: Where the display is.
    """
    if _installed is not None:
        output = {"output_type": "display_data", "data": dict(data), "metadata": dict(metadata)}
        view = {"run": run.id, "model": model_id, "output": output}
        _installed.settle(place, view, detached=run.detached)


def marked(run: str, *, settled: bool) -> dict[str, Any]:
    """Metadata of the display of a run's view, by which a page knows the output again, and whether it is the last."""
    return {"jupyter_distrib": {"run": run, "settled": settled}}


def route() -> str:
    """How requests reach this kernel: `control`, `comm`, or empty if nothing listens."""
    return "" if _installed is None else _installed._route  # noqa: SLF001 - same file


def cell_id(shell: InteractiveShell | None) -> str:
    """By which the front end knows the cell that is running.

    Notebook front ends tell; what runs notebooks without anybody watching tells nothing, and this is empty.
    """
    kernel = getattr(shell, "kernel", None)
    parent: Mapping[str, Any] = kernel.get_parent("shell") if kernel is not None else {}
    return str((parent.get("metadata") or {}).get("cellId") or "")


def place(shell: InteractiveShell | None) -> Place:
    """The execution that is going on."""
    # Versions of IPython count at the beginning of a cell or at its end; in all of them its own number is noted here.
    going_on = getattr(getattr(shell, "displayhook", None), "exec_result", None)
    return Place(cell=cell_id(shell), count=getattr(going_on, "execution_count", None) or 0)
