"""The report of `%distributed_status --doctor` on what is installed, what is missing, and where kernel, agent and ranks
are (container, job and control group, with their limits), to read or to paste. Kernel side; loads neither torch nor
CUDA.

Of the environment's values it shows only those of this package's own variables.
"""

from __future__ import annotations

import importlib
import os
import platform
import queue
import resource
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.errors import DistributedError, PoolError, page
from jupyter_distrib.kernel.notebook import live_view
from jupyter_distrib.kernel.session import machines
from jupyter_distrib.kernel.session.pools.connection import Connection, WorkerGroup
from jupyter_distrib.kernel.session.pools.next_rank import next_rank
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.views.table import TextTable
from jupyter_distrib.system import control_groups, paths, record_file
from jupyter_distrib.system.confinement_report import ConfinementReport
from jupyter_distrib.system.formatting import duration, rank_list, size
from jupyter_distrib.system.process_environment import version
from jupyter_distrib.wire import messages as m

PACKAGES = (
    "torch",
    "numpy",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "anywidget",
    "jupyterlab",
    "notebook",
    "cloudpickle",
    "nvidia-ml-py",
    "ray",
)
SIDEBAR = "jupyter-distrib"
"""The folder of the JupyterLab extension."""
SHM = Path("/dev/shm")  # noqa: S108 - only its size is read
DRIVER_S = 5.0
"""Seconds to wait for the GPU driver: what has the GPUs awake is the agent."""
SMALL_SHM_BYTES = 256 << 20
SLOW_BYTES_PER_S = 125e6
"""The bandwidth, 1 Gbit/s, below which the report warns."""
SLOW_LATENCY_S = 2e-3
GRADIENT_BYTES = 400e6
"""The gradients of 100 million parameters."""
MEASUREMENT = "from jupyter_distrib.worker import network_check\nnetwork_check.measure()"
"""The source with which ranks measure the network between one another."""
CONFINEMENT = "confined by"
EXPLAINED = {
    "anywidget": ("install", "what-is-missing"),
    "ipykernel": ("install", "what-is-missing"),
    "numpy": ("install", "what-is-missing"),
    "sidebar": ("install", "the-sidebar"),
    "settings": ("pools",),
    "pool": ("errors", "poolerror"),
    "machines": ("ssh", "machines-on-demand"),
    "GPUs": ("gpus",),
    "GPU driver": ("gpus",),
    "network": ("performance", "the-network-between-nodes"),
    CONFINEMENT: ("gpus", "several-sessions-of-one-user"),
    "shared memory": ("performance", "shared-memory"),
    "dry runs": ("dry-run", "how-close-it-is"),
    "logs": ("history",),
    "report": ("errors",),
}
"""The page and section of the documentation on each topic that can be wrong."""
MOST_COMPARED = 200
"""Number of recent runs whose peaks are compared with those of their dry runs."""
MARGIN = 0.1
"""The fraction by which a real peak may exceed that of a dry run; a dry run with less room than that is "tight"."""
_OURS = "JUPYTER_DISTRIB_"
_ASK = "from jupyter_distrib.system import confinement_report\nconfinement_report.describe()"
"""The source with which ranks on other machines report where they are."""
_AGENT = -1
"""The agent, in a list of ranks."""
_Line = tuple[str, str]
"""A text, and the recommended action; empty if nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    topic: str
    text: str
    advice: str = ""
    """The recommended action; empty if nothing is wrong."""

    def __str__(self) -> str:
        advice = [f"-> {self.advice}", f"   {page(*EXPLAINED[self.topic])}"] if self.advice else []
        return "\n".join([self.text, *advice])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The findings, shown as text or HTML."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, session: Session, shell: Any) -> Report:
        """Return a report with all findings; a failed check is a finding too."""
        parts = (
            _versions(),
            _front_end(shell),
            _sidebar(),
            _settings(session),
            _pool(session),
            _machines(session),
            _gpus_in_time(),
            _dry_runs(),
            _machine(),
        )
        found = (finding for part in parts for finding in _whole(part))
        return cls(findings=tuple(replace(each, text=without_secrets(each.text)) for each in found))

    @property
    def ok(self) -> bool:
        return not any(finding.advice for finding in self.findings)

    def __repr__(self) -> str:
        verdict = "all is well" if self.ok else "see the lines with !"
        return f"jupyter_distrib: {verdict}\n{self._table('!', ' ').as_text()}"

    def _repr_html_(self) -> str:
        text = f"<details><summary>as text, to copy</summary><pre>{escape(repr(self))}</pre></details>"
        return self._table("❗", "✓").as_html() + text

    def _table(self, wrong: str, well: str) -> TextTable:
        return TextTable(rows=[(wrong if each.advice else well, each.topic, str(each)) for each in self.findings])


def _whole(part: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of one part of the report; the last one is the error that ended it, if any."""
    try:
        yield from part
    except (DistributedError, OSError, RuntimeError) as error:  # Jupyter raises the last without a home folder
        yield Finding(topic="report", text="a part of this report could not be made", advice=str(error))


def _versions() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding(topic="jupyter_distrib", text=f"{version('jupyter_distrib')} on Python {platform.python_version()}")
    yield Finding(topic="system", text=system)
    yield Finding(topic="interpreter", text=sys.executable)
    yield Finding(topic="packages", text=", ".join(f"{name} {version(name)}" for name in PACKAGES if version(name)))
    if not version("numpy"):
        advice = "pip install numpy: torch saves no sharded checkpoint and exchanges no objects without it"
        yield Finding(topic="numpy", text="is not installed", advice=advice)
    if not version("anywidget"):
        advice = "pip install anywidget, in the environment of this kernel, for the live view"
        yield Finding(topic="anywidget", text="is not installed", advice=advice)


def _front_end(shell: Any) -> Iterator[Finding]:
    kernel = getattr(shell, "kernel", None)
    where = "a plain IPython terminal" if kernel is None else f"{type(kernel).__name__} of {type(kernel).__module__}"
    if "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ:
        where += ", VS Code"
    yield Finding(topic="kernel", text=where)
    routes = {
        "widget": "the live widget, and static HTML at the end",
        "html": "HTML, redrawn in place; the front end is not known to run the widget, or this was requested",
        "lines": "lines as they come, and the end as a display; the front end did not say which cell it executes",
        "terminal": "lines as they come, and the table of ranks at the end",
    }
    route = live_view.route()
    yield Finding(topic="live view", text=f"{route}: {routes[route]}")
    yield Finding(topic=CONFINEMENT, text=_of_kernel())
    if kernel is not None:
        quick = hasattr(kernel, "control_handlers")
        channel = "the control channel, also while a cell runs" if quick else "a comm, which a busy kernel reads late"
        yield Finding(topic="Stop button", text=f"comes on {channel}")
        yield from _ipykernel_fault()
    ours = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_OURS))
    if ours:
        yield Finding(topic="set", text=ours)


def _ipykernel_fault() -> Iterator[Finding]:
    """Yield a finding for a bug of ipykernel before 7.4.0 (https://github.com/ipython/ipykernel/issues/1554)."""
    ipykernel: Any = importlib.import_module("ipykernel")
    if (7,) <= ipykernel.version_info < (7, 4):
        text = f"ipykernel {ipykernel.__version__} may not run a cell that is sent while it answers another request"
        advice = "pip install 'ipykernel>=7.4'; restart a kernel that is idle while a cell shows [*]"
        yield Finding(topic="ipykernel", text=text, advice=advice)


def _sidebar() -> Iterator[Finding]:
    from jupyter_core.paths import jupyter_path

    folders = [Path(folder) for folder in jupyter_path("labextensions", SIDEBAR)]
    installed = next((folder for folder in folders if (folder / "package.json").exists()), None)
    if installed is not None:
        yield Finding(topic="sidebar", text=str(installed))
        return
    yield _no_sidebar(Path(__file__).parents[2])


def _no_sidebar(package: Path) -> Finding:
    """Return the finding that the sidebar is missing: not built, or not in the environment of JupyterLab."""
    reason_file = package / "without_sidebar.txt"
    if reason_file.is_file():
        why = record_file.text_of(reason_file, through_links=True)
        text = f"is missing because {why} when jupyter_distrib was installed; everything else works without it"
        advice = (
            "install Node.js 20 or newer (https://nodejs.org, conda install nodejs), then jupyter_distrib again: "
            "pip install --force-reinstall --no-deps with the same source"
        )
    elif (package.parent / "labextension" / "package.json").is_file():
        text = "is not installed from this checkout; everything else works without it"
        built = "" if (package / "labextension" / "package.json").is_file() else "run sh .ci/sidebar build there, "
        advice = f"{built}then pip install -e {shlex.quote(str(package.parent))} again"
    else:
        text = "is not installed where this kernel looks; everything else works without it"
        advice = "install jupyter_distrib in the environment that JupyterLab runs in" if version("jupyterlab") else ""
    return Finding(topic="sidebar", text=text, advice=advice)


def _settings(session: Session) -> Iterator[Finding]:
    try:
        settings = session.settings
    except DistributedError as error:
        yield Finding(topic="settings", text="cannot be read", advice=str(error))
    else:
        yield Finding(
            topic="pools",
            text=f"{', '.join(pool.name for pool in session.usable_pools(settings))}; cells use {settings.pool}",
        )
        for text in settings.ignored:
            yield Finding(topic="settings", text="a settings file of this folder is not used", advice=text)


def _machines(session: Session) -> Iterator[Finding]:
    """Yield findings on machines that pools have started and that may cost something."""
    settings, _ = session.choices.readable_settings()
    for each in machines.statuses(settings):
        if each.state != "ended":
            cost = f", {each.cost:.2f} so far" if each.price else ""
            text = f"{each.pool or each.down}: {each.text}{cost}"
            yield Finding(topic="machines", text=text, advice=each.problem)


def _pool(session: Session) -> Iterator[Finding]:
    try:
        pool = session.settings.pool
    except DistributedError:
        return  # `_settings` reports it
    began_s = time.monotonic()
    try:
        status = session.pools.connect(pool).ask()
    except (DistributedError, OSError) as error:
        yield Finding(topic="pool", text=f"{pool} does not answer", advice=str(error))
        return
    took_ms = 1000 * (time.monotonic() - began_s)
    text = f"{pool} answers in {took_ms:.0f} ms: agent {status.pid}, up {duration(status.up_s)}"
    yield Finding(topic="pool", text=f"{text}, {status.state}")
    if takes := next_rank(status):
        yield Finding(topic="next rank", text=takes)
    for node in status.nodes or ():
        if len(status.nodes or ()) > 1 or node.state:
            yield Finding(topic="node", text=_node_text(node))
    for each in status.waiting:
        yield Finding(topic="queue", text=f"{each.holder} waits: {each.reason}")
    for group in status.groups:
        holder = "this notebook" if group.session == session.identity.name else group.holder
        yield Finding(topic="ranks", text=f"{len(group.workers)} of {holder}, {group.label or 'idle'}")
    for text, advice in _of_pools(session):
        yield Finding(topic=CONFINEMENT, text=text, advice=advice)
    yield from _devices(status)
    yield from _network(session)


def _node_text(node: m.NodeStatus) -> str:
    """Describe a node: `n1: 4 CPUs, 1 free; 2 a100, 0 free; root: job 17`."""
    parts = [(f"{node.cpus:g} CPUs", node.free_cpus)] if node.cpus else []
    parts += [(f"{node.gpus} {node.gpu_type or 'GPUs'}", node.free_gpus)] if node.gpus else []
    texts = [text if free is None else f"{text}, {free:g} free" for text, free in parts]
    return f"{node.name}: {'; '.join(filter(None, (node.state, *texts, *node.holders)))}"


def _devices(status: m.ServerStatus) -> Iterator[Finding]:
    """Yield findings on the problems and modes of GPUs that the pool's agent reports."""
    if status.gpu_problem:
        yield Finding(topic="GPUs", text="not all of them can be used", advice=status.gpu_problem)
    modes = [f"GPU {gpu.number}: {gpu.modes}" for gpu in status.gpus if gpu.modes]
    if modes:
        yield Finding(topic="GPU modes", text="; ".join(modes))


def _network(session: Session) -> Iterator[Finding]:
    """Yield the measurements of a group on several nodes, taken between its ranks in about a second."""
    several = [group for group in session.pools.groups() if len({worker.node for worker in group.workers}) > 1]
    for group in several:
        if group.busy:
            yield Finding(topic="network", text=f"of {group.connection.facts.pool} is not measured: its ranks are busy")
            continue
        try:
            results = session.queries.ask_ranks(group, MEASUREMENT, "the network between nodes")
        except DistributedError as error:
            yield Finding(topic="network", text=f"of {group.connection.facts.pool} was not measured", advice=str(error))
            continue
        yield from (_way(group.connection.facts.pool, found) for found in results or () if found is not None)


def _way(pool: str, found: Mapping[str, Any]) -> Finding:
    topic, where = "network", f"{pool}, node {found['node']} to {found['to']}"
    if "error" in found:
        advice = "let the nodes reach one another on all ports; NCCL and gloo need that as well"
        return Finding(topic=topic, text=f"{where}: {found['error']}", advice=advice)
    per_s, latency_s = found["bytes_per_s"], found["latency_s"]
    text = f"{where}: {1e6 * latency_s:.0f} µs, {8 * per_s / 1e9:.1f} Gbit/s"
    advice = ""
    if per_s < SLOW_BYTES_PER_S or latency_s > SLOW_LATENCY_S:
        step_s = 2 * GRADIENT_BYTES / per_s
        advice = (
            f"too slow for training: averaging the gradients of 100 million parameters takes about {step_s:.0f} s in "
            "each step. Use ranks of one node, or a faster network (--interface or NCCL_SOCKET_IFNAME choose one)"
        )
    return Finding(topic=topic, text=text, advice=advice)


def _gpus_in_time() -> Iterator[Finding]:
    """Yield the findings on GPUs. A driver that hangs returns from no call, and Stop does not end the call either."""
    box: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    threading.Thread(target=lambda: box.put([*_gpus()]), name="jupyter_distrib-doctor-gpus", daemon=True).start()
    try:
        yield from box.get(timeout=DRIVER_S)
    except queue.Empty:
        yield Finding(
            topic="GPU driver",
            text=f"has not answered for {DRIVER_S:g} s",
            advice="if nvidia-smi hangs as well, reset the GPUs or restart the machine; CPU ranks (--ranks N) work",
        )


def _gpus() -> Iterator[Finding]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        yield Finding(topic="GPU driver", text="unknown", advice="pip install nvidia-ml-py, which lists GPUs")
        return
    except Exception as error:  # noqa: BLE001 - whatever a driver's library says
        yield Finding(topic="GPU driver", text=f"none ({error}); ranks are CPU ranks")
        return
    try:
        driver, count = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r}"
        advice = ""
        if count and "+cpu" in version("torch"):
            advice = "this torch is built for the CPU: install one for CUDA to use the GPUs"
        yield Finding(topic="GPU driver", text=f"{driver}, {count} GPU{'s' * (count != 1)}{chosen}", advice=advice)
    except pynvml.NVMLError as error:
        yield Finding(topic="GPU driver", text=f"does not answer ({error})", advice="see what nvidia-smi says")
    finally:
        pynvml.nvmlShutdown()


def _dry_runs() -> Iterator[Finding]:
    """Yield a finding on the real peaks of memory beside those of dry runs, for the last runs in the history."""
    from jupyter_distrib.kernel.history import run_files

    try:
        last = run_files.load()[-MOST_COMPARED:]
    except PoolError:  # the finding on logs, which are in the same folder, says so
        return
    found = sorted(each.deviation for each in last if each.deviation is not None)
    if not found:
        return
    middle, most = found[len(found) // 2], max(found, key=abs)
    runs = "a run" if len(found) == 1 else f"{len(found)} runs"
    text = f"in {runs} on GPUs, the real peak of tensors was {100 * middle:+.1f}% relative to that of the dry run"
    text += "" if len(found) == 1 else f" (the median; at most {100 * most:+.1f}%)"
    advice = ""
    if most > MARGIN:
        advice = f"take a dry run that needs more than {100 / (1 + most):.0f}% of a GPU as one that does not fit"
    yield Finding(topic="dry runs", text=text, advice=advice)


def _machine() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(topic="machine", text=f"{control_groups.cores()} cores, at most {soft} open files a process")
    if SHM.exists():
        total, _, free = shutil.disk_usage(SHM)
        small = free < SMALL_SHM_BYTES
        advice = "data loader workers and NCCL may fail: give the container a larger /dev/shm" if small else ""
        yield Finding(topic="shared memory", text=f"{size(free)} of {size(total)} free", advice=advice)
    try:
        yield Finding(topic="logs", text=str(paths.usual_log_directory()))
    except PoolError as error:
        yield Finding(topic="logs", text="in a temporary folder; runs are not saved in the history", advice=str(error))


def _of_kernel() -> str:
    """Return the line on this process."""
    return f"kernel {os.getpid()}: {ConfinementReport.of()}"


def _of_pools(session: Session) -> Iterator[_Line]:
    """Yield the lines on the processes that serve this notebook, and on its ranks."""
    for connection in session.pools.connections:
        groups = list(connection.groups.values())
        processes = [(_AGENT, connection.pid)]
        if not connection.facts.remote:
            processes += [(worker.rank, worker.pid) for group in groups for worker in group.workers]
        yield from _compared(connection.facts.pool, processes)
        for group in groups if connection.facts.remote else ():
            yield from _asked(session, connection, group)


def _compared(pool: str, processes: Iterable[tuple[int, int]]) -> Iterator[_Line]:
    """Yield a line for each place in which processes of this machine are, given by rank and pid."""
    own = ConfinementReport.of()
    places: dict[tuple[str, ...], list[int]] = {}
    for rank, pid in processes:
        with suppress(OSError):  # it has just ended, or is about to start
            report = ConfinementReport.of(pid)
            places.setdefault((str(report), *own.differences(report)), []).append(rank)
    for (text, *differences), ranks in places.items():
        description = text if differences or text != str(own) else "as the kernel"
        yield f"{_names(ranks)} of {pool}: {description}", _advice(differences) if differences else ""


def _names(ranks: Sequence[int]) -> str:
    named = sorted(set(ranks) - {_AGENT})
    return " and ".join([*["agent"] * (_AGENT in ranks), *[rank_list(named)] * bool(named)])


def _advice(differences: Sequence[str]) -> str:
    return (
        f"they do not share the kernel's {', '.join(differences)}, so other limits hold for them, or they end with "
        "another job. Restart the kernel in the container, job or control group in which its ranks must be"
    )


def _asked(session: Session, connection: Connection, group: WorkerGroup) -> Iterator[_Line]:
    """Yield the reports of idle ranks in a pool of several machines."""
    if group.busy:
        yield f"of the ranks of {connection.facts.pool} is not known: they are busy", ""
        return
    try:
        results = session.queries.ask_ranks(group, _ASK, "the place of the ranks")
    except DistributedError as error:
        yield f"of the ranks of {connection.facts.pool} is not known", str(error)
        return
    places: dict[str, list[int]] = {}
    for rank, result in results.items() if results is not None else ():
        places.setdefault(str(result), []).append(rank)
    for result, ranks in places.items():
        yield f"{rank_list(ranks)} of {connection.facts.pool}: {result}", ""
