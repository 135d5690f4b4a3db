"""The stand-in's nodes: places pods, and runs each as a process in namespaces of its own, with an address of its own.

A pod has a root process in new pid, mount, ipc, uts and net namespaces, its own /tmp, and a /dev/shm of 64 MB unless a
volume in memory is mounted there. The pods' network is a bridge in a namespace that nobody else is in. An image is a
name that stands for a folder of programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kubernetes.objects import ENDED, GPU, Object, Objects, gpus_of, now

POD = "STAND_IN_POD"
"""Variable of all processes of pods: a folder of the pod's own."""
_NETWORK = "ip link add br0 type bridge && ip addr add 10.99.255.254/16 dev br0 && ip link set br0 up"
_SET_UP = """
echo ready
read -r _
mount --make-rprivate /
mount -t tmpfs -o size=$SHM shm /dev/shm
mount --bind "$FOLDER" /tmp
mount --bind "$HOSTS" /etc/hosts
mount --bind "$RESOLV" "$(readlink -f /etc/resolv.conf)"
hostname "$HOSTNAME"
unset SHM FOLDER HOSTS RESOLV
exec "$@" </dev/null >/dev/null
"""


MOST_PODS = 500


def address(number: int) -> str:
    """The address of a pod."""
    return f"10.99.{number // 250}.{number % 250 + 1}"


class Kubelet:
    """All nodes: `nodes` of them, each with some GPUs. `images` are folders of programs by the names of images."""

    def __init__(self, objects: Objects, folder: Path, images: dict[str, str], nodes: int, gpus: int) -> None:
        self.objects, self.folder, self.images, self.gpus = objects, folder, images, gpus
        self.pods: dict[str, Running] = {}
        """Pods with processes, by their names."""
        self._nodes = [f"n{number}" for number in range(nodes)]
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        objects.stop_pod = self._stop
        for name in self._nodes:
            self._add_node(name)

    def _add_node(self, name: str) -> None:
        has = {GPU: str(self.gpus), "cpu": "16", "memory": "64Gi"}
        status = {"allocatable": has, "conditions": [{"type": "Ready", "status": "True"}]}
        self.objects.put(
            "nodes", "", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}, "status": status}
        )

    def _write_names(self) -> None:
        """Write the files with which names are looked up in pods: their addresses have names, as by a cluster's DNS,
        and any other look fails at once. torch has the addresses in the form of IPv6 as well."""
        addresses = [address(number) for number in range(1, MOST_PODS)]
        names = [
            f"{prefix}{each} pod-{each}{'-mapped' * bool(prefix)}\n" for each in addresses for prefix in ("", "::ffff:")
        ]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n::ffff:127.0.0.1 localhost-mapped\n" + "".join(names))
        (self.folder / "resolv").write_text("nameserver 127.0.0.1\n")

    async def set_up(self) -> None:
        self._write_names()
        words = ("unshare", "--net", "--kill-child", "sh", "-c", f"{_NETWORK} && echo ready && exec sleep infinity")
        self._network = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert self._network.stdout is not None
        assert await self._network.stdout.readline() == b"ready\n"

    async def close(self) -> None:
        for one in [*self.pods.values()]:
            await one.stop(0)
        self._network.kill()
        await self._network.wait()

    def turn(self) -> None:
        """Place the pods that have no node."""
        for pod in self.objects.of("pods"):
            if pod["status"]["phase"] == "Pending" and "nodeName" not in pod["spec"]:
                self._place(pod)

    def _place(self, pod: Object) -> None:
        held = dict.fromkeys(self._nodes, 0)
        for other in self.objects.of("pods"):
            if other["spec"].get("nodeName") in held and other["status"]["phase"] not in ENDED:
                held[other["spec"]["nodeName"]] += gpus_of(other) or 0
        fitting = [name for name in self._nodes if self.gpus - held[name] >= gpus_of(pod)]
        namespace = pod["metadata"]["namespace"]
        if not fitting:
            text = f"0/{len(held)} nodes are available: {len(held)} Insufficient {GPU}. preemption: not helpful."
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
            if pod["status"]["conditions"] != [unplaced]:
                pod["status"]["conditions"] = [unplaced]
                self.objects.put("pods", namespace, pod)
            return
        self._count += 1
        pod["spec"]["nodeName"] = fitting[self._count % len(fitting)]
        pod["status"] |= {"podIP": address(self._count), "conditions": [{"type": "PodScheduled", "status": "True"}]}
        self.objects.put("pods", namespace, pod)
        self.pods[pod["metadata"]["name"]] = running = Running(self, pod, self._network.pid)
        self.do(running.run())

    def do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop(self, pod: Object, grace_s: float) -> bool:
        running = self.pods.get(pod["metadata"]["name"])
        if running is None or not running.root:
            return False
        running.is_deleted = True
        self.do(running.stop(grace_s))
        return True


class Running:
    """One pod on its node."""

    def __init__(self, kubelet: Kubelet, pod: Object, network: int) -> None:
        self._kubelet, self.pod, self._network = kubelet, pod, network
        self.root = 0
        """The pid of the pod's first process, as seen from outside."""
        self.ending: dict[str, Any] = {}
        """What is said of the pod when it ends: fields of its status."""
        self.container_reason = ""
        self.is_deleted = False
        self.env: dict[str, str] = {}

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def _container(self) -> Object:
        """The only container that is run: the first one with a command."""
        found: Object = max(self.pod["spec"]["containers"], key=lambda each: "command" in each)
        return found

    def _put(self, state: dict[str, Any], phase: str, **more: Any) -> None:
        spec = self._container
        container = {"name": spec["name"], "image": spec["image"], "ready": "running" in state, "state": state}
        self.pod["status"] |= {"phase": phase, "containerStatuses": [container], **more}
        if ("pods", self.pod["metadata"]["namespace"], self.name) in self._kubelet.objects.all:
            self._kubelet.objects.put("pods", self.pod["metadata"]["namespace"], self.pod)

    async def run(self) -> None:
        spec = self._container
        programs = self._kubelet.images.get(spec["image"])
        if programs is None:
            text = f'failed to pull and unpack image "{spec["image"]}": not found'
            self._put({"waiting": {"reason": "ImagePullBackOff", "message": text}}, "Pending")
            return
        program = spec["command"][0]
        if shutil.which(program, path=f"{programs}:/usr/bin:/bin") is None:
            text = f'OCI runtime create failed: exec: "{program}": executable file not found in $PATH: unknown'
            self._put({"terminated": {"reason": "StartError", "message": text, "exitCode": 128}}, "Failed")
            self._kubelet.pods.pop(self.name, None)
            return
        process = await self._begin(spec, programs)
        self._put({"running": {"startedAt": now()}}, "Running")
        code = await process.wait()
        self.root = 0
        self._kubelet.pods.pop(self.name, None)
        code = 128 - code if code < 0 else code
        reason = self.container_reason or ("Error" if code else "Completed")
        phase = "Failed" if code or self.ending else "Succeeded"
        self._put({"terminated": {"exitCode": code, "reason": reason}}, phase, **self.ending)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self.is_deleted:
            self._kubelet.objects.remove("pods", self.pod["metadata"]["namespace"], self.name)

    async def _begin(self, spec: Object, programs: str) -> asyncio.subprocess.Process:
        """Start the first process, and go on when it has its network."""
        self._folder = self._kubelet.folder / self.name
        self._folder.mkdir(mode=0o777)
        self._folder.chmod(0o1777)
        host = self.pod["spec"]["hostname"]
        self.env = {
            "PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",
            "HOSTNAME": host,
            POD: str(self._folder),
        }
        self.env |= {each["name"]: each.get("value", "") for each in spec.get("env", ())}
        files = {"HOSTS": str(self._kubelet.folder / "hosts"), "RESOLV": str(self._kubelet.folder / "resolv")}
        words = ["unshare", "--pid", "--mount", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc"]
        command = [*spec["command"], *spec.get("args", ())]
        process = await asyncio.create_subprocess_exec(
            *words,
            *("sh", "-c", _SET_UP, "sh", *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**self.env, **files, "SHM": self._shared_memory(spec), "FOLDER": str(self._folder)},
            start_new_session=True,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        self.root = int(_read(f"/proc/{process.pid}/task/{process.pid}/children").split()[0])
        await self._connect()
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        return process

    def _shared_memory(self, spec: Object) -> str:
        volumes = {each["name"]: each for each in self.pod["spec"].get("volumes", ())}
        for mount in spec.get("volumeMounts", ()):
            if mount["mountPath"] == "/dev/shm":
                size = str(volumes[mount["name"]]["emptyDir"].get("sizeLimit", "50%"))
                return size.replace("Gi", "g").replace("Mi", "m")
        return "64m"

    async def _connect(self) -> None:
        """Give it an interface on the bridge."""
        name, address = f"v{self.root}", self.pod["status"]["podIP"]
        outside = f"ip link add {name} type veth peer name eth0 netns {self.root} && ip link set {name} master br0 up"
        inside = f"ip link set lo up; ip addr add {address}/16 dev eth0; ip link set eth0 up; "
        inside += "ip route add default via 10.99.255.254"
        for target, text in ((self._network, outside), (self.root, inside)):
            words = ("nsenter", f"--target={target}", "--net", "sh", "-c", text)
            process = await asyncio.create_subprocess_exec(*words)
            assert await process.wait() == 0, text

    async def stop(self, grace_s: float) -> None:
        """End it with SIGTERM, then SIGKILL."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            if not self.root:
                return
            with suppress(ProcessLookupError):
                os.kill(self.root, number)
            for _ in range(int(wait_s * 50)):
                if not self.root:
                    return
                await asyncio.sleep(0.02)

    def enters(self, command: list[str]) -> list[str]:
        """The words that run a command in it, as a container's runtime does."""
        return ["nsenter", f"--target={self.root}", "--pid", "--mount", "--ipc", "--uts", "--net", "--", *command]


def _read(path: str) -> str:
    return Path(path).read_text()
