"""Detached runs of which nothing is left but files: what is told of them, and what the history says."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.session import saved_runs
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.settings import Settings, without_files
from jupyter_distrib.system import last_seen
from jupyter_distrib.system.last_seen import ProcessHost, SeenRun
from jupyter_distrib.system.launch import began
from tests.notebook import Notebook
from tests.processes import agents, ranks, wait_until, wait_until_gone

DEAD = {"pid": 2**22 + 1, "process_began": "7"}
"""A process that there is not: ids of processes end below."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train.ipynb")
    return tmp_path / "state" / "jupyter_distrib"


def seen(run: str = "aaa-1", *, seen_s_ago: float = 60.0, **fields: Any) -> SeenRun:
    """Remember a run that goes on in this process, but for what is given otherwise."""
    place = ProcessHost.here()
    made = SeenRun(
        run=run, label="Cell In[1]", holder="b.ipynb (kernel 7)", notebook="", began_at_s=time.time() - 3600,
        logs="/logs/aaa-1", checkpoints=["/data/ckpt"], host=place.host, boot=place.boot, namespace=place.namespace,
        pid=os.getpid(), process_began=began(os.getpid()), seen_at_s=time.time() - seen_s_ago,
    )  # fmt: skip
    made = replace(made, **fields)
    last_seen.write(made)
    return made


def told(name: str | None = None) -> str:
    return saved_runs.about_lost(name, KernelIdentity())


def settings(**fields: Any) -> Settings:
    return replace(without_files(POOLS, STRATEGIES), **fields)


def test_a_run_that_goes_on_is_not_lost_and_one_that_has_ended_has_lost_its_values() -> None:
    seen("aaa-1")
    seen("aaa-2", ended=True)
    assert told() == ""
    seen("aaa-3", ended=True, **DEAD)
    assert "(Cell In[1] of b.ipynb (kernel 7)) has ended, but its return values were lost: the process" in told("3")
    saved_runs.save_lost(settings())
    assert run_files.load() == []


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        (DEAD, "the process that looked after it was killed"),
        ({"process_began": "1"}, "the process that looked after it was killed"),
        ({"boot": "another"}, "the machine has been rebooted since then"),
        ({"namespace": "another", "seen_s_ago": 3600.0}, "nothing has been heard of it since"),
        ({"namespace": "another"}, ""),
        ({"host": "another", **DEAD}, ""),
    ],
)
def test_a_run_is_lost_when_its_process_cannot_be_there_any_more(fields: dict[str, Any], cause: str) -> None:
    run = seen(**fields)
    when = time.strftime("on %d %b %Y at %H:%M", time.localtime(run.seen_at_s))
    if cause:
        assert told() == (
            f"the detached run aaa-1 (Cell In[1] of b.ipynb (kernel 7)) was lost: {cause}. It was last seen {when}. "
            "Its logs are in /logs/aaa-1. It saved checkpoints into /data/ckpt."
        )
    else:
        assert told() == ""


def test_the_run_that_is_asked_for_is_reported_or_that_of_this_notebook() -> None:
    seen("aaa-1", seen_s_ago=300.0, notebook="/home/me/train.ipynb", **DEAD)
    seen("bbb-2", seen_s_ago=200.0, **DEAD)
    assert [told(name).split()[3] for name in ("1", "2", "bbb-2", None)] == ["aaa-1", "bbb-2", "bbb-2", "aaa-1"]
    assert told("3") == ""


def test_the_history_has_it_once_as_lost() -> None:
    run = seen(**DEAD)
    saved_runs.save_lost(settings(history=0))
    assert run_files.load() == [], "the user saves nothing"
    last_seen.write(run)
    for _ in range(2):
        saved_runs.save_lost(settings())
    (saved,) = run_files.load()
    assert (saved.run, saved.state, saved.label) == ("aaa-1", "lost", "Cell In[1]")
    assert saved.facts == {"logs": "/logs/aaa-1", "checkpoints": "/data/ckpt"}
    assert saved.elapsed_s == pytest.approx(3540, abs=5)
    assert saved.error.startswith("the process that looked after it was killed; last seen on ")
    assert told().startswith("the detached run aaa-1"), "it can be asked for as before"
    run_files.save([], run_files.Limits(runs=0, days=0.0))
    saved_runs.save_lost(settings())
    assert run_files.load() == [], "what the user has removed does not come back"


def test_a_run_that_is_gone_for_long_is_forgotten(state: Path) -> None:
    seen("aaa-1", seen_s_ago=2 * last_seen.KEPT_S, **DEAD)
    assert told() == ""
    assert list((state / "detached").iterdir()) == []


def test_damaged_files_are_left_out(state: Path) -> None:
    run = seen(**DEAD)
    damaged = state / "detached" / "bbb-2.json"
    for content in (b"\xff", b"[1]", b"[" * 5000, json.dumps({**asdict(run), "checkpoints": [1]}).encode()):
        damaged.write_bytes(content)
        assert told().startswith("the detached run aaa-1")
    damaged.write_text(json.dumps(asdict(run)))
    assert told().startswith("the detached run aaa-1"), "the content is another run's"
    damaged.unlink()
    os.mkfifo(damaged)
    assert told().startswith("the detached run aaa-1")


# ---------------------------------------------------------------------------------------------------- real ones


CELL = """%%distributed --ranks 2 --detach
import time, torch, jupyter_distrib
if rank == 0:
    jupyter_distrib.save("ckpt", model=torch.nn.Linear(1, 1))
    print("saved", flush=True)
time.sleep(600)"""


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sockets of its own, since its agent is killed."""
    folder = tmp_path / "run"
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("JUPYTER_DISTRIB_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("JPY_SESSION_NAME")
    yield folder
    for pid in agents(folder):
        os.kill(pid, signal.SIGTERM)
    assert not wait_until_gone(agents(folder), 60)


def begun(folder: Path, state: Path) -> str:
    """Begin a detached run in a kernel that is then killed; return the run once it has saved a checkpoint."""
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib")
        run = book.ok(CELL).result.split()[1].rstrip(":,")
        assert wait_until(lambda: list((state / "detached").glob("*.json")), 30)
        (remembered,) = (state / "detached").glob("*.json")
        assert wait_until(lambda: json.loads(remembered.read_text())["checkpoints"] == [str(folder / "ckpt")], 30)
    return remembered.stem if run not in remembered.stem else run


def attached(folder: Path) -> tuple[str, str]:
    """What a new kernel says when it is to attach the run, and its list of runs."""
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib")
        refused = book.fails("%distributed_attach").traceback
        return refused, book.ok("%distributed_runs").result


@pytest.mark.slow
def test_after_the_loss_of_agent_ranks_and_kernel_it_is_told_which_run_was_lost(
    tmp_path: Path, run_folder: Path, state: Path
) -> None:
    run = begun(tmp_path, state)
    (agent,) = agents(run_folder)
    victims = [agent, *ranks(run_folder, run.rpartition("-")[0])]
    assert len(victims) > 2
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert not wait_until_gone(victims, 20)

    refused, listed = attached(tmp_path)
    assert refused.startswith(f"PoolError: the detached run {run} (Cell In[2] of kernel ")
    assert "was lost: the process that looked after it was killed. It was last seen on " in refused
    assert f"Its logs are in {tmp_path}/logs/{run}. It saved checkpoints into {tmp_path}/ckpt." in refused
    assert "lost" in listed
    assert "saved" in (tmp_path / "logs" / run / "rank0.log").read_text()


@pytest.mark.slow
def test_after_a_reboot_it_is_told_which_run_was_lost(tmp_path: Path, run_folder: Path, state: Path) -> None:
    """With the boot's identifier of another time, and without the folder of sockets."""
    run = begun(tmp_path, state)
    (agent,) = agents(run_folder)
    victims = [agent, *ranks(run_folder, run.rpartition("-")[0])]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert not wait_until_gone(victims, 20)
    for path in run_folder.iterdir():
        path.unlink()
    remembered = state / "detached" / f"{run}.json"
    remembered.write_text(json.dumps({**json.loads(remembered.read_text()), "boot": "an-earlier-one"}))

    refused, listed = attached(tmp_path)
    assert f"the detached run {run}" in refused
    assert "was lost: the machine has been rebooted since then. It was last seen on " in refused
    assert "lost" in listed
