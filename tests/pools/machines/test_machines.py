"""Cells on machines that are started on demand: real kernels, and a cloud of one namespace of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.pools.machines.record import ENDED, STARTING, UP, Record, known
from tests.notebook import Notebook
from tests.pools.machines.cloud import Cloud, needs_namespaces
from tests.processes import agents, wait_until

pytestmark = [pytest.mark.slow, needs_namespaces]


def opened(folder: Path, cloud: Cloud, **options: str) -> Notebook:
    """A notebook whose user has this pool, in the file of the user."""
    config = folder / "config" / "jupyter_distrib" / "pools.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f'pool = "rented"\n\n{cloud.settings(**options)}ranks = 2\n')
    book = Notebook(folder, {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_STATE_HOME": str(folder / "state")})
    assert book.cell("%load_ext jupyter_distrib").status == "ok"
    return book


@pytest.fixture
def rented(tmp_path: Path, cloud: Cloud) -> Iterator[Notebook]:
    with opened(tmp_path, cloud, down_after="3s", price="36") as book:
        yield book


def record() -> Record:
    [(_, one)] = known()
    return one


def coordinator() -> int:
    runtime = Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"])
    return max(pid for pid in agents(runtime) if b"pools.command" in Path(f"/proc/{pid}/cmdline").read_bytes())


def ended(cloud: Cloud, limit_s: float = 30) -> bool:
    return wait_until(lambda: record().state == ENDED and not cloud.runs(), limit_s)


def test_a_cell_starts_the_machine_and_nobody_ends_it_while_cells_run(rented: Notebook, cloud: Cloud) -> None:
    first = rented.ok("%%distributed\nrank")
    assert first.result == "rank 0: 0\nrank 1: 1"
    assert "Waiting: `up` starts the machines" in first.text
    rented.ok("%%distributed\nimport time\ntime.sleep(5)")
    assert cloud.calls() == ["up", "hosts"]
    assert ended(cloud)
    assert rented.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"
    assert cloud.calls("up") == ["up", "up"]


def test_kept_values_hold_it(rented: Notebook, cloud: Cloud) -> None:
    rented.ok("%%distributed --keep held\nheld = rank")
    assert not wait_until(lambda: "down" in cloud.calls(), 6)
    rented.ok("del held")
    assert ended(cloud)


def test_looking_starts_nothing(rented: Notebook, cloud: Cloud) -> None:
    for line in (
        "%distributed_status", "%distributed_status --json", "%distributed_status --doctor", "%distributed_pool",
        "%distributed_pool use rented", "%%distributed --dry-run\nrank",
    ):  # fmt: skip
        rented.cell(line)
    assert cloud.calls() == []
    assert list(known()) == []


def test_it_is_held_through_a_restart_of_the_kernel(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud, down_after="30s") as book:
        book.ok("%%distributed\nrank")
    with opened(tmp_path, cloud, down_after="30s") as book:
        assert book.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"
    assert cloud.calls() == ["up", "hosts"]


def test_a_detached_run_holds_it(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud, down_after="1s") as book:
        done = tmp_path / "done"
        book.ok(
            f"%%distributed --detach\nimport os, time\nwhile not os.path.exists({str(done)!r}):\n    time.sleep(0.1)"
        )
    assert not wait_until(lambda: "down" in cloud.calls(), 5)
    done.touch()
    assert ended(cloud)


def test_two_notebooks_share_it(tmp_path: Path, cloud: Cloud) -> None:
    (tmp_path / "other").mkdir()
    with opened(tmp_path, cloud) as one, opened(tmp_path, cloud, nodes="1") as other:
        one.start("%%distributed\nrank")
        other.start("%%distributed\nrank")
        assert one.finish().result == other.finish().result == "rank 0: 0\nrank 1: 1"
    assert cloud.calls() == ["up", "hosts"]


def test_stop_while_up_runs_ends_it_and_calls_down(rented: Notebook, cloud: Cloud) -> None:
    cloud.fault("hang")
    rented.start("%%distributed\nrank")
    assert wait_until(lambda: bool(list(known())) and record().up_pid > 0, 30)
    rented.manager.interrupt_kernel()
    assert rented.finish().status == "error"
    assert wait_until(lambda: "down" in cloud.calls(), 20)


@pytest.mark.parametrize("killed", ["kernel", "coordinator", "both", "all"])
def test_whoever_is_killed_while_up_runs_nothing_is_left(tmp_path: Path, cloud: Cloud, killed: str) -> None:
    cloud.fault("hang")
    with opened(tmp_path, cloud) as book:
        book.start("%%distributed\nrank")
        assert wait_until(lambda: bool(list(known())) and record().up_pid > 0, 30)
        pids = {"kernel": [book.pid], "coordinator": [coordinator()]}
        pids["both"] = pids["kernel"] + pids["coordinator"]
        pids["all"] = [record().keeper, *pids["both"]]
        for pid in pids[killed]:
            os.kill(pid, signal.SIGKILL)
        if killed != "all":
            assert wait_until(lambda: "down" in cloud.calls(), 20)
    if killed == "all":
        assert record().state == STARTING
        with opened(tmp_path, cloud):  # the next notebook finds it
            assert wait_until(lambda: "down" in cloud.calls(), 20)


@pytest.mark.parametrize("killed", ["kernel", "coordinator", "both", "all"])
def test_whoever_is_killed_while_it_is_up_it_is_ended(tmp_path: Path, cloud: Cloud, killed: str) -> None:
    with opened(tmp_path, cloud, down_after="2s") as book:
        book.ok("%%distributed --keep held\nheld = rank")
        pids = {"kernel": [book.pid], "coordinator": [coordinator()]}
        pids["both"] = pids["kernel"] + pids["coordinator"]
        pids["all"] = [record().keeper, *pids["both"]]
        for pid in pids[killed]:
            os.kill(pid, signal.SIGKILL)
        if killed != "all":
            assert ended(cloud)
    if killed == "all":
        assert cloud.runs()
        with opened(tmp_path, cloud):
            assert ended(cloud)


def test_a_machine_that_is_gone_is_replaced(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud, status=str(cloud.folder / "status.sh")) as book:
        book.ok("%%distributed\nrank")
        cloud.crash()
        assert wait_until(lambda: not cloud.runs(), 5)
        book.cell("%%distributed\nrank")
        assert book.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"
    assert cloud.calls("up") == ["up", "up"]


def test_at_most_ends_a_running_cell_with_the_reason(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud, at_most="15s") as book:
        failed = book.fails("%%distributed\nimport time\ntime.sleep(60)")
        assert "at_most = 15s was over" in failed.text
        assert "the time limit ends these ranks in" in failed.text
    assert ended(cloud)


def test_a_machine_up_again_says_up(rented: Notebook, cloud: Cloud) -> None:
    cloud.fault("full")
    assert "no capacity in zone b" in rented.fails("%%distributed\nrank").text
    cloud.fault("full", on=False)
    assert rented.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"
    assert record().state == UP
