"""Ranks in allocations of a real Slurm: the contract suite, refusals, the queue, and what is given back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib import testing
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.slurm import allocation
from jupyter_distrib.pools.slurm.pool import SlurmPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook
from tests.processes import wait_until
from tests.ray.conftest import write_trusted
from tests.slurm.bed import SlurmBed
from tests.wheels import environment, install, wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ON_ONE_NODE = ("gives_values_in_rank_order", "sets_torchruns_variables", "numbers_ranks_from_the_first")
SIZE = ("refuses_a_size", "chooses_a_size")


def pool(**options: str) -> SlurmPool:
    return SlurmPool(**{"python": sys.executable, "interface": "lo", **options})


@contextmanager
def client(**options: str) -> Iterator[PoolClient]:
    one = PoolClient(pool(**options))
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("check", testing.checks(detached=True), ids=lambda check: check.__name__)
def test_contract(check: testing.Check, bed: SlurmBed) -> None:
    more = {} if check.__name__ in (*ON_ONE_NODE, *SIZE) else {"nodes": "2"}
    check(lambda: pool(**({"nodes": "1"} if check.__name__ in ON_ONE_NODE else more)))


def test_ranks_are_on_the_nodes_of_an_allocation_that_is_given_back(bed: SlurmBed) -> None:
    with client(nodes="2") as one:
        group = one.group(2)
        assert one.run(group, "import socket\nsocket.gethostname()").values == {0: "n1", 1: "n2"}
        assert len(bed.jobs()) >= 1
        one.close_group(group)
    assert bed.left() == "", "nodes that are free stay for ten seconds"


def salloc() -> tuple[int, int]:
    """The salloc of the only allocation that a pool holds, and its coordinator."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (path / "cmdline").read_bytes()
            if line.startswith(b"salloc\0") and b"echo granted" in line:
                found.append((int(path.name), int((path / "stat").read_text().rpartition(")")[2].split()[1])))
    [only] = found
    return only


@pytest.mark.parametrize("killed", ["the kernel", "the coordinator", "the coordinator and salloc"])
def test_an_allocation_is_given_back_whoever_is_killed(bed: SlurmBed, tmp_path: Path, killed: str) -> None:
    assert bed.left() == ""
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', f"python = {sys.executable!r}", 'idle = "77"']
    write_trusted(tmp_path, "\n".join([*lines, ""]))
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.ok("%%distributed --ranks 1\nrank").result == "rank 0: 0"
        child, coordinator = salloc()
        of = {"the kernel": [book.pid], "the coordinator": [coordinator]}.get(killed, [child, coordinator])
        for pid in of:
            os.kill(pid, signal.SIGKILL)
        assert bed.left() == "", "nodes stay for ten seconds after their kernel"


def test_a_detached_run_holds_its_allocation_and_only_that_long(bed: SlurmBed, tmp_path: Path) -> None:
    assert bed.left() == ""
    flag = tmp_path / "flag"
    with client(idle="5") as one:
        source = dedent("""\
            import os, time
            while not os.path.exists(flag):
                time.sleep(0.01)""")
        run = one.start(one.group(1), source, inputs={"flag": str(flag)}, detached=True, label="train")
        one.wait(m.Started)
    with client(idle="5") as other:
        other.send(m.Attach(run=run))
        assert other.wait(m.Attached).label == "train"
        assert len(bed.jobs()) == 1
        flag.touch()
        other.finish(run, (0,))
    assert bed.left() == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "nowhere"}, "Slurm refuses these ranks: .*invalid partition specified: nowhere"),
        ({"gres": "gpu:5"}, r"Slurm refuses these ranks: .*(Invalid generic resource|Requested node config)"),
        ({"salloc": "--ntasks=64"}, r"Slurm (will never start job \d+ \(Partition|refuses these ranks: .*node)"),
        ({"salloc": "--nonsense"}, "Slurm refuses these ranks: unrecognized option '--nonsense'"),
        ({"salloc": "--no-shell"}, r"salloc gave job \d+ back at once"),
        ({"salloc": "echo hello"}, r"salloc gave job \d+ back at once"),
        (
            {"time": "99-0"},
            r"Slurm (will never start job \d+ \(Partition(TimeLimit|Config)|refuses these ranks: .*time limit)",
        ),
    ],
)
def test_options_that_slurm_does_not_take(bed: SlurmBed, options: dict[str, str], said: str) -> None:
    with client(**options) as one:
        refused = one.open(2)
        assert isinstance(refused, m.WorkerGroupRefused)
        assert re.match(said, refused.reason), refused.reason
    assert bed.left(10) == "", "nothing waits on"


def status(one: PoolClient) -> m.ServerStatus:
    one.send(m.Ask(question=7))
    return one.wait(m.Answered).status


def test_the_status_tells_nodes_holders_queue_and_the_next_rank(bed: SlurmBed) -> None:
    assert bed.left() == ""
    with client() as one:
        told = status(one)
        assert [(node.name, node.cpus, node.free_cpus) for node in told.nodes or ()] == [
            ("n1", 4.0, 4.0),
            ("n2", 4.0, 4.0),
        ]
        assert told.next_rank == "at once, on n1"
    command = ["salloc", "-N2", "--exclusive", "--job-name=theirs", "sh", "-c", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other, client(salloc="--comment=x") as one:
        assert wait_until(lambda: bed.output("squeue", "-h", "-o", "%T").split() == ["RUNNING"], 20)
        one.send(m.OpenWorkerGroup(group="waits", size=2, gpus=False, wait_s=60.0))
        one.wait(m.WorkerGroupQueued)
        told = status(one)
        assert [node.free_cpus for node in told.nodes or ()] == [0.0, 0.0]
        assert re.fullmatch(r"root: job \d+ \(theirs\)", (told.nodes or ())[0].holders[0])
        assert re.fullmatch(r"in .* at the latest, on n1, as Slurm estimates; 1 job waits", told.next_rank), (
            told.next_rank
        )
        assert [(each.ranks, "is queued in Slurm" in each.reason) for each in told.waiting] == [(2, True)]
        other.communicate(b"")


def test_nodes_that_are_free_make_room_for_another_notebook(bed: SlurmBed) -> None:
    """They would stay for as long as the other one waits."""
    with client(nodes="2") as one:
        one.close_group(one.group(8))
        assert bed.jobs(), "the nodes are held"
        with client(nodes="2") as other:
            assert len(other.group(8).workers) == 8


def test_a_job_for_another_partition_takes_no_nodes_from_this_one(bed: SlurmBed) -> None:
    assert bed.left() == ""
    queued = []
    with bed.job("--partition=main", "--nodelist=n1", "--exclusive") as own, bed.job("--nodelist=n2", "--exclusive"):
        for partition, node, is_wanted in (("side", "n2", False), ("main", "n1", True)):
            asked = [
                "sbatch",
                f"--partition={partition}",
                f"--nodelist={node}",
                "--exclusive",
                "--wrap=true",
                "-o/dev/null",
            ]
            queued.append(bed.output(*asked).split()[-1])
            assert wait_until(lambda: bed.output("squeue", "-h", f"-j{queued[-1]}", "-o%r").strip() == "Resources", 20)
            assert allocation.is_another_queued(own["SLURM_JOB_ID"]) == is_wanted
        for job in queued:
            bed.output("scancel", job)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ({"constraint": "fast"}, {"n2"}),
        ({"account": "physics", "qos": "normal"}, {"n1", "n2"}),
        ({"salloc": "--reservation=course"}, {"n2"}),
        ({"salloc": "-w n1 : --ntasks=1 -w n2"}, {"n1", "n2"}),  # a heterogeneous job
    ],
)
def test_options_of_salloc_go_through(bed: SlurmBed, options: dict[str, str], hosts: set[str]) -> None:
    assert bed.left() == ""
    if "reservation" in options.get("salloc", ""):
        of = ["reservationname=course", "starttime=now", "duration=30", "user=root", "nodes=n2"]
        assert bed.output("scontrol", "create", *of)
    try:
        with client(**options) as one:
            one.send(m.OpenWorkerGroup(group="g", size=2, gpus=False, wait_s=60.0))
            group = one.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
            assert isinstance(group, m.WorkerGroupOpened), group
            values = one.run(group, "import socket\nsocket.gethostname()").values
            assert set(values.values()) <= hosts, values
            one.close_group(group)
    finally:
        assert bed.left() == ""
        bed.output("scontrol", "delete", "reservationname=course")


def test_in_a_heterogeneous_job_ranks_are_on_all_of_its_nodes(bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bed.left() == ""
    with bed.job("--ntasks=1", "-wn1", ":", "--ntasks=1", "-wn2") as variables:
        monkeypatch.setenv("SLURM_JOB_ID", variables["SLURM_JOB_ID"])
        with client(nodes="2") as one:
            group = one.group(2)
            assert one.run(group, "import socket\nsocket.gethostname()").values == {0: "n1", 1: "n2"}


def test_in_a_job_of_an_array_its_own_node_is_used(bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last job of an array has the number of the array."""
    assert bed.left() == ""
    array = bed.output("sbatch", "--array=1-2", "--exclusive", "--nodes=1", "-o/dev/null", "--wrap=sleep 300").split()[
        -1
    ]
    assert wait_until(lambda: bed.output("squeue", "-h", "-o%T").split() == ["RUNNING"] * 2, 30)
    try:
        for line in bed.output("squeue", "-h", "-o%A %N").splitlines():
            job, node = line.split()
            monkeypatch.setenv("SLURM_JOB_ID", job)
            assert allocation.notebooks_job(job, 0.0, str, threading.Event()).nodes == (node,)
            assert allocation.seconds_left(job)
            with client() as one:
                group = one.group(2)
                assert one.run(group, "import socket\nsocket.gethostname()").values == {0: node, 1: node}
    finally:
        bed.output("scancel", array)


def test_a_queue_is_reported_and_waited_for(bed: SlurmBed) -> None:
    with subprocess.Popen(["salloc", "-N2", "--exclusive", "sh", "-c", "cat"], stdin=subprocess.PIPE) as other:
        assert wait_until(lambda: bed.output("squeue", "-h", "-o", "%T").split() == ["RUNNING"], 20)
        with client() as one:
            refused = one.open(2)
            assert isinstance(refused, m.WorkerGroupRefused)
            assert "is queued in Slurm (Resources" in refused.reason, refused.reason
            one.send(m.OpenWorkerGroup(group="waits", size=2, gpus=False, wait_s=60.0))
            queued = one.wait(m.WorkerGroupQueued)
            assert "is queued in Slurm" in queued.reason
            other.communicate(b"")
            opened = one.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
            assert isinstance(opened, m.WorkerGroupOpened), opened
            one.close_group(opened)


def test_a_job_that_is_cancelled_ends_the_cell_with_slurms_words(bed: SlurmBed) -> None:
    with client(nodes="2") as one:
        group = one.group(2)
        thread = one.when(m.Started, lambda _: [bed.output("scancel", job) for job in bed.jobs()])
        one.run(
            group,
            dedent("""\
                import time
                while True:
                    time.sleep(0.01)"""),
        )
        thread.join(60)
        reason = one.wait(m.WorkerGroupClosed).reason
        assert re.match(r"node n\d was lost: job \d+ was cancelled: its connection has ended \(", reason), reason


def test_a_node_that_fails_is_named_as_such(bed: SlurmBed) -> None:
    with client(nodes="2") as one:
        group = one.group(2)
        down = ("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        try:
            thread = one.when(m.Started, lambda _: bed.output(*down))
            one.run(
                group,
                dedent("""\
                    import time
                    while True:
                        time.sleep(0.01)"""),
            )
            thread.join(60)
            assert re.search(r"was lost: job \d+ has lost a node: ", reason := one.wait(m.WorkerGroupClosed).reason), (
                reason
            )
        finally:
            bed.output("scontrol", "update", "nodename=n2", "state=resume")


def sruns(node: str) -> dict[int, int]:
    """The sruns that reach a node, with their parents: each has a helper, which ends the step when srun is killed."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"--nodelist={node}".encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def test_an_srun_that_is_killed_is_replaced_and_the_ranks_go_on(bed: SlurmBed, tmp_path: Path) -> None:
    with client(nodes="2") as one:
        group = one.group(2)
        source = dedent("""\
            import os, time
            print('entered', flush=True)
            while not os.path.exists(flag):
                time.sleep(0.01)
            os.getpid()""")
        run = one.start(group, source, inputs={"flag": str(tmp_path / "flag")})
        while not isinstance(one.seen.get(timeout=60), m.Wrote):
            pass
        before = sruns("n2")
        for pid in sorted(before, key=lambda pid: before[pid] not in before):  # the helper first
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: set(sruns("n2")) - set(before), 20)
        (tmp_path / "flag").touch()
        outcome = one.finish(run, (0, 1))
        assert outcome.of(m.Exited) == []
        assert outcome.values == {worker.rank: worker.pid for worker in group.workers}
        one.close_group(group)
    assert bed.left() == ""


def preempt(bed: SlurmBed) -> None:
    """Have a more urgent job take both nodes for a moment. Slurm may need more than a minute until they are free, since
    it repeats a message to a node that got lost only then."""
    urgent = ["salloc", "--partition=urgent", "--nodes=2", "--exclusive", "true"]
    subprocess.run(urgent, env={**os.environ, **bed.environment}, capture_output=True, timeout=150, check=True)


@pytest.mark.timeout(500)  # see `preempt`
def test_a_job_that_is_preempted_is_reported_and_with_restarts_the_cell_goes_on_in_another(
    bed: SlurmBed, tmp_path: Path
) -> None:
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', f"python = {sys.executable!r}", "nodes = 2"]
    write_trusted(tmp_path, "\n".join([*lines, 'interface = "lo"', ""]))
    waits = dedent("""\
        import os, time
        print('entered', flush=True)
        while not os.path.exists(flag):
            time.sleep(0.01)
        rank""")
    with Notebook(tmp_path) as book:
        book.ok(f"%load_ext jupyter_distrib\nflag = {str(tmp_path / 'flag')!r}")
        book.start(f"%%distributed --ranks 2\n{waits}")
        book.until("entered")
        preempt(bed)
        outcome = book.finish(150)
        assert re.search(r"node n\d was lost: job \d+ was preempted by another one: ", outcome.traceback), outcome.text
        book.start(f"%%distributed --ranks 2 --max-restarts 2 --wait 200\n{waits}")
        book.until("entered")
        preempt(bed)
        (tmp_path / "flag").touch()
        outcome = book.finish(200)
        assert outcome.status == "ok", outcome.text
        assert "ranks 0-1" in outcome.result or "rank 1: 1" in outcome.result, outcome.result
    assert bed.left() == ""


def test_an_idle_allocation_is_given_back_in_time(bed: SlurmBed, tmp_path: Path) -> None:
    """Five seconds after the cell, and two in which the ranks leave."""
    assert bed.left() == ""
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', f"python = {sys.executable!r}", "idle = 5"]
    write_trusted(tmp_path, "\n".join([*lines, 'interface = "lo"', ""]))
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        for _ in range(2):
            before = bed.all_jobs()
            book.ok(
                dedent("""\
                    %%distributed --ranks 2
                    import torch, torch.distributed as dist
                    x = torch.ones(1000)
                    x.sum()""")
            )
            assert bed.left(12) == ""
            assert len(bed.all_jobs() - before) == 1


def test_a_time_limit_that_is_near_is_reported(bed: SlurmBed) -> None:
    with client(nodes="1", time="4") as one:
        group = one.group(1)
        [note] = one.run(group, "1").of(m.Noted)
        assert re.fullmatch(r"these ranks reach the time limit in 3 min \d+ s: save your work.", note.text), note.text
        one.close_group(group)


def test_while_the_controller_is_away_cells_go_on_and_new_ranks_are_refused(bed: SlurmBed) -> None:
    with client(nodes="2") as one:
        group = one.group(2)
        with bed.controller_away():
            assert one.run(group, "rank + 1").values == {0: 1, 1: 2}
            refused = one.open(1)
            assert isinstance(refused, m.WorkerGroupRefused)
            assert re.match("Slurm (does not answer|was asked for nodes and does not answer)", refused.reason), (
                refused.reason
            )
        assert wait_until(lambda: len(bed.jobs()) == 1, 40), "a request that arrived late is no job that stays"
        assert one.run(group, "rank").values == {0: 0, 1: 1}
        one.close_group(group)
        again = one.group(1)
        one.close_group(again)


def test_a_job_of_the_notebook_that_has_ended(bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99999")
    with client() as one:
        refused = one.open(2)
        assert isinstance(refused, m.WorkerGroupRefused)
        assert refused.reason.startswith("SLURM_JOB_ID names job 99999, which Slurm does not know any more")


def test_in_a_job_its_nodes_are_used_and_not_given_back(bed: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bed.jobs()  # nodes that a worker group has given back stay for ten seconds
    command = ["salloc", "-N2", "sh", "-c", "echo $SLURM_JOB_ID $SLURM_JOB_NODELIST; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None
        job, nodes = own.stdout.readline().split()
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        with client(nodes="2") as one:
            group = one.group(4)
            values = one.run(group, "import os, socket\n(socket.gethostname(), os.environ['SLURM_JOB_ID'])").values
            assert values == {0: ("n1", job), 1: ("n1", job), 2: ("n2", job), 3: ("n2", job)}
            one.close_group(group)
        assert set(bed.jobs()) - {*before} == {job}
        own.communicate("")


def test_nodes_get_the_packages_that_they_lack(bed: SlurmBed, tmp_path: Path) -> None:
    _, packages = environment(tmp_path / "env")
    install(wheel(tmp_path, "tinypkg", "1.2"), packages)
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', "nodes = 2", "ranks = 2", 'environment = "sync"']
    write_trusted(tmp_path, "\n".join([*lines, f"python = {sys.executable!r}", 'interface = "lo"', ""]))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Notebook(tmp_path, env, python=str(tmp_path / "env" / "bin" / "python")) as book:
        book.ok("%load_ext jupyter_distrib")
        outcome = book.cell(
            dedent("""\
                %%distributed
                import socket, tinypkg
                (socket.gethostname(), tinypkg.version)"""),
            timeout_s=100,
        )
        assert outcome.result == "rank 0: ('n1', '1.2')\nrank 1: ('n2', '1.2')", outcome.text
        assert "being installed: tinypkg 1.2" in outcome.text
        status = book.ok("%distributed_status").result
        assert re.search(
            r"^n1 +4, \d free .* root: job \d+ \(jupyter_distrib [^)]*\) +cluster$", status, re.MULTILINE
        ), status


STRAY = {
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_MEM_PER_NODE": "2000",
    "SRUN_CPUS_PER_TASK": "8",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_EXCLUSIVE": "1",
    "SALLOC_PARTITION": "nowhere",
    "SQUEUE_FORMAT": "%i",
    "SINFO_FORMAT": "%N",
}
"""What another job, its script or a profile may have left in the environment of a notebook."""


def lab(folder: Path) -> None:
    lines = [
        'pool = "cluster"',
        "[pools.cluster]",
        'kind = "slurm"',
        f"python = {sys.executable!r}",
        'interface = "lo"',
    ]
    write_trusted(folder, "\n".join([*lines, ""]))


def test_variables_of_other_jobs_change_nothing(bed: SlurmBed, tmp_path: Path) -> None:
    lab(tmp_path)
    with Notebook(tmp_path, STRAY) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


def test_a_job_that_is_named_by_its_id_alone_is_used_and_one_that_has_ended_is_refused(
    bed: SlurmBed, tmp_path: Path
) -> None:
    """As by ssh into a job; and in a terminal that outlives its job."""
    lab(tmp_path)
    with bed.job("--nodes=2", "--ntasks-per-node=1") as variables:
        job = variables["SLURM_JOB_ID"]
        with Notebook(tmp_path, {"SLURM_JOB_ID": job}) as book:
            book.ok("%load_ext jupyter_distrib")
            cell = dedent("""\
                %%distributed --ranks 2
                import os
                os.environ['SLURM_JOB_ID']""")
            said = book.ok(cell).result
            assert said == f"ranks 0-1: '{job}'"
    with Notebook(tmp_path, {"SLURM_JOB_ID": job}) as book:
        book.ok("%load_ext jupyter_distrib")
        refused = book.fails("%%distributed --ranks 2\nrank").evalue
        assert refused.startswith(f"SLURM_JOB_ID names job {job}, which "), refused
        book.ok("import os\ndel os.environ['SLURM_JOB_ID']")
        assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


@pytest.mark.timeout(500)  # see `preempt`
def test_a_job_of_the_notebook_that_is_requeued_is_waited_for_and_the_cell_goes_on(
    bed: SlurmBed, tmp_path: Path
) -> None:
    """The notebook is outside the job, which a more urgent one drives from its nodes; Slurm then starts it again."""
    assert bed.left() == ""
    own = ["sbatch", "--requeue", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    job = bed.output(*own).split()[-1]
    assert wait_until(lambda: bed.output("squeue", "-h", f"-j{job}", "-o%T").strip() == "RUNNING", 30)
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', f"python = {sys.executable!r}", "nodes = 2"]
    write_trusted(tmp_path, "\n".join([*lines, 'interface = "lo"', ""]))
    waits = dedent("""\
        import os, time
        print('entered', flush=True)
        while not os.path.exists(flag):
            time.sleep(0.01)
        rank""")
    try:
        with Notebook(tmp_path, {"SLURM_JOB_ID": job}) as book:
            book.ok(f"%load_ext jupyter_distrib\nflag = {str(tmp_path / 'flag')!r}")
            book.start(f"%%distributed --ranks 2 --max-restarts 1 --wait 200\n{waits}")
            book.until("entered", 60)
            preempt(bed)
            assert wait_until(lambda: bed.output("squeue", "-h", f"-j{job}", "-o%T").strip() == "PENDING", 30)
            with pytest.raises(PoolError, match=rf"job {job}, which SLURM_JOB_ID names, is queued in Slurm.*--wait S"):
                allocation.notebooks_job(job, 0.0, str, threading.Event())
            assert allocation.end_of(job) == f"job {job} was taken from its nodes and is queued again"
            bed.output("scontrol", "update", f"JobId={job}", "StartTime=now")
            (tmp_path / "flag").touch()
            outcome = book.finish(200)
        assert outcome.status == "ok", outcome.text
        assert "attempt 2 of 2" in outcome.view
    finally:
        bed.output("scancel", job)
