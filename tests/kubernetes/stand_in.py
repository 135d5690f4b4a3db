"""A stand-in for a Kubernetes cluster, on a port of 127.0.0.1: enough of the API for a real kubectl, and real processes
as pods. `python -m tests.kubernetes.stand_in FOLDER IMAGES NODES GPUS`; the port is the first line that it writes.

API: discovery; create, get, list, watch, patch and delete; exec by WebSocket (v5.channel.k8s.io). Faults on demand, by
POST /_test/WHAT/ARGUMENT ... (`_Faults`)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from tests.kubernetes.kubelet import Kubelet, Running
from tests.kubernetes.objects import KINDS, NOT_IN_NAMESPACES, Controllers, Object, Objects, Refused, is_chosen, merged

VERBS = ["create", "get", "list", "watch", "delete", "patch"]
USER = "system:serviceaccount:team:notebook"
_NOT_FOUND = "the server could not find the requested resource"
_PATH = re.compile(r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?P<rest>/.*)?")


class Server:
    """The API."""

    def __init__(self, objects: Objects, kubelet: Kubelet) -> None:
        self.objects, self.kubelet = objects, kubelet
        self.denied: set[str] = set()
        self.quota: int | None = None
        self.webhook = self.policy = ""
        self.without_job_sets = False
        self.execs: dict[str, list[Any]] = {}
        """Transports of the connections into pods, by the pods' names."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refused as error:
            return web.json_response(error.body, status=error.code)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/_test/"):
            return web.json_response(_Faults(self).do(*request.path.split("/")[2:]))
        if request.path == "/version":
            return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.0-standin"})
        if request.path in ("/api", "/apis"):
            return web.json_response(self._groups(request.path))
        match = _PATH.fullmatch(request.path)
        api = (match["core"] or match["group"]) if match else ""
        if match is None or api not in KINDS or (self.without_job_sets and "jobset" in api):
            raise Refused(404, "NotFound", _NOT_FOUND)
        if not match["rest"]:
            return web.json_response(self._resources(api))
        return await self._object(request, api, match["rest"].strip("/").split("/"))

    def _groups(self, path: str) -> Object:
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        groups = []
        for api in KINDS:
            name, _, version = api.rpartition("/")
            if name and not (self.without_job_sets and "jobset" in api):
                one = {"groupVersion": api, "version": version}
                groups.append({"name": name, "versions": [one], "preferredVersion": one})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _resources(self, api: str) -> Object:
        found = [
            {"name": name, "singularName": kind.lower(), "namespaced": name not in NOT_IN_NAMESPACES, "kind": kind, "verbs": VERBS}
            for name, kind in KINDS[api].items()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": found}

    async def _object(self, request: web.Request, api: str, words: list[str]) -> web.StreamResponse:
        namespace = ""
        if words[0] == "namespaces" and len(words) > 2:
            namespace, words = words[1], words[2:]
        plural, name, part = [*words, "", ""][:3]
        if plural not in KINDS[api]:
            raise Refused(404, "NotFound", _NOT_FOUND)
        verb = _verb(request, name)
        self._allow("create" if part == "exec" else verb, api, words, namespace)
        if namespace and ("namespaces", "", namespace) not in self.objects.all and verb == "create":
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if plural == "selfsubjectaccessreviews":
            return web.json_response(self._reviewed(await request.read()), status=201)
        if verb == "create" and not part:
            return web.json_response(self.admit(plural, namespace, await request.json()), status=201)
        if verb in ("list", "watch"):
            return await self._list(request, api, plural, namespace, watch=verb == "watch")
        one = self.objects.all.get((plural, namespace, name))
        if one is None:
            group = api.rpartition("/")[0]
            raise Refused(404, "NotFound", f'{plural}{"." * bool(group)}{group} "{name}" not found')
        if part == "exec":
            return await self._exec(request, one)
        if verb == "patch":
            merged(one, await request.json())
            self.objects.put(plural, namespace, one)
        if verb == "delete":
            self.objects.delete(plural, namespace, name)
        return web.json_response(one)

    # ------------------------------------------------------------------------------------------ admission

    def _allow(self, verb: str, api: str, words: list[str], namespace: str) -> None:
        plural, name, part = [*words, "", ""][:3]
        resource = f"{plural}/{part}" if part else plural
        if f"{verb}:{resource}" in self.denied:
            group = api.rpartition("/")[0]
            shown = f"{plural}{'.' * bool(group)}{group}" + (f' "{name}"' if name else "")
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            text = (
                f'{shown} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in API group "{group}"{where}'
            )
            raise Refused(403, "Forbidden", text)

    def _reviewed(self, body: bytes) -> Object:
        """Answer `kubectl auth can-i`, whose question is no JSON."""
        raw = _fields(body.removeprefix(b"k8s\0"))[2]
        asked = {number: value.decode() for number, value in _fields(_fields(_fields(raw)[2])[1]).items()}
        verb, resource, part = asked.get(2, ""), asked.get(5, ""), asked.get(6, "")
        allowed = f"{verb}:{resource}/{part}".rstrip("/") not in self.denied
        head = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "metadata": {}}
        return {**head, "spec": {}, "status": {"allowed": allowed}}

    def admit(self, plural: str, namespace: str, one: Object) -> Object:
        name = one["metadata"]["name"]
        if (plural, namespace, name) in self.objects.all:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if self.webhook and plural == "jobs":
            raise Refused(
                403, "Forbidden", f'admission webhook "{self.webhook}" denied the request: no such image here'
            )
        one["status"] = {}
        if plural == "pods":
            used = sum(each["status"]["phase"] in ("Pending", "Running") for each in self.objects.of("pods", namespace))
            if self.quota is not None and used >= self.quota:
                text = f"exceeded quota: team, requested: pods=1, used: pods={used}, limited: pods={self.quota}"
                raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {text}')
            if self.policy:
                raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {self.policy}')
            one["status"] = {"phase": "Pending", "conditions": []}
        self.objects.put(plural, namespace, one)
        if plural == "jobs" and one["spec"].get("suspend"):
            self._queue(namespace, one)
        return one

    def _queue(self, namespace: str, job: Object) -> None:
        """Make what Kueue makes of a Job that waits."""
        text = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu, 8 more needed"
        condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": text}
        labels = {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}
        metadata = {"name": f"job-{job['metadata']['name']}", "labels": labels}
        workload = {"kind": "Workload", "apiVersion": "kueue.x-k8s.io/v1beta1", "metadata": metadata}
        self.objects.put("workloads", namespace, {**workload, "status": {"conditions": [condition]}})

    # ------------------------------------------------------------------------------------------ lists and watches

    async def _list(
        self, request: web.Request, api: str, plural: str, namespace: str, *, watch: bool
    ) -> web.StreamResponse:
        labels, fields = (request.query.get(name, "") for name in ("labelSelector", "fieldSelector"))
        if not watch:
            items = [one for one in self.objects.of(plural, namespace) if is_chosen(one, labels, fields)]
            head = {"kind": f"{KINDS[api][plural]}List", "apiVersion": api}
            return web.json_response(
                {**head, "metadata": {"resourceVersion": str(self.objects.version)}, "items": items}
            )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        seen, until_s = int(request.query.get("resourceVersion") or 0), time.monotonic() + 3600
        while time.monotonic() < until_s:
            for version, event, kind, where, one in [*self.objects.log]:
                if version > seen and kind == plural and namespace in ("", where) and is_chosen(one, labels, fields):
                    await response.write(json.dumps({"type": event, "object": one}).encode() + b"\n")
            seen = max(seen, self.objects.version)
            async with self.objects.changed:
                if seen >= self.objects.version:
                    await self.objects.changed.wait()
        return response

    # ------------------------------------------------------------------------------------------ exec

    async def _exec(self, request: web.Request, pod: Object) -> web.StreamResponse:
        running = self.kubelet.pods.get(pod["metadata"]["name"])
        if running is None or not running.root:
            phase = pod["status"]["phase"]
            raise Refused(
                400, "BadRequest", f"cannot exec into a container in a completed pod; current phase is {phase}"
            )
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",), max_msg_size=0, compress=False)
        if not socket.can_prepare(request):
            raise Refused(400, "BadRequest", "Upgrade request required")
        await socket.prepare(request)
        connections, transport = self.execs.setdefault(running.name, []), request.transport
        connections.append(transport)
        try:
            await _run(socket, running, request.query.getall("command"))
        finally:
            connections.remove(transport)
        return socket


def _fields(message: bytes) -> dict[int, bytes]:
    """The fields of a protobuf message by their numbers: texts and messages of less than 128 bytes, or numbers."""
    found, at = {}, 0
    while at < len(message):
        number, kind, size = message[at] >> 3, message[at] & 7, message[at + 1]
        if kind == 2:
            found[number] = message[at + 2 : at + 2 + size]
        at += 2 + (size if kind == 2 else 0)
    return found


def _verb(request: web.Request, name: str) -> str:
    if request.method == "GET" and not name:
        return "watch" if request.query.get("watch") in ("1", "true") else "list"
    return {"GET": "get", "POST": "create", "DELETE": "delete", "PATCH": "patch"}[request.method]


async def _run(socket: web.WebSocketResponse, running: Running, command: list[str]) -> None:
    """Run a command in a pod: channels 0, 1 and 2 of the connection are its input and output, 3 is its end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *running.enters(command), env=running.env, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def pump(stream: asyncio.StreamReader, channel: int) -> None:
        while data := await stream.read(1 << 15):
            await socket.send_bytes(bytes([channel]) + data)

    async def feed(stream: asyncio.StreamWriter) -> None:
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                with suppress(ConnectionError):
                    stream.write(message.data[1:])
                    await stream.drain()
            elif message.type == WSMsgType.BINARY and message.data[:1] == b"\xff":
                stream.close()
        stream.close()  # as containerd does when a connection is gone: the command's input ends

    feeding = asyncio.create_task(feed(process.stdin))
    await asyncio.gather(pump(process.stdout, 1), pump(process.stderr, 2), return_exceptions=True)
    code = await process.wait()
    status: Object = {"metadata": {}, "status": "Success"}
    if code:
        code = 128 - code if code < 0 else code
        causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
        text = f"command terminated with non-zero exit code: exit status {code}"
        status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": text, "details": causes}
    with suppress(ConnectionError, RuntimeError):
        await socket.send_bytes(b"\3" + json.dumps(status).encode())
        await socket.close()
    feeding.cancel()


class _Faults:
    """What tests can do to the cluster."""

    def __init__(self, server: Server) -> None:
        self._server, self._objects = server, server.objects

    def do(self, what: str, *arguments: str) -> Any:
        action: Callable[..., Any] = getattr(self, what)
        return action(*arguments)

    def history(self, plural: str) -> list[Object]:
        return [one for _, event, kind, _, one in self._objects.log if kind == plural and event == "ADDED"]

    def connected(self) -> dict[str, int]:
        return {name: len(found) for name, found in self._server.execs.items() if found}

    def deny(self, verb: str, *resource: str) -> None:
        self._server.denied.add(f"{verb}:{'/'.join(resource)}")

    def quota(self, pods: str) -> None:
        self._server.quota = int(pods)

    def webhook(self, name: str) -> None:
        self._server.webhook = name

    def restrict(self) -> None:
        self._server.policy = 'violates PodSecurity "restricted:latest": runAsNonRoot != true'

    def without_job_sets(self) -> None:
        self._server.without_job_sets = True

    def heal(self) -> None:
        self._server.denied.clear()
        self._server.webhook = self._server.policy = ""
        self._server.quota, self._server.without_job_sets = None, False

    def cut(self, pod: str) -> None:
        for transport in self._server.execs.get(pod, ()):
            transport.abort()

    def evict(self, pod: str) -> None:
        message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 61Mi."
        self._end(pod, 1, reason="Evicted", message=message)

    def preempt(self, pod: str) -> None:
        text = "default-scheduler: preempting to accommodate a higher priority pod"
        self._disrupt(pod, "PreemptionByScheduler", text)

    def lose_node(self, pod: str) -> None:
        """As five minutes after a node has stopped answering."""
        self.cut(pod)
        self._disrupt(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def _disrupt(self, pod: str, reason: str, message: str) -> None:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        running = self._server.kubelet.pods[pod]
        running.pod["status"]["conditions"].append(condition)
        self._objects.delete("pods", running.pod["metadata"]["namespace"], pod)

    def use_up_memory(self, pod: str) -> None:
        running = self._server.kubelet.pods[pod]
        running.container_reason = "OOMKilled"
        os.kill(running.root, signal.SIGKILL)

    def _end(self, pod: str, grace_s: float, **ending: str) -> None:
        running = self._server.kubelet.pods[pod]
        running.ending = ending
        self._server.kubelet.do(running.stop(grace_s))

    def delete(self, plural: str, name: str) -> None:
        self._objects.delete(plural, "team", name)

    def clear(self) -> None:
        for plural in ("jobsets", "jobs"):
            for one in self._objects.of(plural):
                self._objects.delete(plural, one["metadata"]["namespace"], one["metadata"]["name"])

    def admit(self, job: str) -> None:
        self._suspend(job, suspended=False)

    def suspend(self, job: str) -> None:
        one = self._suspend(job, suspended=True)
        self._objects.event(
            one, "Stopped", "Preempted to accommodate a workload due to prioritization in the ClusterQueue"
        )

    def _suspend(self, job: str, *, suspended: bool) -> Object:
        one = self._objects.all["jobs", "team", job]
        one["spec"]["suspend"] = suspended
        return self._objects.put("jobs", "team", one)

    def scale_up(self, pod: str) -> None:
        one = self._objects.all["pods", "team", pod]
        self._objects.event(one, "TriggeredScaleUp", "pod triggered scale-up: [{pool-1 0->1 (max: 4)}]")


async def main(folder: str, images: str, nodes: str, gpus: str) -> None:
    objects = Objects()
    kubelet = Kubelet(objects, Path(folder), json.loads(images), int(nodes), int(gpus))
    await kubelet.set_up()
    for name in ("default", "team"):
        metadata = {"name": name}
        objects.put("namespaces", "", {"kind": "Namespace", "apiVersion": "v1", "metadata": metadata, "status": {}})
    server = Server(objects, kubelet)
    controllers = Controllers(objects, server.admit)
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{rest:.*}", server.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print(runner.addresses[0][1], flush=True)
    while not ended.is_set():
        controllers.turn()
        kubelet.turn()
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.05)
    await kubelet.close()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
