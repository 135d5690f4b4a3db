"""What is said of a cluster before, while and after ranks are had there: tokens, versions, room, growth, its end."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import re
import shlex
import shutil
import socket
import stat
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.ray import cluster as joining
from jupyter_distrib.pools.ray.pool import RayPool
from jupyter_distrib.testing import pool_client
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook
from tests.ray.conftest import Cluster
from tests.wheels import environment, install, wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NO_TOKEN = "asks for a token: put it into ~/.ray/auth_token or RAY_AUTH_TOKEN"
NOT_THIS = "rejects this token"
TOKEN = "a-token-that-is-long-enough-0123456789"


def refused(book: Notebook, line: str) -> str:
    outcome = book.cell(f"%%distributed {line}\nrank", timeout_s=150)
    assert outcome.status == "error", outcome.text
    assert "\n" not in outcome.traceback.strip(), "one sentence"
    return outcome.traceback


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """One node with a token and two GPUs that are none."""
    one = Cluster(nodes=1, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    yield one
    one.close()


def test_a_cluster_with_a_token_wants_the_right_one(guarded: Cluster, tmp_path: Path) -> None:
    """And is used without `--insecure`."""
    with Notebook(tmp_path, env={"HOME": str(tmp_path)}) as book:
        book.ok("%load_ext jupyter_distrib\nimport os")
        for address in (guarded.address, guarded.client_address):
            assert NO_TOKEN in refused(book, f"--pool ray --address {address}")
        book.ok("os.environ['RAY_AUTH_TOKEN'] = 'another-token-that-is-long-enough-98765'")
        for address in (guarded.address, guarded.client_address):
            assert NOT_THIS in refused(book, f"--pool ray --address {address}")
        book.ok(f"os.environ['RAY_AUTH_TOKEN'] = {TOKEN!r}")
        at = f"--pool ray --address {guarded.address}"
        said = refused(book, f"{at} --gpus 4")
        assert "has room for 2;" in said
        assert "--gpu-type H100, but the Ray cluster has A10; leave it out" in refused(book, f"{at} --gpu-type H100")
        cell = f"%%distributed {at} --ranks 2\nimport os\nstr(os.environ.get('RAY_AUTH_TOKEN'))"
        assert book.cell(cell, timeout_s=150).result == "ranks 0-1: 'None'", "keys stay at home"
        status = book.ok("%distributed_status").result
        assert re.search(r"^127\.0\.0\.2 +4, 2 free +\d.*B +2 A10, 2 free +0-1 ", status, re.MULTILINE), status


def test_a_cluster_that_goes_away_in_mid_run_is_reported(tmp_path: Path) -> None:
    own = Cluster(nodes=1)
    at = f"--pool ray --insecure --address {own.address} --ranks 2"
    try:
        # The driver of a cluster that may come back waits for a minute.
        with Notebook(tmp_path, env={"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}) as book:
            book.ok("%load_ext jupyter_distrib")
            assert book.cell(f"%%distributed {at}\nrank;", timeout_s=150).status == "ok"
            book.start(f"%%distributed {at}\nimport time\nprint('entered', flush=True)\ntime.sleep(300)")
            book.until("entered")
            own.ask("kill")
            outcome = book.finish(120)
            assert outcome.ename == "RankLost", outcome.text
            assert re.search(r"was lost: |the process that holds the Ray cluster has ended", outcome.traceback)
            assert f"be reached at {own.address}" in refused(book, at)
    finally:
        own.close()


def test_idle_ranks_are_given_back_and_kept_values_are_not(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "LIMIT_S", 200.0)
    client = testing.PoolClient(RayPool(address=cluster.address, insecure="", idle="0.5"))
    try:
        group = client.group(1)
        assert client.run(group, "rank").values == {0: 0}
        assert client.wait(m.WorkerGroupClosed).reason == "released after 0.5 s without a cell"
        client.group(1)
        assert client.wait(m.WorkerGroupClosed).reason == "released after 0.5 s without a cell", (
            "also if there never was one"
        )
        group = client.group(1)
        client.run(group, "kept = 1", keep=("kept",))
        other = client.group(1)  # idle for less long
        assert client.wait(m.WorkerGroupClosed).group == other.group
        assert client.run(group, "rank").values == {0: 0}, "its ranks are still there"
    finally:
        client.close()


def test_a_cluster_that_grows_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine ranks at four CPUs a node take a third one, as an autoscaler would bring it."""
    monkeypatch.setattr(pool_client, "LIMIT_S", 200.0)
    client = testing.PoolClient(RayPool(address=cluster.address, insecure=""))
    try:
        client.send(m.OpenWorkerGroup(group="grows", size=9, gpus=False, wait_s=180.0))
        while "grow" not in (queued := client.wait(m.WorkerGroupQueued, m.WorkerGroupRefused)).reason:
            assert isinstance(queued, m.WorkerGroupQueued), queued
        assert re.match(
            r"9 CPUs are asked for, and \d of 8 are free in the Ray cluster. It has to grow.", queued.reason
        )
        cluster.ask("add")
        opened = client.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
        assert isinstance(opened, m.WorkerGroupOpened), opened
        assert len(opened.workers) == 9
        assert client.run(opened, "int(__import__('os').environ['NODE_RANK'])").values[8] == 2
        client.close_group(opened)
    finally:
        client.close()
        cluster.ask("lose")


def test_ranks_get_their_own_python_and_runtime_environment(cluster: Cluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nVIA=ours exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = '{"env_vars": {"FROM_RUNTIME_ENV": "yes", "NCCL_SOCKET_IFNAME": "eth7"}}'
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        line = f"--pool ray --insecure --address {cluster.address} --ranks 1 --python {python}"
        outcome = book.cell(
            f"%%distributed {line} --runtime-env '{environment}'\nimport os\n"
            "[os.environ.get(name) for name in ('VIA', 'FROM_RUNTIME_ENV', 'NCCL_SOCKET_IFNAME')]",
            timeout_s=150,
        )
        assert outcome.result == "rank 0: ['ours', 'yes', 'eth7']", outcome.text


def test_a_notebook_below_uv_run_has_ranks_with_the_python_of_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Ray would start their processes by the command line of `uv run`, which another machine does not have."""
    (tmp_path / "run").write_text('"$@"\n')
    uv = ["bash", "-c", 'exec -a uv bash run "$@"', "-"]
    with Notebook(tmp_path, below=uv) as book:
        assert "uv run" in book.ok("import os\nopen(f'/proc/{os.getppid()}/cmdline').read().replace('\\0', ' ')").result
        book.ok("%load_ext jupyter_distrib")
        line = f"--pool ray --insecure --address {cluster.address} --ranks 1"
        assert book.cell(f"%%distributed {line}\nrank", timeout_s=100).result == "rank 0: 0"


def test_an_executable_of_several_words_runs_the_nodes_processes(cluster: Cluster, tmp_path: Path) -> None:
    executable = f"env 'WORDS=several ones' {sys.executable} -X dev"
    line = f"--pool ray --insecure --address {cluster.address} --ranks 1"
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        environment = shlex.quote(json.dumps({"py_executable": executable}))
        outcome = book.cell(
            f"%%distributed {line} --runtime-env {environment}\nimport os\nos.environ.get('WORDS')", timeout_s=100
        )
        assert outcome.result == "rank 0: 'several ones'", outcome.text


def node_with(folder: Path, name: str, version: str) -> str:
    """A runtime environment in which another version of a package is found; nobody imports it."""
    about = folder / name / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return json.dumps({"env_vars": {"PYTHONPATH": str(about.parent)}})


def test_nodes_get_the_packages_that_they_lack(cluster: Cluster, tmp_path: Path) -> None:
    _, packages = environment(tmp_path / "env")
    install(wheel(tmp_path, "tinypkg", "1.2"), packages)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    line = (
        f"%%distributed --pool ray --address {cluster.address} --insecure --nodes 2 --ranks 2 --python {sys.executable}"
    )
    cell = "import os, tinypkg\n(os.environ['NODE_RANK'], tinypkg.version)"
    with Notebook(tmp_path, env, python=str(tmp_path / "env" / "bin" / "python")) as book:
        book.ok("%load_ext jupyter_distrib")
        assert "notebook has: tinypkg 1.2." in refused(
            book, f"{line.removeprefix('%%distributed ')} --environment check"
        )
        outcome = book.cell(f"{line} --environment sync\n{cell}", timeout_s=200)
        assert outcome.result == "rank 0: ('0', '1.2')\nrank 1: ('1', '1.2')", outcome.text
        assert "being installed: tinypkg 1.2" in outcome.text


def test_nodes_with_other_versions_are_refused_or_remarked(cluster: Cluster, tmp_path: Path) -> None:
    """Before anything is unpickled there; a patch of torch changes nothing that is pickled."""
    at = f"--pool ray --insecure --address {cluster.address} --ranks 1"
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        said = refused(book, f"{at} --runtime-env '{node_with(tmp_path, 'torch', '99.0.0')}'")
        assert re.search(
            r"the notebook has torch 2\.\S+ and the Ray pool has torch 99\.0\.0, which cannot exchange", said
        )
        said = refused(book, f"{at} --runtime-env '{node_with(tmp_path, 'cloudpickle', '99.0.0')}'")
        assert "the Ray pool has cloudpickle 99.0.0" in said
        shutil.rmtree(tmp_path / "torch")
        environment = node_with(tmp_path, "torch", f"{minor}.99")
        outcome = book.cell(f"%%distributed {at} --runtime-env '{environment}'\nrank;", timeout_s=150)
        assert outcome.status == "ok", outcome.text
        assert re.search(rf"node 127\.0\.0\.[23] has torch {re.escape(minor)}\.99 there, 2\.\S+ here", outcome.text)


def bare_python(folder: Path) -> str:
    """An interpreter in whose environment there is no Ray."""
    venv.create(folder / "bare", with_pip=False)
    return str(folder / "bare" / "bin" / "python")


def test_an_interpreter_that_is_none_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    at = f"--pool ray --insecure --address {cluster.address} --ranks 1"
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        said = refused(book, f"{at} --python /wrong/path")
        assert re.search(r"there is no interpreter at /wrong/path on node 127\.0\.0\.[23]", said), said
        for executable, why in (
            ("/wrong/path", "there is no py_executable"),
            ("/wrong/path -u", "there is no py_executable"),
            (bare_python(tmp_path), "No module named"),
        ):
            said = refused(book, f"{at} --runtime-env '{json.dumps({'py_executable': executable})}'")
            assert why in said, said
            assert re.search(rf"py_executable = '{executable}' on node 127\.0\.0\.[23]", said), said
        said = refused(book, f"{at} --python /bin/false")
        assert "no agent can be started under /bin/false" in said


def test_an_interface_that_the_notebook_names_is_used(cluster: Cluster, tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import os
                os.environ['NCCL_SOCKET_IFNAME'] = 'eth9'""")
        )
        line = f"--pool ray --insecure --address {cluster.address} --ranks 2 --nodes 2"
        cell = f"%%distributed {line}\nimport os\n(os.environ['NCCL_SOCKET_IFNAME'], os.environ['GLOO_SOCKET_IFNAME'])"
        outcome = book.cell(cell, timeout_s=150)
        assert outcome.result == "ranks 0-1: ('eth9', 'lo')", outcome.text


# ---------------------------------------------------------------------------------------------------- in Ray's words

ADDRESS = joining.Address(shown="ray://head:10001", host="head", port=10001, client=True)


@pytest.mark.parametrize(("ray_version", "python"), [("2.9.3", None), (None, "3.9.1")])
def test_other_versions_are_one_sentence(ray_version: str | None, python: str | None) -> None:
    import ray
    from ray._private.utils import check_version_info, compute_version_info

    ours = compute_version_info()
    there = {"ray_version": ray_version or ours[0], "python_version": python or ours[1]}
    with pytest.raises(RuntimeError) as raised:
        check_version_info(there, "Ray Client")
    assert joining.explained(ADDRESS, str(raised.value)) == (
        f"the Ray cluster at ray://head:10001 has Ray {there['ray_version']} and Python {there['python_version']}, "
        f"the notebook has Ray {ray.__version__} and Python {ours[1]}: install the same versions."
    )


def test_a_head_that_loses_its_side_is_tried_again_and_then_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    said = (
        "Initialization failure from server:\nTraceback (most recent call last):\n  File ...\n"
        "RuntimeError: Starting Ray client server failed. See ray_client_server_23008.err for detailed logs."
    )
    failures = [ConnectionAbortedError(said)] * 2
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(failures.pop()) if failures else None)
    joining._join(ADDRESS)
    assert failures == []
    monkeypatch.setattr(joining, "JOIN_S", 0.0)
    failures = [ConnectionAbortedError(said)]
    with pytest.raises(joining.PoolError, match=r"Starting Ray client server failed.*GRPC_ENABLE_FORK_SUPPORT=0"):
        joining._join(ADDRESS)


def test_a_port_that_is_not_a_cluster_is_said_within_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        address = "ray://127.0.0.1:" + str(mute.getsockname()[1])
        said = refused(book, f"--pool ray --insecure --address {address}")
        assert f"{address} accepts connections, but has not answered as a Ray cluster within" in said
        assert "try again if its head is busy or just starting, or correct the address" in said


def test_a_port_of_something_else_is_said(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with Notebook(tmp_path) as book:
            book.ok("%load_ext jupyter_distrib")
            address = f"127.0.0.1:{other.server_port}"
            said = refused(book, f"--pool ray --insecure --address {address}")
            assert f"the program that answers at {address} is not a Ray cluster" in said
        other.shutdown()
