"""Finds nodes of a Ray cluster for one crew, and passes frames to and from them.

`RayPlace` is used in the gate's loop; what blocks is done in a thread of its own for each crew (`_look`), and what
Ray reports arrives in threads of Ray's. Both come back to the loop through `Calls`.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_distrib import parity, shared_memory
from jupyter_distrib.errors import PoolError
from jupyter_distrib.events import Command, Execute, Hello, OpenCrew, Welcomed
from jupyter_distrib.gate import cluster
from jupyter_distrib.gate.calls import Calls
from jupyter_distrib.gate.crew import Crew, Share
from jupyter_distrib.gate.project import Project
from jupyter_distrib.link import decode_frame, encode

JOIN_S = 40.0
"""Ray Client takes 6 to 14 s on a small machine; without an answer Ray tries for minutes."""
READY_S = 5.0
"""A placement group that the cluster has room for is ready within this."""
START_S = 120.0
"""For the processes of a node, and for a runtime environment that has to be made first."""
END_S = 2.0
DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a crew is spread: options of the pool."""

    nodes: int = 0
    """0: as few as can be."""
    cpus_per_rank: float = 1.0
    runtime_env: Mapping[str, Any] | None = None
    copy_files: bool = False


class RayNode:
    """One actor, and through it one agent."""

    def __init__(self, place: RayPlace, number: int, actor: Any, about: Mapping[str, Any]) -> None:
        self._place, self._number, self.actor = place, number, actor
        self.host, self.interface = str(about["host"]), str(about["interface"])
        self.name = f"node {self.host}"
        self._shared = bool(about["shared"])
        self._project = Project()
        self._over = False

    def send(self, command: Command, fds: Sequence[int] = ()) -> None:
        if isinstance(command, Execute) and not self._shared:
            files, gone = self._project.changes(command.setting.directory, command.setting.path)
            if files or gone:
                self.actor.bring.remote(files, gone)
        frame = encode(command, len(fds))
        if fds:
            assert isinstance(command, Execute)
            self.actor.send.remote(frame, self._place.put(command.run, fds[0]))
        else:
            self.actor.send.remote(frame)

    def listen(self) -> None:
        """Ask for what comes next; the answer arrives when there is some."""
        self.actor.receive.remote().future().add_done_callback(
            lambda future: self._place.calls.put(lambda: self._received(future))
        )

    def _received(self, future: Any) -> None:
        crew = self._place.crew
        if crew.closed:
            return
        try:
            answer = future.result()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the node is out of reach
            return crew.lost(self._number, _cause(error))
        if not answer:
            return crew.lost(self._number, "its agent has ended")
        self.listen()
        for frame, content in answer:
            self._hear(crew, frame, content)

    def _hear(self, crew: Crew, frame: bytes, content: Any) -> None:
        event, _ = decode_frame(frame)
        if content is None:
            return crew.heard(self._number, event)  # type: ignore[arg-type]
        fd = shared_memory.write([memoryview(content).cast("B")])
        try:
            crew.heard(self._number, event, (fd,))  # type: ignore[arg-type]
        finally:
            os.close(fd)

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        self.actor.logs.remote(run).future().add_done_callback(
            lambda future: self._place.calls.put(lambda: _write_logs(future, directory, done))
        )


def _write_logs(future: Any, directory: Path, done: Callable[[], None]) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in future.result():
            fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(memoryview(content))
    except Exception:  # noqa: BLE001, S110 - the node is gone, which its own listener says; the run ends all the same
        pass
    done()


class RayPlace:
    """Nodes for one crew."""

    def __init__(self, calls: Calls, hello: Hello, wanted: Wanted, joined: Future[cluster.Address]) -> None:
        self.calls, self._hello, self._wanted, self._joined = calls, hello, wanted, joined
        self.crew: Crew
        self._given_back = threading.Event()
        self._lock = threading.Lock()
        self._group: Any = None
        self._attempts = 0
        self._actors: list[Any] = []
        self._put: tuple[str, Any] = ("", None)

    def put(self, run: str, fd: int) -> Any:
        """The content behind a descriptor in Ray's object store: once for all nodes of a run."""
        if self._put[0] != run:
            import ray

            size = os.fstat(fd).st_size
            with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as content:
                self._put = (run, ray.put(pickle.PickleBuffer(content)))
        return self._put[1]

    # ------------------------------------------------------------------------------------------------ looking

    def start(self, command: OpenCrew, crew: Crew) -> None:
        self.crew = crew
        threading.Thread(target=self._look, args=(command,), name="jupyter_distrib-place", daemon=True).start()

    def _look(self, command: OpenCrew) -> None:
        """In a thread of its own."""
        try:
            self._joined.result(JOIN_S)
            nodes, gpus, sizes = self._placed(command)
        except PoolError as refusal:
            return self._call(partial(self.crew.refuse, str(refusal)))
        except TimeoutError:
            return self._call(partial(self.crew.refuse, f"the Ray cluster did not answer within {JOIN_S:g} s."))
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds
            return self._call(partial(self.crew.refuse, f"the Ray cluster could not start the ranks: {_cause(error)}"))
        shares = [Share(node=node, size=size, gpus=gpus) for node, size in zip(nodes, sizes, strict=True)]

        def begin() -> None:
            for node in nodes:
                node.listen()
            self.crew.placed(shares)

        self._call(begin)

    def _call(self, call: Callable[[], None]) -> None:
        self.calls.put(lambda: None if self.crew.closed else call())

    def _placed(self, command: OpenCrew) -> tuple[list[RayNode], bool, list[int]]:
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        kind = _gpu_kind(command, nodes)
        gpus = command.gpus and any(node["Resources"].get("GPU") for node in nodes)
        unit = "GPU" if gpus else "CPU"
        there = sorted((_room(node, unit, kind, self._wanted) for node in nodes), reverse=True)
        size = command.size or (sum(there) if gpus else DEFAULT_CPU_RANKS)
        shapes = [shape for count in self._counts(size, there) if (shape := _even(size, count, there))]
        if not shapes and not command.wait_s:
            raise PoolError(_too_few(size, unit, there, self._wanted, command))
        sizes = self._reserve(shapes or [[size]], unit, kind, command)
        return self._start_actors(sizes, unit, gpus=gpus), gpus, sizes

    def _counts(self, size: int, there: Sequence[int]) -> Sequence[int]:
        return (min(self._wanted.nodes, size),) if self._wanted.nodes else range(1, len(there) + 1)

    def _reserve(self, shapes: Sequence[list[int]], unit: str, kind: str, command: OpenCrew) -> list[int]:
        """The first shape that there is room for now; else the first one, waited for as long as was asked."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        until_s, told = time.monotonic() + command.wait_s, ""
        for shape in [*shapes[:3], shapes[0]]:
            bundles = [self._bundle(size, unit, kind) for size in shape]
            strategy = "STRICT_SPREAD" if len(shape) > 1 else "PACK"
            self._attempts += 1
            name = f"jupyter_distrib: {self._hello.label} #{command.crew}.{self._attempts}"  # Ray wants them unique
            with self._lock:
                if self._given_back.is_set():
                    raise PoolError("the ranks were given up while they were waited for.")
                group = self._group = placement_group(bundles, strategy=strategy, name=name)
            ready = group.ready()
            is_last = shape is shapes[0] and told
            limit_s = max(1.0, until_s - time.monotonic()) if is_last else READY_S
            done, _ = ray.wait([ready], timeout=limit_s)
            if done:
                ray.get(ready)
                return shape
            reason = _busy(sum(shape), unit)
            remove_placement_group(group)
            if is_last or (len(shapes) == 1 and not command.wait_s):
                raise PoolError(reason)
            if shape is shapes[min(2, len(shapes) - 1)]:
                if not command.wait_s:
                    raise PoolError(reason)
                told = reason
                self._call(partial(self.crew.queued, reason))
        raise PoolError(told)

    def _bundle(self, size: int, unit: str, kind: str) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": size * self._wanted.cpus_per_rank} if self._wanted.cpus_per_rank else {}
        if unit == "GPU":
            bundle["GPU"] = size
            if kind:
                bundle[kind] = 0.001
        return bundle or {"CPU": 0.001}

    def _start_actors(self, sizes: Sequence[int], unit: str, *, gpus: bool) -> list[RayNode]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        package, cls = ray.put(cluster.package_archive()), cluster.actor_class()
        with self._lock:
            if self._given_back.is_set():
                raise PoolError("the ranks were given up while they were starting.")
            for number, size in enumerate(sizes):
                options = {
                    "num_cpus": size * self._wanted.cpus_per_rank,
                    "num_gpus": size if gpus else 0,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=number
                    ),
                }
                if self._wanted.runtime_env:
                    options["runtime_env"] = dict(self._wanted.runtime_env)
                actor = cls.options(**options).remote(package, self._hello.label, self._hello.session)
                self._actors.append(actor)
        asked = [actor.describe.remote(self._directory, self._stamp()) for actor in self._actors]
        nodes = []
        for number, text in enumerate(ray.get(asked, timeout=START_S)):
            about = json.loads(text)
            self._check_parity(about)
            nodes.append(RayNode(self, number, self._actors[number], about))
        return nodes

    def _stamp(self) -> tuple[int, int]:
        """Of the notebook's folder; equal on nodes that share it."""
        info = os.stat(self._directory)
        return (0, 0) if self._wanted.copy_files else (info.st_ino, info.st_mtime_ns)

    @property
    def _directory(self) -> str:
        """Of the notebook: its kernel's working directory, as far as the system tells."""
        try:
            return os.readlink(f"/proc/{self._hello.pid}/cwd")
        except OSError:
            return os.getcwd()

    def _check_parity(self, about: Mapping[str, Any]) -> None:
        versions = {name: about[name] for name in ("python", "torch", "cloudpickle")}
        there = Welcomed(pid=0, **versions)
        if refusal := parity.refusal(self._hello, there, "Ray"):
            raise PoolError(refusal)

    # ------------------------------------------------------------------------------------------------ giving back

    def give_back(self, *, force: bool) -> None:
        self._given_back.set()
        threading.Thread(target=self._end, args=(force,), name="jupyter_distrib-end", daemon=True).start()

    def _end(self, force: bool) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            group, actors = self._group, list(self._actors)
        try:
            if not force:
                time.sleep(END_S)  # the agent gives exit handlers a second
            ended = [actor.end.remote() for actor in actors]
            ray.wait(ended, num_returns=len(ended), timeout=1.0) if ended else None
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)
        except Exception:  # noqa: BLE001, S110 - the cluster is gone, and all that was there with it
            pass


def _gpu_kind(command: OpenCrew, nodes: Sequence[Mapping[str, Any]]) -> str:
    """The resource by which Ray knows GPUs of the type asked for; empty if any type will do."""
    if not command.gpu_type:
        return ""
    kinds = sorted({name for node in nodes for name in node["Resources"] if name.startswith("accelerator_type:")})
    wanted = set(re.findall(r"[a-z0-9]+", command.gpu_type.lower()))
    for kind in kinds:
        if wanted <= set(re.findall(r"[a-z0-9]+", kind.partition(":")[2].lower())):
            return str(kind)
    there = ", ".join(kind.partition(":")[2] for kind in kinds) or "no GPU at all"
    raise PoolError(
        f"--gpu-type {command.gpu_type}, but the Ray cluster has {there}; leave it out, or use another pool."
    )


def _room(node: Mapping[str, Any], unit: str, kind: str, wanted: Wanted) -> int:
    """How many ranks a node can have at most."""
    resources = node["Resources"]
    if kind and kind not in resources:
        return 0
    limits = [resources.get("GPU", 0.0)] if unit == "GPU" else []
    if wanted.cpus_per_rank:
        limits.append(resources.get("CPU", 0.0) // wanted.cpus_per_rank)
    return int(min(limits, default=1000))


def _even(size: int, count: int, there: Sequence[int]) -> list[int]:
    """So many ranks over so many nodes as evenly as can be; empty if they have not the room."""
    if not 0 < count <= min(size, len(there)):
        return []
    shape = [size // count + (number < size % count) for number in range(count)]
    return shape if all(mine <= room for mine, room in zip(shape, there, strict=False)) else []


def _too_few(size: int, unit: str, there: Sequence[int], wanted: Wanted, command: OpenCrew) -> str:
    rooms = [room for room in there if room]
    has = f"{sum(rooms)} on {len(rooms)} nodes ({', '.join(map(str, rooms))})" if len(rooms) > 1 else str(sum(rooms))
    asked = f"--{'gpus' if unit == 'GPU' else 'ranks'} {size}" + (f" on {wanted.nodes} nodes" if wanted.nodes else "")
    each = f", at {wanted.cpus_per_rank:g} CPU for each" if unit == "CPU" and wanted.cpus_per_rank else ""
    typed = f" of type {command.gpu_type}" if command.gpu_type else ""
    return (
        f"{asked}, but the Ray cluster has room for {has}{typed}{each}; ask for at most that many, or say --wait S "
        "if it grows by itself."
    )


def _busy(size: int, unit: str) -> str:
    """What is free, and which notebooks have the rest."""
    import ray
    from ray.util import placement_group_table

    total, free = ray.cluster_resources().get(unit, 0), ray.available_resources().get(unit, 0)
    names = {
        str(group["name"]).partition(": ")[2].partition(" #")[0]
        for group in placement_group_table().values()
        if str(group.get("name", "")).startswith("jupyter_distrib: ") and group["state"] == "CREATED"
    }
    holders = f" {', '.join(sorted(names))} have ranks there." if names else ""
    return f"{size} {unit}s are asked for, and {free:g} of {total:g} are free in the Ray cluster.{holders}"


def _cause(error: BaseException) -> str:
    """Ray's own words, without its frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else lines[0] if lines else type(error).__name__)[:500]
