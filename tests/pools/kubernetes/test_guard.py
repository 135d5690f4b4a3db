"""The process that deletes an object when its coordinator has ended, with a kubectl that writes down what it is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.pools.kubernetes import guard, owner
from jupyter_distrib.pools.kubernetes.guard import Guard
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
from tests.processes import wait_until

Told = Callable[[], list[str]]
DELETE = "delete jobs.batch jd-x-1 --cascade=background --wait=false --ignore-not-found --request-timeout=15s"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What kubectl was told; `away` in the folder is a cluster that does not answer."""
    program = tmp_path / "kubectl"
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/told\n[ ! -e {tmp_path}/away ] || exit 1\ncat {tmp_path}/answer 2>/dev/null\n'
        "exit 0\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path / "runtime"))
    return lambda: (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []


def kubectl(tmp_path: Path, **options: str) -> Kubectl:
    return Kubectl({"kubectl": str(tmp_path / "kubectl"), **options})


def left(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "runtime" / "kubernetes-jobs"
    return list(folder.iterdir()) if folder.exists() else []


def test_an_object_is_deleted_once_and_forgotten(told: Told, tmp_path: Path) -> None:
    one = Guard(kubectl(tmp_path), "jobs.batch", "jd-x-1")
    assert len(left(tmp_path)) == 1
    one.send_outcome("created")
    one.release()
    assert told() == [DELETE]
    assert not left(tmp_path)


def test_nothing_is_deleted_that_was_refused(told: Told, tmp_path: Path) -> None:
    one = Guard(kubectl(tmp_path), "jobs.batch", "jd-x-1")
    one.send_outcome("refused")
    one.release()
    assert told() == []
    assert not left(tmp_path)


@pytest.mark.slow
def test_it_is_deleted_though_its_process_is_killed_and_the_cluster_is_away(told: Told, tmp_path: Path) -> None:
    (tmp_path / "away").touch()
    source = "import sys\nfrom tests.pools.kubernetes.test_guard import *\nguard = Guard(kubectl(Path(sys.argv[1])), "
    source += "'jobs.batch', 'jd-x-1')\nguard.send_outcome('created')\nprint('ready', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert wait_until(lambda: len(told()) >= 2, 10), "it is tried again"
    assert len(left(tmp_path)) == 1
    (tmp_path / "away").unlink()
    assert wait_until(lambda: not left(tmp_path), 15)
    assert set(told()) == {DELETE}


def test_it_ends_when_somebody_else_has_deleted_the_object(told: Told, tmp_path: Path) -> None:
    (tmp_path / "away").touch()
    one = Guard(kubectl(tmp_path), "jobs.batch", "jd-x-1")
    [path] = left(tmp_path)
    path.unlink()
    one.send_outcome("created")
    one.release()
    assert one._process.poll() == 1
    assert len(told()) == 1


def test_what_is_left_is_deleted_in_its_own_cluster_and_only_if_nobody_has_it(told: Told, tmp_path: Path) -> None:
    held = Guard(kubectl(tmp_path), "jobs.batch", "jd-held-1")
    folder = left(tmp_path)[0].parent
    here, there = guard.key(kubectl(tmp_path)), guard.key(kubectl(tmp_path, context="there"))
    for number, lines in enumerate(
        [
            (here, "team", "jobs.batch", "jd-x-1"),
            (there, "team", "jobs.batch", "jd-x-2"),
            (here, "team", "jobs.batch", "--all"),
            (here, "", "--all-namespaces", "jd-x-3"),
            (here, "--all-namespaces", "jobs.batch", "jd-x-4"),
            (here, "", "jobs.batch", "jd-x 5"),
            (here, "jobs.batch", "jd-x-6"),
        ]
    ):
        (folder / f"{number}").write_text("".join(f"{line}\n" for line in lines))
    (folder / "empty").touch()
    guard.delete_left(kubectl(tmp_path))
    assert [line.partition(" --cascade")[0] for line in told()] == ["--namespace=team delete jobs.batch jd-x-1"]
    assert not (folder / "0").exists()
    held.send_outcome("refused")
    held.release()


def test_what_cannot_be_deleted_now_is_kept(told: Told, tmp_path: Path) -> None:
    one = Guard(kubectl(tmp_path), "jobs.batch", "jd-y-1")
    folder = left(tmp_path)[0].parent
    one.send_outcome("refused")
    one.release()
    (tmp_path / "away").touch()
    (folder / "0").write_text(f"{guard.key(kubectl(tmp_path))}\n\njobs.batch\njd-x-1\n")
    guard.delete_left(kubectl(tmp_path))
    assert (folder / "0").exists()


# ------------------------------------------------------------------------------------------------ owners


@pytest.fixture
def in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "account").mkdir()
    (tmp_path / "account" / "namespace").write_text("team\n")
    monkeypatch.setattr(owner, "ACCOUNT", tmp_path / "account")
    monkeypatch.setattr("socket.gethostname", lambda: "jupyter-ada")


def answer(tmp_path: Path, namespace: str) -> None:
    text = f'{{"metadata": {{"name": "jupyter-ada", "uid": "7", "namespace": "{namespace}"}}}}'
    (tmp_path / "answer").write_text(text)


def test_the_notebooks_pod_is_the_owner(told: Told, in_a_pod: None, tmp_path: Path) -> None:
    answer(tmp_path, "team")
    wanted = {"apiVersion": "v1", "kind": "Pod", "name": "jupyter-ada", "uid": "7"}
    assert owner.find(kubectl(tmp_path)) == wanted
    assert told() == ["get pod jupyter-ada --output=json --request-timeout=20s"]


def test_an_owner_in_another_namespace_would_be_fatal(told: Told, in_a_pod: None, tmp_path: Path) -> None:
    answer(tmp_path, "default")
    assert owner.find(kubectl(tmp_path)) is None, "kubectl's own namespace is another one"
    assert owner.find(kubectl(tmp_path, namespace="other")) is None
    assert len(told()) == 1


def test_who_may_not_look_itself_up_or_is_in_no_pod_has_no_owner(told: Told, in_a_pod: None, tmp_path: Path) -> None:
    (tmp_path / "away").touch()
    assert owner.find(kubectl(tmp_path)) is None
    (tmp_path / "account" / "namespace").unlink()
    assert owner.find(kubectl(tmp_path)) is None
    assert len(told()) == 1, "outside of pods nothing is asked"
