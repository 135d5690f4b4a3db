"""Connects to a Ray cluster, or says in one sentence why that fails. Runs in the coordinator before its loop; blocks
for seconds. Only `resolve` is for the kernel, whose environment and machine determine what `auto` means.

For a missing cluster or token, Ray itself waits half a minute and then raises something else, so the port and the token
are checked first (measured with Ray 2.60).
"""

from __future__ import annotations

import gc
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_distrib.addresses import shown
from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import outside_text

CONNECT_S = 3.0
ANSWER_S = 10.0
"""Seconds to wait for the first answer of a head node that has accepted the connection."""
JOIN_S = 180.0
"""Seconds to keep trying: a busy head node may need a minute to start its side of a connection, and Ray itself tries
for minutes."""
GCS_PORT = "6379"
_DISABLED = "disabled"
_CHECKS = {"gcs": "/ray.rpc.NodeInfoGcsService/CheckAlive", "client": "/ray.rpc.RayletDriver/ClusterInfo"}
"""Calls to which a cluster with tokens answers UNAUTHENTICATED, and one without tokens something else."""
_HEAD_FAILED = "Initialization failure from server"
"""Ray Client's message when the head node's side of the connection did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a cluster."""

    shown: str
    host: str
    port: int
    client: bool
    """Whether it is `ray://`: through Ray Client's one port."""

    @property
    def url(self) -> str:
        return f"{'ray://' * self.client}{self.host}:{self.port}"


Looked = tuple[Address, str]
"""Pair of a cluster and Ray's mode of authentication in it."""


def find_cluster(address: str, *, insecure: bool) -> Looked:
    """Find the cluster and its authentication mode. Raises `PoolError` within seconds. Sends no user data."""
    found = resolve(address)
    check_port(found)
    return found, _mode(found, insecure=insecure)


def join(looking: Future[Looked]) -> Address:
    """Join the cluster found by `find_cluster`. Raises `PoolError`, including that of `find_cluster`."""
    gc.disable()  # imported objects stay: repeated collections of all of them would take a sixth of Ray's import
    try:
        if not _token():  # no other mode is left, so modules imported so far need not wait
            _import(_DISABLED)
        found, mode = looking.result()
        _import(mode)
        _join(found)
    finally:
        gc.freeze()
        gc.enable()
    return found


def _import(mode: str) -> None:
    """Set the variables that Ray reads at its import, and import it. By default, a call after the loss of the
    connection joins or starts another cluster (`ray._private.auto_init_hook`), and below `uv run` the command line of
    that process starts the processes of all nodes (`ray._private.runtime_env.uv_runtime_env_hook`)."""
    os.environ.update(RAY_AUTH_MODE=mode, RAY_ENABLE_AUTO_CONNECT="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
    import ray  # noqa: F401


def resolve(address: str) -> Address:
    """Resolve `auto`, `host:port` or `ray://host:port`, for the process that asks. Raises `PoolError`."""
    text, origin = address, "address"
    if address == "auto":
        text, origin = os.environ.get("RAY_ADDRESS", "auto"), "RAY_ADDRESS"
    if text in ("auto", ""):
        text = _running_here()
    text = shown(text)  # Ray has no users: what looks like a user name is not part of the address
    client = text.startswith("ray://")
    host, _, port = text.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise PoolError(
            f"{origin} = {text!r} is not an address of a Ray cluster: write auto, HOST:{GCS_PORT} or ray://HOST:10001."
        )
    return Address(shown=text, host=host.strip("[]"), port=int(port), client=client)


def _running_here() -> str:
    """Return the address of the only cluster that has a node on this machine. Any user may start a program that calls
    itself a raylet, and would get the token: only raylets of this user and of root are trusted."""
    found = sorted(set(filter(None, map(_cluster_of, _command_lines((os.getuid(), 0))))))
    if not found:
        raise PoolError(
            "no Ray cluster of yours runs on this machine: start one with `ray start --head`, or give --address "
            "HOST:PORT."
        )
    if len(found) > 1:
        raise PoolError(
            f"{len(found)} Ray clusters run on this machine: choose one with --address or RAY_ADDRESS; "
            f"they are at {', '.join(found)}."
        )
    return found[0]


def _cluster_of(line: Sequence[str]) -> str:
    """Return the address of a raylet's cluster from its command line; empty for other programs. Ray itself looks for
    clusters in this way (`ray._private.services.find_gcs_addresses`), but the kernel does not load Ray."""
    if not line or os.path.basename(line[0]) != "raylet":
        return ""
    return next((word.partition("=")[2] for word in line if word.startswith("--gcs-address=")), "")


def _command_lines(users: Collection[int]) -> Iterator[Sequence[str]]:
    """Yield the command lines of all processes of these users."""
    if sys.platform != "linux":
        names = ",".join(map(str, users))
        shown = subprocess.run(
            ("ps", "-xww", "-U", names, "-o", "args="), capture_output=True, text=True, errors="replace", check=False
        ).stdout
        yield from map(str.split, shown.splitlines())
        return
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_text("utf-8", "replace").split("\0")
            if outside_text.owner_of(int(path.parent.name)) in users:
                yield line


def check_port(address: Address) -> None:
    """Raise `PoolError` if nothing listens at the address (any more)."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_S).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PoolError(
            f"no Ray cluster can be reached at {address.shown} ({reason}): start it, or correct the address."
        ) from None


def _mode(address: Address, *, insecure: bool) -> str:
    """Return the authentication mode. A cluster that asks for no token runs anyone's code, so the user must allow
    it."""
    if _refuses(address, ""):
        if not (token := _token()):
            raise PoolError(
                f"the Ray cluster at {address.shown} asks for a token: put it into ~/.ray/auth_token or RAY_AUTH_TOKEN."
            )
        if _refuses(address, token):
            raise PoolError(
                f"the Ray cluster at {address.shown} rejects this token: put the right one into "
                "~/.ray/auth_token or RAY_AUTH_TOKEN."
            )
        return "token"
    if not insecure:
        raise PoolError(
            f"the Ray cluster at {address.shown} asks for no token, so anyone who reaches it can run code on it: "
            "start it with RAY_AUTH_MODE=token, or write --insecure (insecure = true) if only you can reach it."
        )
    return _DISABLED


def _refuses(address: Address, token: str) -> bool:
    """Return whether the cluster rejects this token (or the lack of one)."""
    import grpc  # comes with ray[client]

    with grpc.insecure_channel(f"{address.host}:{address.port}") as channel:
        call = channel.unary_unary(
            _CHECKS["client" if address.client else "gcs"], request_serializer=bytes, response_deserializer=bytes
        )
        try:
            call(b"", timeout=ANSWER_S, metadata=[("authorization", f"Bearer {token}")] if token else None)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PoolError(
                    f"{address.shown} accepts connections, but has not answered as a Ray cluster within {ANSWER_S:g} "
                    "s: try again if its head is busy or just starting, or correct the address."
                ) from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise PoolError(
                    f"the program that answers at {address.shown} is not a Ray cluster ({error.details()}): correct "
                    "the address."
                ) from None
        return False


def _token() -> str:
    """Return the token that Ray will use (docs.ray.io, token authentication), or an empty string."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    try:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""


def _join(address: Address) -> None:
    """Connect to the cluster, and try again when its head fails to start a process for this client: one in several dies
    at once, because it is forked while other clients are served (https://github.com/ray-project/ray/issues/63202)."""
    import ray

    until_s = time.monotonic() + JOIN_S
    while True:
        try:
            ray.init(
                address=address.url,
                namespace="jupyter_distrib",
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=not address.client,
            )
            return
        except Exception as error:  # noqa: BLE001 - Ray raises all kinds
            if _HEAD_FAILED not in str(error) or time.monotonic() > until_s:
                raise PoolError(explained(address, str(error))) from None


def wait_until_cut() -> None:
    """Wait until Ray Client has given up its connection, which it never makes anew: the thread that receives its
    answers has ended then. There is no other sign of it (Ray 2.60: `ray.is_initialized` stays true)."""
    from ray.util.client import ray as client

    client.get_context().client_worker.data_client.data_thread.join()


def explained(address: Address, text: str) -> str:
    """Explain a message of Ray in one sentence."""
    import ray

    there = dict(re.findall(r"(Ray|Python):? ?(?:version )?v?(\d+\.\d+\.\d+)", text.partition("This process")[0]))
    if "ersion mismatch" in text:
        return (
            f"the Ray cluster at {address.shown} has Ray {there.get('Ray')} and Python {there.get('Python')}, "
            f"the notebook has Ray {ray.__version__} and Python {platform.python_version()}: install the same versions."
        )
    if _HEAD_FAILED in text:
        return (
            f"the Ray cluster at {address.shown} fails to start its side of the connection "
            f"({text.strip().splitlines()[-1].strip()}): start its head with GRPC_ENABLE_FORK_SUPPORT=0 set, "
            f"or use HOST:{GCS_PORT}."
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it did not say why")
    return f"the Ray cluster at {address.shown} cannot be joined: {first}"


def probe() -> Any:
    """Return the function that Ray runs on a node before an actor with a `py_executable`: it returns a sentence on
    what is wrong with the executable. Ray itself retries for minutes, and does not say why."""
    import ray

    def check_executable(executable: str) -> str:
        import os
        import shlex
        import shutil
        import subprocess

        words, node = shlex.split(executable) or [""], ray.util.get_node_ip_address()
        command = os.path.expanduser(words[0])
        if "/" in command and not os.path.isabs(command):  # in a `working_dir`
            return ""
        if (found := shutil.which(command)) is None:
            return f"there is no py_executable = {executable!r} on node {node}: correct the runtime environment."
        if len(words) > 1 or "python" not in os.path.basename(found):  # such as `uv run`, which takes its time
            return ""
        tried = subprocess.run([found, "-c", "import ray"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return ""
        said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        return f"py_executable = {executable!r} on node {node} cannot run Ray's processes ({said}): install Ray there."

    return ray.remote(num_cpus=0, max_retries=0)(check_executable)


def actor_class() -> Any:
    """Return the actor that Ray starts on a node: it puts this package on the node and hands calls on to `Relay`.

    Defined in a function, so that Ray sends its code and does not look for this module on the node.
    """
    import ray

    unpack = _unpack()

    class HostActor:
        def __init__(self, package: bytes, label: str, session: str, **more: Any) -> None:
            folder = unpack(package)
            from jupyter_distrib.pools.ray import host  # from the package that is on the node now

            self._relay = host.start(folder, label, session, **more)

        def describe(self, others: list[str], directory: str) -> str:
            return str(self._relay.describe(others, directory))

        @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
        def send(self, frame: bytes, *part: Any) -> Any:
            return self._relay.send(frame, *part)

        @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
        def add_part(self, part: Any, start: int, size_bytes: int) -> None:
            self._relay.add_part(part, start, size_bytes)

        @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
        def store(self, segment: str, part: Any, start: int, size_bytes: int) -> None:
            self._relay.store(segment, part, start, size_bytes)

        @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
        def execute(self, frame: bytes, segments: Any, dropped: Any) -> Any:
            return self._relay.execute(frame, segments, dropped)

        @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
        def discard(self) -> None:
            self._relay.discard()

        @ray.method(concurrency_group="commands")  # type: ignore[untyped-decorator]
        def bring(self, files: Any, gone: Any) -> Any:
            return self._relay.bring(files, gone)

        @ray.method(concurrency_group="events")  # type: ignore[untyped-decorator]
        def receive(self) -> Any:
            return self._relay.receive()

        def logs(self, run: str) -> Any:
            return self._relay.logs(run)

        def end(self, *, keep_agent: bool) -> None:
            self._relay.end(keep_agent=keep_agent)

    return ray.remote(concurrency_groups={"commands": 1, "events": 1}, max_restarts=0)(HostActor)


def _unpack() -> Callable[[bytes], str]:
    """Return the function that puts this package on a node, where Python finds it, and returns its folder."""

    def unpack(package: bytes) -> str:
        import os
        import sys
        import tempfile

        os.umask(0o077)
        short = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - a socket's path has 107 bytes
        folder = tempfile.mkdtemp(prefix="jupyter_distrib-ray-", dir=short)
        with open(f"{folder}/source.zip", "wb") as file:
            file.write(package)
        sys.path.insert(0, f"{folder}/source.zip")
        for name in [name for name in sys.modules if name.partition(".")[0] == "jupyter_distrib"]:
            del sys.modules[name]
        return folder

    return unpack


def cause(error: BaseException) -> str:
    """Return the cause of an exception in Ray's own words, without frames; or in this package's, from a node."""
    if ours := str(error).rpartition("PoolError: ")[2].strip() if "PoolError: " in str(error) else "":
        return ours.splitlines()[0]
    if isinstance(raised := getattr(error, "cause", None), BaseException):  # an exception raised on a node
        return f"{type(raised).__name__}: {raised}"[:500]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else lines[0] if lines else type(error).__name__)[:500]
