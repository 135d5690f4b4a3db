"""The Ray pool on two nodes of one machine, beside Ray itself; a coordinator with hundreds of ranks, which needs no
Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
import rows_data
import rows_unchanged
from driver import Notebook
from plan import LOAD, Plan, import_torch_s
from report import HERE, Figure, spread

MB = rows_data.MB
_ACTORS = """\
import ray
ray.init(address={address!r}, logging_level="ERROR", log_to_driver=False)
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Where
group = placement_group([{{"CPU": 2}}] * 2, strategy="STRICT_SPREAD")
ray.get(group.ready())
@ray.remote(num_cpus=1)
class Actor:
    def call(self, value=None): return 0
    def copy(self, value): return len(bytearray(value))
def start(count):
    where = [Where(group, placement_group_bundle_index=number % 2) for number in range(count)]
    return [Actor.options(scheduling_strategy=each).remote() for each in where]
actors = start(2)
ray.get([actor.call.remote() for actor in actors])
"""
_CALL = "ray.get([actor.call.remote() for actor in actors])"
_COPY = """\
value = ray.put(big.numpy())
found = ray.get([actor.copy.remote(value) for actor in actors])
del value
"""
_LOOP = f"""\
import statistics, time
def timed():
    began = time.perf_counter()
    {_CALL}
    return time.perf_counter() - began
loop_s = statistics.median(timed() for _ in range(200))
"""


_CLUSTER = """\
import sys
import tempfile
from ray.cluster_utils import Cluster
cluster = Cluster()
for address in ("127.0.0.2", "127.0.0.3"):
    cluster.add_node(num_cpus=4, object_store_memory=3 << 30, node_ip_address=address, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def _cluster() -> Iterator[str]:
    """Two nodes of four CPUs, with room for large values; its address."""
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": ""}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _CLUSTER], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(timeout=60)


def _joined_s(address: str) -> float:
    """Ray alone in a process of its own: connect + placement group + an actor a node."""
    code = (
        f"import time\nbegan = time.perf_counter()\n{_ACTORS.format(address=address)}print(time.perf_counter() - began)"
    )
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.splitlines()[-1])


def _skipped() -> Figure | None:
    if importlib.util.find_spec("ray") is None:
        return Figure(what="the Ray pool", measured="not measured: Ray is not installed")
    return None


_WARM_UP = 5
"""Turns."""
_LINE = "%%distributed --ranks 4"
_POOLS = """\
pool = "lab"
[pools.lab]
kind = "ray"
address = "{address}"
insecure = true
nodes = 2
"""


@contextmanager
def _notebook(plan: Plan, address: str, **env: str) -> Iterator[Notebook]:
    """One whose pools file names the cluster."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pools.toml"
        file.write_text(_POOLS.format(address=address))
        with plan.notebook(env={"JUPYTER_DISTRIB_CONFIG": str(file), **env}) as notebook:
            yield notebook


@contextmanager
def _warm(plan: Plan, address: str, **env: str) -> Iterator[Notebook]:
    with _notebook(plan, address, **env) as notebook:
        notebook.good(LOAD)
        for _ in range(5):
            notebook.good(f"{_LINE}\npass")
        # Nodes go on importing when they serve already.
        processes.wait_until_idle("jupyter_distrib.worker.process.forkserver")
        notebook.good(f"{_LINE}\npass")
        yield notebook


def noop(plan: Plan) -> Iterator[Figure]:
    """A warm cell that does nothing on two nodes, beside one that calls bare actors there: both in the same kernel, by
    turns, since the same calls in a loop of their own take a third of the time."""
    if skipped := _skipped():
        yield skipped
        return
    cells = {"plain": "pass", "cell": f"{_LINE}\npass", "bare": f"found = {_CALL}"}
    times: dict[str, list[float]] = {name: [] for name in cells}
    with _cluster() as address, _warm(plan, address) as notebook:
        notebook.good(f"{_ACTORS.format(address=address)}actors += start(2)\n{_LOOP}")
        loop_s = notebook.value("loop_s")
        for turn in range(_WARM_UP + len(plan.times(60, 20))):
            for name, code in cells.items():
                took_s = notebook.good(code).wall_s
                if turn >= _WARM_UP:
                    times[name].append(took_s)
    added = {name: [mine - plain for mine, plain in zip(times[name], times["plain"], strict=True)] for name in cells}
    cell_s, bare_s = statistics.median(added["cell"]), statistics.median(added["bare"])
    best = {name: min(times[name]) - min(times["plain"]) for name in ("cell", "bare")}
    limit_s = 2 * bare_s + 0.003
    yield Figure(
        what="warm no-op cell on 2 nodes of a Ray cluster, 4 ranks, against a plain `pass` cell",
        measured=f"+{1000 * cell_s:.1f} ms (best +{1000 * best['cell']:.1f}); a cell that calls 4 bare actors "
        f"+{1000 * bare_s:.1f} ms (best +{1000 * best['bare']:.1f}; in a loop {1000 * loop_s:.1f})",
        target=f"<= {1000 * limit_s:.1f} ms (2 x the bare calls + 3 ms)",
        ok=cell_s <= limit_s,
        numbers={f"{name}_s": found for name, found in times.items()} | {"loop_s": loop_s},
    )


def first(plan: Plan) -> Iterator[Figure]:
    """The first cell of a kernel on a cluster that runs."""
    if skipped := _skipped():
        yield skipped
        return
    bare, times, imports = [], [], []
    with _cluster() as address:
        _joined_s(address)  # into the page cache
        for _ in plan.times(8, 2):
            imports.append(import_torch_s())
            bare.append(_joined_s(address))
            with _notebook(plan, address) as notebook:
                times.append(notebook.good(LOAD).wall_s + notebook.good(f"{_LINE}\npass").wall_s)
    limit_s = 1.3 * min(bare) + min(imports) + 0.3
    yield Figure(
        what="first cell on a running Ray cluster, 4 ranks on 2 nodes (with %load_ext)",
        measured=f"{spread(times)}; connect + placement group + 1 bare actor a node {min(bare):.2f} s",
        target=f"<= {limit_s:.2f} s (1.3 x that + a forkserver: import torch {min(imports):.2f} s + 0.3 s)",
        ok=min(times) <= limit_s,
        numbers={"times_s": times, "bare_s": bare, "import_torch_s": imports},
    )


def fresh(plan: Plan) -> Iterator[Figure]:
    """New ranks in place of those that are up."""
    if skipped := _skipped():
        yield skipped
        return
    with _cluster() as address, _warm(plan, address) as notebook:
        times = [notebook.good(f"{_LINE} --fresh\npass").wall_s for _ in plan.times(10, 3)]
    yield Figure(
        what="`--fresh`, 4 ranks on 2 nodes of a Ray cluster",
        measured=spread(times),
        numbers={"times_s": times},
    )


def restart(plan: Plan) -> Iterator[Figure]:
    """The first cell after the restart button, with the nodes that its kernel had before."""
    if skipped := _skipped():
        yield skipped
        return
    times = []
    with _cluster() as address, _warm(plan, address, JPY_SESSION_NAME="train.ipynb") as notebook:
        for _ in plan.times(10, 3):
            notebook.restart()
            notebook.good(LOAD)
            times.append(notebook.good(f"{_LINE}\npass").wall_s)
    yield Figure(
        what="first cell after a kernel restart, after %load_ext, 4 ranks on 2 nodes of a Ray cluster",
        measured=spread(times),
        numbers={"times_s": times},
    )


def value(plan: Plan) -> Iterator[Figure]:
    """512 MB of the notebook on four ranks of two nodes, and the same by Ray alone in the same kernel, by turns. The
    first turns are slow for both: Ray's stores take their memory from the system when it is first used."""
    if skipped := _skipped():
        yield skipped
        return
    times, bare = [], []
    with _cluster() as address, _warm(plan, address) as notebook:
        notebook.good(f"{_ACTORS.format(address=address)}import torch\nbig = torch.ones({512 * MB // 4})")
        for turn in range(_WARM_UP + len(plan.times(5, 2))):
            took_s = notebook.good(f"{_LINE} --cache 0\nbig[-1].item()").wall_s
            bare_s = notebook.good(_COPY).wall_s
            if turn >= _WARM_UP:
                times.append(took_s)
                bare.append(bare_s)
        turns = rows_unchanged.Turns(notebook, "--ranks 4")
        for number in plan.times(5, 2):
            turns.take(number)
    yield Figure(
        what="512 MB captured tensor to 4 ranks on 2 nodes",
        measured=f"{spread(times)}; ray.put + ray.get + a copy on each node {spread(bare)}",
        target="<= 1.3 x that",
        ok=min(times) <= 1.3 * min(bare),
        numbers={"times_s": times, "bare_s": bare},
    )
    yield turns.beside_nothing("two nodes of a Ray cluster")
    yield turns.first_time("two nodes of a Ray cluster")


def prints(plan: Plan) -> Iterator[Figure]:
    """20,000 lines from each of four ranks."""
    if skipped := _skipped():
        yield skipped
        return
    count = 20_000
    with _cluster() as address, _notebook(plan, address, JUPYTER_DISTRIB_VIEW="widget") as notebook:
        notebook.good(LOAD)
        notebook.good(f"{_LINE}\npass")
        outcomes, complete = [], []
        for _ in plan.times(5, 2):
            outcomes.append(notebook.good(f"{_LINE}\n{rows_data.PRINTS.format(count=count)}"))
            complete.append(rows_data.logs_complete(notebook, count, 4))
    rate = max(outcome.messages / max(outcome.wall_s, 1.0) for outcome in outcomes)
    yield Figure(
        what="20,000 printed lines per rank, 4 ranks on 2 nodes of a Ray cluster",
        measured=f"{spread([outcome.wall_s for outcome in outcomes])}, {rate:.1f} messages/s, "
        f"{rows_data.told_lines(complete)} in the log",
        target="every line in the log, <= 10 messages/s",
        ok=rate <= 10 and all(complete),
        numbers={"messages": [outcome.messages for outcome in outcomes]},
    )


def many(plan: Plan) -> Iterator[Figure]:
    """What 8, 64 and 512 ranks cost the kernel, that all report at once."""
    import simulated

    path = os.pathsep.join(filter(None, (str(plan.package), str(HERE), os.environ.get("PYTHONPATH"))))
    for ranks in (8, 64, 512):
        env = {"PYTHONPATH": path, "JUPYTER_DISTRIB_VIEW": "widget"}
        with plan.notebook(env=env) as notebook:
            notebook.good("import simulated\nsimulated.use()")
            notebook.good(LOAD)
            before = json.loads(notebook.value("simulated.cost()"))
            outcome = notebook.good(f"%%distributed --pool simulated --ranks {ranks}\npass", timeout_s=300)
            after = json.loads(notebook.value("simulated.cost()"))
        share = (after["cpu_s"] - before["cpu_s"]) / (after["at_s"] - before["at_s"])
        nodes = ranks // simulated.PER_NODE
        yield Figure(
            what=f"kernel while {ranks} ranks on {nodes} node{'s' * (nodes > 1)} report "
            f"{simulated.STEPS_PER_S} steps/s each (simulated ranks, real coordinator)",
            measured=f"{100 * share:.0f}% of a core ({1000 * share / ranks:.2f} ms/s for each rank), "
            f"{after['rss_mb']:.0f} MB, {outcome.messages / outcome.wall_s:.1f} messages/s to the browser, "
            f"{outcome.wall_s:.1f} s for a cell of {simulated.RUN_S:g} s",
            target="< 50% of a core, < 200 MB" if ranks == 512 else "",
            ok=share < 0.5 and after["rss_mb"] < 200 if ranks == 512 else None,
            numbers={"share": share, "rss_mb": after["rss_mb"], "wall_s": outcome.wall_s},
        )
