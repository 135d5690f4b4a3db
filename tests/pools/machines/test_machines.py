"""Cells on machines that are started on demand: real kernels, and a cloud of one namespace of processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import psutil
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
    try:
        book.ok("%load_ext jupyter_distrib")
    except BaseException:
        book.close()
        raise
    return book


@pytest.fixture
def rented(tmp_path: Path, cloud: Cloud) -> Iterator[Notebook]:
    with opened(tmp_path, cloud, down_after="3s", price="36") as book:
        yield book


def record() -> Record:
    [(_, one)] = known()
    return one


def coordinator() -> int:
    """The newest one; a child of it that is about to be a command has its command line for a moment."""
    runtime, found = Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"]), {}
    for pid in agents(runtime):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if "jupyter_distrib.pools.command" in process.cmdline():
                found[pid] = process.ppid(), process.create_time()
    return max((began_s, pid) for pid, (parent, began_s) in found.items() if parent not in found)[1]


def kill(pids: Iterable[int]) -> None:
    """Kill them at the same moment: none of them sees that another has ended, and ends in order."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def ended(cloud: Cloud, limit_s: float = 30) -> bool:
    return wait_until(lambda: record().state == ENDED and not cloud.runs(), limit_s)


def test_a_cell_starts_the_machine_and_nobody_ends_it_while_cells_run(rented: Notebook, cloud: Cloud) -> None:
    first = rented.ok("%%distributed\nrank")
    assert first.result == "rank 0: 0\nrank 1: 1"
    rented.ok(
        dedent("""\
            %%distributed
            import time
            time.sleep(5)""")
    )
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
            dedent(f"""\
                %%distributed --detach
                import os, time
                while not os.path.exists({str(done)!r}):
                    time.sleep(0.1)""")
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
    rented.until("Waiting: `up` starts the machines", 30)
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
        kill(pids[killed])
        if killed == "coordinator":  # the cell asks another one for its ranks, which waits for the same `up`
            book.manager.interrupt_kernel()
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
        kill(pids[killed])
        if killed != "all":
            assert ended(cloud)
    if killed == "all":
        assert cloud.runs()
        with opened(tmp_path, cloud):
            assert ended(cloud)


def test_a_machine_that_is_gone_is_replaced(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud, status=str(cloud.folder / "status.sh"), reconnect="1") as book:
        book.ok("%%distributed\nrank")
        cloud.crash()
        assert wait_until(lambda: not cloud.runs(), 5)
        book.cell("%%distributed\nrank")
        assert book.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"
    assert cloud.calls("up") == ["up", "up"]


def test_at_most_ends_a_running_cell_with_the_reason(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud, at_most="40s") as book:
        failed = book.cell(
            dedent("""\
                %%distributed
                import time
                time.sleep(100)"""),
            timeout_s=100,
        )
        assert "at_most = 40s was over" in failed.text
        assert "these ranks reach the time limit in" in failed.text
    assert ended(cloud)


def test_a_machine_up_again_says_up(rented: Notebook, cloud: Cloud) -> None:
    cloud.fault("full")
    assert "no capacity in zone b" in rented.fails("%%distributed\nrank").text
    cloud.fault("full", on=False)
    assert rented.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"
    assert record().state == UP


def test_it_can_be_started_and_ended_by_hand_and_is_shown(rented: Notebook, cloud: Cloud, tmp_path: Path) -> None:
    assert "creating box" in rented.ok("%distributed_pool up rented").text or cloud.runs()
    assert cloud.calls() == ["up", "hosts"]
    pools = rented.ok("%distributed_pool").text
    assert "up for" in pools
    assert "until now" in pools
    shown = rented.ok("%distributed_status").text
    assert "3 s after the last use" in shown
    line = json.loads(rented.ok("%distributed_status --json").stdout.splitlines()[-1])
    assert (line["machines"], line["state"], line["hosts"]) == ("rented", "up", "box")
    assert line["cost"] == pytest.approx(line["elapsed_s"] / 100)  # 36 an hour
    doctor = rented.ok("%distributed_status --doctor").text
    assert "rented: up for" in doctor
    rented.ok("%%distributed --keep held\nheld = rank")
    settings = tmp_path / "config" / "jupyter_distrib" / "pools.toml"
    right = settings.read_text()
    settings.write_text(f"{right}[pools")
    assert "not valid TOML" in rented.fails("%distributed_pool up").text
    assert "rented: up for" in rented.ok("%distributed_status --doctor").text
    assert "ended, after" in rented.ok("%distributed_pool down rented\n%distributed_status").text
    assert not cloud.runs()
    settings.write_text(right)
    assert "has no machines that are up" in rented.fails("%distributed_pool down").text


def test_a_down_that_fails_is_shown_with_its_cost(rented: Notebook, cloud: Cloud) -> None:
    rented.ok("%distributed_pool up")
    cloud.fault("stuck")
    told = rented.fails("%distributed_pool down").text
    assert "`down` ended with status 4 (the API is away), so the machines may still be running" in told
    for look in ("%distributed_status", "%distributed_pool", "%distributed_status --doctor"):
        text = rented.ok(look).text
        assert "STILL RUNNING" in text
        assert "the API is away" in text
    assert "have cost 0." in rented.ok("%distributed_status").text
    assert "the API is away" in rented.fails("%%distributed\nrank").text
    cloud.fault("stuck", on=False)
    rented.ok("%distributed_pool down")
    assert not cloud.runs()
    assert rented.ok("%%distributed\nrank").result == "rank 0: 0\nrank 1: 1"


def test_machines_in_use_by_another_notebook_are_not_ended(tmp_path: Path, cloud: Cloud) -> None:
    with opened(tmp_path, cloud) as one, opened(tmp_path, cloud, nodes="1") as other:
        one.ok("%%distributed --keep held\nheld = rank")
        assert "in use by another notebook" in other.fails("%distributed_pool down").text
        assert one.ok("%%distributed\nheld").result == "rank 0: 0\nrank 1: 1"


def test_a_file_that_is_not_trusted_runs_nothing(tmp_path: Path, cloud: Cloud) -> None:
    with Notebook(tmp_path, {"XDG_STATE_HOME": str(tmp_path / "state")}) as book:
        (tmp_path / "jupyter_distrib.toml").write_text(f'pool = "rented"\n\n{cloud.settings()}')
        book.ok("%load_ext jupyter_distrib")
        for line in (
            "%%distributed --pool rented\nrank",
            "%distributed_pool up rented",
            "%distributed_pool down rented",
        ):
            assert "%distributed_pool trust" in book.fails(line).text
        assert cloud.calls() == []
        book.ok("%distributed_pool trust")
        book.ok("%distributed_pool up rented")
        assert cloud.calls() == ["up", "hosts"]


def test_up_alone_is_refused(notebook: Notebook, cloud: Cloud) -> None:
    line = f"%%distributed --pool command --ranks 1 --start 'env {{host}} {{python}}' --up {cloud.folder}/up.sh"
    assert "up needs down, the command that ends what it starts" in notebook.fails(f"{line} --hosts a\nrank").text
    assert "up needs the hosts that it starts" in notebook.fails(f"{line} --down true\nrank").text
    assert (
        "price is for machines that are started on demand: set up as well"
        in notebook.fails(
            "%%distributed --pool command --ranks 1 --start 'env {host} {python}' --hosts a --price 2\nrank"
        ).text
    )
    assert cloud.calls() == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"price": "lots"}, "--price must be the price of an hour, a number such as 24.5; got 'lots'"),
        ({"price": "nan"}, "--price must be the price of an hour"),
        ({"price": "-1"}, "--price must be the price of an hour"),
        ({"down_after": "soon"}, "--down-after must be a duration such as 90m, 2h or 1d12h; got 'soon'"),
        ({"at_most": "0m"}, "--at-most must be a duration"),
        ({"up_within": "20"}, "--up-within must be a duration"),
        ({"up": " "}, "--up needs a value"),
        ({"hosts": "a"}, "hosts and hosts_from exclude each other: leave one out"),
    ],
)
def test_wrong_options_are_one_sentence(notebook: Notebook, cloud: Cloud, options: dict[str, str], told: str) -> None:
    flags = " ".join(f"--{name.replace('_', '-')} {value!r}" for name, value in cloud.options(**options).items())
    assert told in notebook.fails(f"%%distributed --pool command --ranks 1 {flags}\nrank").text
    assert cloud.calls() == []
