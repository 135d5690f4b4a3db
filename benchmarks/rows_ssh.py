"""The ssh pool on two hosts on loopback, beside ssh itself. Needs what `tests/ssh/bed.py` needs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import processes
import rows_data
import rows_unchanged
from driver import ROOT, Notebook
from plan import LOAD, Plan, imports_of_torch_s
from report import HERE, Figure, spread

if TYPE_CHECKING:
    from tests.ssh.bed import Bed

_LINE = "%%distributed --ranks 4"
_WARM_UP = 3
"""Turns."""
_POOLS = """\
pool = "box"
[pools.box]
kind = "ssh"
hosts = "{hosts}"
ssh = "{ssh}"
python = "{python}"
nodes = 2
"""
_BIG = 512 * rows_data.MB


@contextmanager
def _bed() -> Iterator[Bed]:
    sys.path.insert(0, str(HERE.parent))
    from tests.ssh.bed import Bed

    bed = Bed()
    try:
        yield bed
    finally:
        bed.close()


def _skipped() -> Figure | None:
    sys.path.insert(0, str(HERE.parent))
    from tests.ssh.bed import missing

    return Figure(what="the ssh pool", measured=f"not measured: {missing()}") if missing() else None


@contextmanager
def _notebook(plan: Plan, bed: Bed, **env: str) -> Iterator[Notebook]:
    """One whose pools file names the hosts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pools.toml"
        file.write_text(_POOLS.format(**bed.options))
        env = {"JUPYTER_DISTRIB_CONFIG": str(file), "PYTHONPATH": alone(plan, folder), **env}
        with plan.notebook(env=env) as notebook:
            yield notebook


def alone(plan: Plan, folder: str) -> str:
    """A folder with the package and nothing else, as if it were installed, since the notebook's path is copied to hosts
    that do not share it; see `load`."""
    installed = Path(folder) / "installed"
    installed.mkdir()
    (installed / "jupyter_distrib").symlink_to(plan.package / "jupyter_distrib")
    return str(installed)


def load(notebook: Notebook) -> float:
    """Load the extension, without the checkout in the notebook's path that an editable install puts there; return the
    seconds."""
    notebook.good(f"import sys\nsys.path = [folder for folder in sys.path if folder != {str(ROOT)!r}]")
    return notebook.good(LOAD).wall_s


@contextmanager
def _warm(plan: Plan, bed: Bed) -> Iterator[Notebook]:
    with _notebook(plan, bed) as notebook:
        load(notebook)
        for _ in range(_WARM_UP):
            notebook.good(f"{_LINE}\npass")
        processes.wait_until_idle("jupyter_distrib.worker.process.forkserver")
        yield notebook


def _ssh(bed: Bed, host: str, *words: str) -> list[str]:
    return ["ssh", "-F", str(bed.config), "-oBatchMode=yes", host, *words]


def _round_trip_s(bed: Bed, count: int) -> float:
    """The median round trip of a byte on an open connection."""
    with subprocess.Popen(_ssh(bed, "host1", "cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as pipe:
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        times = []
        for _ in range(count + 1):
            began_s = time.perf_counter()
            pipe.stdin.write(b"x")
            pipe.stdout.read(1)
            times.append(time.perf_counter() - began_s)
        pipe.stdin.close()
    return sorted(times[1:])[count // 2]


def _connect_s(bed: Bed) -> float:
    began_s = time.perf_counter()
    subprocess.run(_ssh(bed, "host1", "true"), check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began_s


def noop(plan: Plan) -> Iterator[Figure]:
    """A warm cell that does nothing on two hosts, by turns with one that does nothing in the kernel."""
    if skipped := _skipped():
        yield skipped
        return
    added, best = [], []
    with _bed() as bed, _warm(plan, bed) as notebook:
        trip_s = _round_trip_s(bed, 200)
        for _ in plan.times(60, 20):
            plain_s = notebook.good("pass").wall_s
            added.append(notebook.good(f"{_LINE}\npass").wall_s - plain_s)
            best.append(plain_s)
    cell_s = sorted(added)[len(added) // 2]
    limit_s = trip_s + 0.004
    yield Figure(
        what="warm no-op cell on 2 hosts by ssh, 4 ranks, against a plain `pass` cell",
        measured=f"+{1000 * cell_s:.1f} ms (best +{1000 * min(added):.1f}); a byte there and back "
        f"{1000 * trip_s:.2f} ms",
        target=f"<= {1000 * limit_s:.1f} ms (that + 4 ms)",
        ok=cell_s <= limit_s,
        numbers={"added_s": added, "round_trip_s": trip_s},
    )


def first(plan: Plan) -> Iterator[Figure]:
    """The first cell of a kernel, and the first of the next one on the same hosts."""
    if skipped := _skipped():
        yield skipped
        return
    cold, warm, connects, imports = [], [], [], []
    with _bed() as bed:
        for _ in plan.times(5, 2):
            imports.append(imports_of_torch_s(len(bed.hosts)))
            connects.append(_connect_s(bed))
            with _notebook(plan, bed, JPY_SESSION_NAME="train.ipynb") as notebook:
                cold.append(load(notebook) + notebook.good(f"{_LINE}\npass").wall_s)
                notebook.restart()
                warm.append(load(notebook) + notebook.good(f"{_LINE}\npass").wall_s)
    connect_s = min(connects)
    for name, times, limit_s, said in (
        (
            "new hosts",
            cold,
            connect_s + min(imports) + 0.5,
            f"+ import torch on both hosts, which share this machine, {min(imports):.2f} s + 0.5 s",
        ),
        ("the hosts that its kernel had before", warm, connect_s + 0.3, "+ 0.3 s"),
    ):
        yield Figure(
            what=f"first cell on {name}, 4 ranks on 2 hosts by ssh (with %load_ext)",
            measured=spread(times),
            target=f"<= {limit_s:.2f} s (connect {connect_s:.2f} s {said})",
            ok=min(times) <= limit_s,
            numbers={"times_s": times, "connect_s": connects, "import_torch_s": imports},
        )


def value(plan: Plan) -> Iterator[Figure]:
    """512 MB of the notebook on four ranks of two hosts, and `scp` of the same to both side by side, by turns."""
    if skipped := _skipped():
        yield skipped
        return
    times, bare = [], []
    with _bed() as bed, _warm(plan, bed) as notebook:
        file = bed.folder / "big"
        with file.open("wb") as big:
            for _ in range(512):
                big.write(os.urandom(rows_data.MB))
        notebook.good(f"import torch\nbig = torch.ones({_BIG // 4})")
        for _ in plan.times(5, 2):
            times.append(notebook.good(f"{_LINE} --cache 0\nbig[-1].item()").wall_s)
            bare.append(_copied_s(bed, file))
        turns = rows_unchanged.Turns(notebook, "--ranks 4")
        for number in plan.times(5, 2):
            turns.take(number)
    yield Figure(
        what="512 MB captured tensor to 4 ranks on 2 hosts by ssh",
        measured=f"{spread(times)}; scp to both side by side {spread(bare)}",
        target="<= 1.2 x that",
        ok=min(times) <= 1.2 * min(bare),
        numbers={"times_s": times, "scp_s": bare},
    )
    yield turns.beside_nothing("two hosts by ssh")
    yield turns.first_time("two hosts by ssh")


def _copied_s(bed: Bed, file: Path) -> float:
    began_s = time.perf_counter()
    copies = [
        subprocess.Popen(
            [shutil.which("scp") or "scp", "-q", "-F", str(bed.config), str(file), f"{host.name}:/tmp/big"]
        )
        for host in bed.hosts
    ]
    for copy in copies:
        copy.wait()
    return time.perf_counter() - began_s


def cut(plan: Plan) -> Iterator[Figure]:
    """The connection of one host is cut, with and without a word of it: until the cell has ended, and all that ran."""
    if skipped := _skipped():
        yield skipped
        return
    with _bed() as bed, _warm(plan, bed) as notebook:
        mark = bed.folder / "in"
        cell = f"{_LINE}\nimport pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(100)"
        for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            ended, gone = [], []
            for _ in plan.times(3, 1):
                notebook.good(f"{_LINE}\npass")
                before = set(bed.hosts[1].processes())
                mark.unlink(missing_ok=True)
                sent = notebook.send(cell)
                while not mark.exists():
                    time.sleep(0.01)
                began_s = time.perf_counter()
                os.kill(processes_of("host2"), number)
                notebook.finish(sent)
                ended.append(time.perf_counter() - began_s)
                while before & set(bed.hosts[1].processes()):
                    time.sleep(0.05)
                gone.append(time.perf_counter() - began_s)
            yield Figure(
                what=f"the ssh of one of 2 hosts is {name} while a cell runs: until the cell has ended",
                measured=f"{spread(ended)}; until nothing is left on the host {spread(gone)}",
                target="<= 10 s; <= 15 s",
                ok=max(ended) <= 10 and max(gone) <= 15,
                numbers={"ended_s": ended, "gone_s": gone},
            )


def processes_of(host: str) -> int:
    """The newest ssh to a host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[0] == "ssh" and host in words:
            found.append(int(path.parent.name))
    return max(found)
