"""The agent as a process: how it starts, however many want it at once; how it ends; and who may talk to it."""

from __future__ import annotations

import ast
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_distrib.agent.server import Agent
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools import server_home
from jupyter_distrib.pools.local import LocalPool
from jupyter_distrib.system import control_groups
from jupyter_distrib.system.launch import exec_agent
from jupyter_distrib.testing import PoolClient, pool_client
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link, encode
from tests.notebook import ROOT
from tests.processes import agents, is_alive, listeners, ranks, tree, wait_until, wait_until_gone

pytestmark = pytest.mark.slow  # kernels and agents come and go


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test's own, so that its agents are nobody else's."""
    path = Path(tempfile.mkdtemp(prefix="jd-agent-"))
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(path))
    yield path
    _remove(path)


def _remove(path: Path) -> None:
    found = agents(path)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until_gone(found)
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """The same for tests that leave their agent as they found it."""
    path = Path(tempfile.mkdtemp(prefix="jd-agent-"))
    yield path
    _remove(path)


@pytest.fixture
def client(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolClient]:
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(shared))
    one = PoolClient(LocalPool())
    yield one
    one.close()


def python(program: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def agent_of(client: PoolClient) -> int:
    client.send(m.Ask(question=1))
    return client.wait(m.Answered).status.pid


def socket_of(client: PoolClient, folder: Path) -> Path:
    """An agent's last argument is its name. There are several of them if somebody edits the sources meanwhile."""
    words = (Path("/proc") / str(agent_of(client)) / "cmdline").read_text().split("\0")
    return folder / f"{words[-2]}.sock"


# ---------------------------------------------------------------------------------------------------- starting


def test_many_kernels_that_start_at_once_share_one_agent(folder: Path) -> None:
    """F33: at the same moment."""
    program = """
    import sys
    from jupyter_distrib.pools.local import LocalPool
    from jupyter_distrib.testing import PoolClient
    print("ready", flush=True); sys.stdin.readline()
    client = PoolClient(LocalPool())
    from jupyter_distrib.wire.messages import Answered, Ask
    client.send(Ask(question=1))
    print(client.wait(Answered).status.pid)
    client.close()
    """
    kernels = [python(program, stdin=subprocess.PIPE) for _ in range(10)]
    for kernel in kernels:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "ready\n"
    outputs = []
    for kernel in kernels:
        assert kernel.stdin is not None
        kernel.stdin.write("go\n")
        kernel.stdin.flush()
    outputs = [kernel.communicate(timeout=50)[0].strip() for kernel in kernels]
    assert len(set(outputs)) == 1, outputs
    assert agents(folder) == [int(outputs[0])]


def test_a_stale_socket_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / f"agent-{server_home.fingerprint()}.sock"))
    client = PoolClient(LocalPool())
    assert client.run(client.group(1), "rank").values == {0: 0}
    client.close()


def test_an_agent_killed_while_ranks_start_is_said_and_replaced(folder: Path) -> None:
    client = PoolClient(LocalPool())
    client.send(m.OpenWorkerGroup(group="c", size=2, gpus=False))
    (agent,) = agents(folder)
    family = tree(agent)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: client.lost, 5)
    assert client.lost == ["the agent that looks after the ranks has ended"]
    client.close()
    assert wait_until_gone(family, 3) == []
    again = PoolClient(LocalPool())
    assert again.run(again.group(1), "rank").values == {0: 0}
    again.close()


def test_a_killed_agent_takes_its_ranks_along(folder: Path) -> None:
    client = PoolClient(LocalPool())
    group = client.group(2)
    (agent,) = agents(folder)
    family = tree(agent)
    assert {worker.pid for worker in group.workers} <= set(family)
    os.kill(agent, signal.SIGKILL)
    assert wait_until_gone(family, 3) == []
    client.close()


def test_a_kernel_that_goes_while_its_ranks_start_leaves_none(folder: Path) -> None:
    for _ in range(5):
        client = PoolClient(LocalPool())
        client.send(m.OpenWorkerGroup(group=f"{client.session}-c1", size=3, gpus=False))
        client.close()
        deadline = time.monotonic() + 10
        last = PoolClient(LocalPool())
        last.group(1)
        last.close()
        assert wait_until(lambda: not ranks(folder, client.session), deadline - time.monotonic())  # noqa: B023 - asked at once


def test_a_killed_kernel_takes_its_ranks_along(folder: Path, tmp_path: Path) -> None:
    """Although a child of it holds the link open."""
    program = """
    import os, time, warnings
    from jupyter_distrib.pools.local import LocalPool
    from jupyter_distrib.testing import PoolClient
    client = PoolClient(LocalPool())
    group = client.group(2)
    warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    print(child, *(worker.pid for worker in group.workers), flush=True)
    time.sleep(60)
    """
    kernel = python(program)
    assert kernel.stdout is not None
    child, *ranks = map(int, kernel.stdout.readline().split())
    kernel.kill()
    kernel.wait()
    assert wait_until_gone(ranks, 2) == []
    assert is_alive(child)
    os.kill(child, signal.SIGKILL)
    kernel.stdout.close()


def test_the_next_agent_ends_what_one_that_was_killed_with_its_kernel_has_left(folder: Path) -> None:
    program = """
    import time
    from jupyter_distrib.pools.local import LocalPool
    from jupyter_distrib.testing import PoolClient
    client = PoolClient(LocalPool())
    source = "import os, subprocess, time\\nforked = os.fork()\\nif not forked:\\n    os.setsid()\\n    time.sleep(600)\\n"
    source += "subprocess.Popen(['setsid', 'sleep', '600']).pid, forked"
    print(*client.run(client.group(1), source).values[0], flush=True)
    time.sleep(60)
    """
    kernel = python(program)
    assert kernel.stdout is not None
    children = [int(pid) for pid in kernel.stdout.readline().split()]
    (agent,) = agents(folder)
    os.kill(kernel.pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    wait_until_gone([agent])
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    assert [is_alive(pid) for pid in children] == [True, True]

    client = PoolClient(LocalPool())
    assert wait_until_gone(children, 3) == []
    client.close()


def test_torch_that_cannot_be_imported_is_said_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next attempt works after the repair."""
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    client = PoolClient(LocalPool())
    for _ in range(2):
        began_s = time.monotonic()
        refused = client.open(2)
        assert isinstance(refused, m.WorkerGroupRefused)
        assert "libcudart.so.13: cannot open shared object file" in refused.reason
        assert time.monotonic() - began_s < 5
    shutil.rmtree(broken)
    group = client.group(2)
    assert client.run(group, "rank").values == {0: 0, 1: 1}
    client.close()


def test_a_forkserver_that_is_killed_is_replaced(client: PoolClient, shared: Path) -> None:
    group = client.group(1)
    agent = agent_of(client)
    ranks = {worker.pid for worker in group.workers}
    for pid in set(tree(agent)) - ranks - {agent}:
        os.kill(pid, signal.SIGKILL)
    assert client.run(group, "rank").values == {0: 0}, "ranks do not need it"
    opened = client.open(2)
    if isinstance(opened, m.WorkerGroupRefused):  # the order was on its way to the one that died
        assert opened.reason.endswith("try again.")
        opened = client.group(2)
    assert client.run(opened, "rank").values == {0: 0, 1: 1}


@pytest.mark.slow
def test_a_hundred_ranks_start(client: PoolClient) -> None:
    """More than one message can carry descriptors for."""
    with testing_limit(120):
        group = client.group(100)
    assert client.run(group, "rank").values == {rank: rank for rank in range(100)}
    client.close_group(group)


class testing_limit:
    """Patience for what is slow on a small machine."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        self._before, pool_client.LIMIT_S = pool_client.LIMIT_S, self._limit_s

    def __exit__(self, *_: object) -> None:
        pool_client.LIMIT_S = self._before


def test_a_rank_that_returns_as_it_is_killed_is_gone_for_that_run_and_not_for_the_next(
    client: PoolClient, tmp_path: Path
) -> None:
    flag, returned = tmp_path / "flag", tmp_path / "returned"
    group = client.group(2)
    run = client.start(
        group,
        textwrap.dedent(f"""\
            import os, threading, time
            while not os.path.exists({str(flag)!r}):
                time.sleep(0.01)
            if rank == 0:
                threading.Timer(0.5, open, ({str(returned)!r}, 'w')).start()"""),
    )
    while not isinstance(client.seen.get(timeout=pool_client.LIMIT_S), m.Started):
        pass
    agent = agent_of(client)
    os.kill(agent, signal.SIGSTOP)  # the order to kill reaches it together with the news that the ranks have returned
    try:
        client.send(m.Stop(run=run, force=True))
        flag.touch()
        assert wait_until(returned.exists)
    finally:
        os.kill(agent, signal.SIGCONT)

    client.finish(run, (0, 1))  # each rank has one end: it has returned, or is gone, whichever the agent has read first
    assert client.run(group, "rank").values == {0: 0, 1: 1}
    client.close_group(group)


def test_the_loss_of_an_idle_rank_is_reported_before_it_is_replaced_if_other_nodes_must_meet_it(
    client: PoolClient,
) -> None:
    """So that the next cell waits for all to meet anew."""
    group = client.group(2, world_size=4)
    os.kill(group.workers[1].pid, signal.SIGKILL)
    changed = client.wait(m.WorkerGroupChanged)
    assert (changed.lost, changed.workers[1].state) == ((1,), "starting")
    changed = client.wait(m.WorkerGroupChanged)
    assert (changed.lost, changed.workers[1].state) == ((1,), "idle")
    assert changed.workers[1].pid != group.workers[1].pid
    client.close_group(group)
    assert client.wait(m.RanksLeft).group == group.group, "the coordinator waits for it"
    assert not any(is_alive(worker.pid) for worker in changed.workers)


def test_no_preloaded_forkserver_is_made_for_ranks_that_are_not_exchanged(folder: Path) -> None:
    """Those of a worker group that spans nodes, whose group the others are in."""

    def forkserver(client: PoolClient) -> str:
        client.send(m.Ask(question=1))
        return client.wait(m.Answered).status.state

    client, other = PoolClient(LocalPool()), PoolClient(LocalPool())
    client.group(1)
    assert forkserver(client) == "forkserver ready (still importing)"
    other.group(1, world_size=2)
    assert forkserver(other) == "forkserver ready"
    other.close()
    client.close()


def test_a_rank_that_leaves_finishes_what_its_cells_have_left_to_do_and_nothing_of_torch(
    client: PoolClient, tmp_path: Path
) -> None:
    group = client.group(1)
    source = f"""
    import atexit, pathlib, sys, weakref
    of_libraries = len(weakref.finalize._registry)
    weakref.finalize(sys, pathlib.Path({str(tmp_path / "finalized")!r}).touch)
    atexit.register(pathlib.Path({str(tmp_path / "at exit")!r}).touch)
    of_libraries"""
    assert client.run(group, textwrap.dedent(source)).values == {0: 0}
    client.close_group(group)
    assert wait_until(lambda: {path.name for path in tmp_path.iterdir()} == {"finalized", "at exit"}, 10)


def test_load_time_variables_get_ranks_of_their_own(client: PoolClient) -> None:
    """Read when a program loads, so the ranks are exec'd."""
    group = client.group(2, load_env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "3"})
    env = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "3"}
    source = textwrap.dedent("""\
        import os, torch
        print('exec', rank)
        (hash('a'), torch.get_num_threads(), rank, os.environ['PYTHONHASHSEED'])""")
    outcome = client.run(group, source, env=env)
    assert outcome.text(1) == "exec 1\n"
    assert outcome.values[0][:2] == outcome.values[1][:2]
    expected = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome.values[0][0] == int(expected.stdout)
    assert [value[1:] for value in outcome.values.values()] == [(3, 0, "7"), (3, 1, "7")]
    assert client.run(group, "1 / 0", env=env).of(m.Failed)[0].failure.type_name == "ZeroDivisionError"
    pids = [worker.pid for worker in group.workers]
    client.close_group(group)
    assert wait_until_gone(pids, 3) == []


def test_ranks_hash_texts_alike_so_that_their_sets_have_one_order(client: PoolClient) -> None:
    """Ranks on several machines, or that are programs of their own, would number the classes of `set(labels)` each in
    another way."""
    source = "import os\n(hash('a'), list({'cat', 'dog', 'bird', 'fish'}), 'PYTHONHASHSEED' in os.environ)"
    program = "print((hash('a'), list({'cat', 'dog', 'bird', 'fish'}), False))"
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    expected = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    for load_env in ({}, {"OMP_NUM_THREADS": "3"}):
        outcome = client.run(client.group(2, load_env=load_env), source, env={})
        assert outcome.values == dict.fromkeys(range(2), ast.literal_eval(expected.stdout))


def test_a_program_that_cannot_start_is_said(client: PoolClient) -> None:
    refused = client.open(1, load_env={"PYTHONHOME": "/nowhere"})
    assert isinstance(refused, m.WorkerGroupRefused)
    assert "before it was ready" in refused.reason
    assert client.run(client.group(1), "rank").values == {0: 0}


FAULTS = """
import errno, os, signal, sys
folder, base, fork, set_handler, forks = {folder!r}, os.getpid(), os.fork, signal.signal, 0

def limited_fork():
    global forks
    if os.path.exists(folder + "/no-forks") and os.getpid() != base:
        forks += 1
        if forks > 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()

def failing_signal(number, handler):
    if number == signal.SIGINT and handler is not signal.SIG_IGN and os.path.exists(folder + "/no-starts"):
        with open(folder + "/starts", "a") as file:
            file.write(f"{{os.getpid()}} ")
        raise RuntimeError("the GPU has fallen off the bus")
    return set_handler(number, handler)

if "jupyter_distrib.worker.process.forkserver" in sys.orig_argv:
    os.fork, signal.signal = limited_fork, failing_signal
"""
"""A `sitecustomize` that has a forkserver fail while files of these names are there."""


@pytest.fixture
def faults(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sitecustomize.py").write_text(FAULTS.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    return tmp_path


def test_ranks_for_which_there_are_no_processes_are_refused_and_no_other_notebook_notices(
    faults: Path, folder: Path
) -> None:
    client, other = PoolClient(LocalPool()), PoolClient(LocalPool())
    group = other.group(1)
    (faults / "no-forks").touch()
    refused = client.open(4)
    assert isinstance(refused, m.WorkerGroupRefused)
    assert refused.reason == (
        "rank 2 could not be started: this user may not start more processes "
        "(ulimit -u, or the pids.max of a container): raise the limit, or use fewer ranks."
    )
    assert wait_until(lambda: not ranks(folder, client.session), 5), "ranks 0 and 1 are left"
    (faults / "no-forks").unlink()
    assert client.run(client.group(4), "rank").values == {0: 0, 1: 1, 2: 2, 3: 3}
    assert other.run(group, "rank").values == {0: 0}
    client.close()
    other.close()


def test_a_rank_that_dies_while_it_is_replaced_is_started_three_times_and_then_said(faults: Path) -> None:
    client = PoolClient(LocalPool())
    group = client.group(2)
    (faults / "no-starts").touch()
    os.kill(group.workers[1].pid, signal.SIGKILL)
    wait_until((faults / "starts").exists, 5)
    client.start(group, "rank")
    reason = client.wait(m.Failed).failure.message
    assert reason.startswith("rank 1 ended with exit status 1 before it was ready.")
    assert "the GPU has fallen off the bus" in reason
    assert client.wait(m.WorkerGroupClosed).reason == reason
    assert len((faults / "starts").read_text().split()) == 3
    (faults / "no-starts").unlink()
    assert client.run(client.group(2), "rank").values == {0: 0, 1: 1}
    client.close()


def test_a_rank_that_can_be_replaced_at_the_second_attempt_is_not_missed(faults: Path) -> None:
    client = PoolClient(LocalPool())
    group = client.group(1)
    (faults / "no-starts").touch()
    os.kill(group.workers[0].pid, signal.SIGKILL)
    wait_until((faults / "starts").exists, 5)
    (faults / "no-starts").unlink()
    assert client.run(group, "rank").values == {0: 0}
    client.close()


def test_a_death_is_reported_without_what_earlier_cells_wrote(client: PoolClient) -> None:
    group = client.group(1)
    client.run(group, "import sys\nprint('the password is 1234', file=sys.stderr)")
    outcome = client.run(
        group,
        textwrap.dedent("""\
            import os, sys
            print('about to go', file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)"""),
    )
    (exited,) = outcome.of(m.Exited)
    assert exited.last_lines == ("about to go",)


def test_logs_are_in_the_agents_folder_where_their_own_cannot_be_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that is read-only, for one."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("JUPYTER_DISTRIB_LOG_DIR", raising=False)
    client = PoolClient(LocalPool())
    outcome = client.run(client.group(1), "print('kept')\nrank")
    assert outcome.values == {0: 0}
    (ended,) = outcome.of(m.Ended)
    assert Path(ended.log_directory).parent == folder / "runs"
    assert (Path(ended.log_directory) / "rank0.log").read_text() == "kept\n"
    client.close()


def test_kernels_of_another_niceness_or_with_other_limits_have_an_agent_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose ranks have what the kernel has."""
    mine = server_home.fingerprint()
    assert server_home.fingerprint() == mine
    with monkeypatch.context() as context:
        context.setattr(os, "getpriority", lambda which, who: 7)
        assert server_home.fingerprint() != mine
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert server_home.fingerprint() != mine


# ---------------------------------------------------------------------------------------------------- ending


def test_an_idle_agent_goes_and_takes_its_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "0.3")
    client = PoolClient(LocalPool())
    (agent,) = agents(folder)
    client.close()
    assert wait_until_gone([agent], 10) == []
    assert not list(folder.glob("*.sock"))


def test_an_idle_agent_that_has_a_detached_run_stays_without_its_forkserver(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record waits for whoever asks; torch's memory is given back, and is there again for the next kernel."""
    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "0.3")
    client = PoolClient(LocalPool())
    (agent,) = agents(folder)
    run = client.start(client.group(2), "rank * 10", detached=True)
    client.finish(run, (0, 1))
    client.close()

    assert wait_until_gone([pid for pid in tree(agent) if pid != agent], 10) == []

    other = PoolClient(LocalPool())
    assert agent_of(other) == agent
    other.send(m.Attach(run=run))
    assert other.finish(run, (0, 1)).values == {0: 0, 1: 10}
    assert other.run(other.group(1), "rank").values == {0: 0}
    other.close()


def test_an_idle_agent_whose_detached_run_went_with_its_ranks_waits_for_it_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "0.3")
    client = PoolClient(LocalPool())
    (agent,) = agents(folder)
    group = client.group(2)
    run = client.start(group, "import time\ntime.sleep(600)", detached=True)
    client.send(m.CloseWorkerGroup(group=group.group))
    assert {event.reason for event in client.finish(run, (0, 1)).of(m.Exited)} == {"its ranks were stopped"}
    client.close()

    assert wait_until_gone([pid for pid in tree(agent) if pid != agent], 10) == []


def test_ranks_of_a_detached_run_that_is_stopped_before_it_began_go_with_it_if_their_kernel_has_gone(
    folder: Path,
) -> None:
    client = PoolClient(LocalPool())
    (agent,) = agents(folder)
    group = client.group(2)
    forkservers = set(tree(agent)) - {worker.pid for worker in group.workers} - {agent}
    for pid in forkservers:
        os.kill(pid, signal.SIGSTOP)
    os.kill(group.workers[0].pid, signal.SIGKILL)
    assert wait_until_gone([group.workers[0].pid], 10) == []
    run = client.start(group, "rank", detached=True)  # waits for a new rank 0
    client.close()

    other = PoolClient(LocalPool())
    other.send(m.Attach(run=run))
    other.send(m.Stop(run=run))
    assert len(other.finish(run, (0, 1)).of(m.Interrupted)) == 2
    for pid in forkservers:
        os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: not ranks(folder, client.session), 10)
    other.close()


def test_without_a_name_a_notebook_gets_its_own_newest_detached_run(
    client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_of(path: str) -> str:
        monkeypatch.setattr(
            PoolClient, "_hello", lambda self: replace(hello(self), session=self.session, notebook=path)
        )
        kernel = PoolClient(LocalPool())
        run = kernel.start(kernel.group(1), "rank", detached=True)
        kernel.finish(run, (0,))
        kernel.close()
        return run

    def attached_to(path: str) -> str:
        monkeypatch.setattr(
            PoolClient, "_hello", lambda self: replace(hello(self), session=self.session, notebook=path)
        )
        kernel = PoolClient(LocalPool())
        kernel.send(m.Attach(run=""))
        run = kernel.wait(m.Attached).run
        kernel.close()
        return run

    hello = PoolClient._hello
    mine, others = run_of("/a/train.ipynb"), run_of("/b/train.ipynb")

    assert attached_to("/a/train.ipynb") == mine
    assert attached_to("/c/new.ipynb") == others
    assert attached_to("") == others


def test_a_command_that_fails_is_reported_to_its_kernel_and_harms_nobody(client: PoolClient) -> None:
    group = client.group(1)
    other = PoolClient(LocalPool())
    other.send(m.OpenWorkerGroup(group="c", size="two", gpus=False))  # type: ignore[arg-type]
    refused = other.wait(m.WorkerGroupRefused)
    assert refused.group == "c"
    assert refused.reason.startswith("this command failed (TypeError: ")
    assert other.run(other.group(1), "rank").values == {0: 0}
    assert client.run(group, "rank").values == {0: 0}
    other.close()


def test_kernels_that_come_as_it_goes_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "0.005")
    for number in range(12):
        client = PoolClient(LocalPool())
        assert not client.lost
        client.close()
        time.sleep(0.001 * number)


def test_a_kernel_that_comes_as_the_name_goes_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look at who waits and the end of the socket's name."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as kernel:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        agent = Agent(listener, tmp_path, "a")
        server, give_up_name = agent.server, agent.server.give_up_name

        def connected_just_before() -> None:
            kernel.connect(str(path))
            give_up_name()

        monkeypatch.setattr(server, "give_up_name", connected_just_before)
        server._retire()
        assert server.loop._running, "it serves the kernel"
        assert not path.exists()
        path.write_text("the next agent's")
        server._gone(server.clients[0])
        monkeypatch.setattr(server, "give_up_name", give_up_name)
        server._retire()
        assert not server.loop._running
        assert path.read_text() == "the next agent's", "the name is not its own any more"
        agent._calls.close()
        os.close(server._listener._spare)
        server.loop._selector.close()
        agent._forkservers._log.close()


def test_sigterm_ends_it_and_its_ranks(folder: Path) -> None:
    client = PoolClient(LocalPool())
    client.group(2)
    (agent,) = agents(folder)
    family = tree(agent)
    os.kill(agent, signal.SIGTERM)
    assert wait_until_gone(family, 3) == []
    assert not list(folder.glob("*.sock"))
    client.close()


# ---------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with a limit of 1 GiB, below our own."""
    own = control_groups.folders("memory")[:1]
    try:
        group = own[0] / f"jupyter_distrib-{os.getpid()}"
        group.mkdir()
        limit = next(path for name in ("memory.max", "memory.limit_in_bytes") if (path := group / name).exists())
        limit.write_text(str(1 << 30))
    except (OSError, IndexError, StopIteration) as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    assert wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


HOG = "x = bytearray(3 << 30)"
IN_GROUP = "import os, sys\nopen(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"


def test_a_rank_that_the_system_kills_for_memory_is_reported_with_the_limit(folder: Path, limited: Path) -> None:
    program = f"""
    import sys
    {IN_GROUP.replace(chr(10), chr(10) + "    ")}
    from jupyter_distrib.wire.messages import Exited
    from jupyter_distrib.pools.local import LocalPool
    from jupyter_distrib.testing import PoolClient
    client = PoolClient(LocalPool())
    (exited,) = client.run(client.group(1), {HOG!r}).of(Exited)
    print(exited.exit_code, exited.out_of_memory, exited.memory_limit_bytes)
    client.close()
    """
    assert python(program, str(limited)).communicate(timeout=60)[0] == f"-9 True {1 << 30}\n"
    _remove(folder)
    folder.mkdir()


def test_a_rank_that_is_killed_while_another_program_runs_out_of_memory_is_not_its_victim(
    client: PoolClient, limited: Path, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    group = client.group(1)
    run = client.start(
        group,
        textwrap.dedent(f"""\
            import os, time
            while not os.path.exists({str(flag)!r}):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)"""),
    )
    client.wait(m.Started)
    hog = python(IN_GROUP + HOG, str(limited))
    hog.communicate(timeout=60)
    assert hog.returncode == -signal.SIGKILL
    flag.touch()
    (exited,) = client.finish(run, (0,)).of(m.Exited)
    assert (exited.exit_code, exited.out_of_memory) == (-signal.SIGKILL, False)
    client.close_group(group)


# ---------------------------------------------------------------------------------------------------- logs


@pytest.fixture
def logs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of logs of this test's own."""
    monkeypatch.setenv("JUPYTER_DISTRIB_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


def test_what_a_thread_prints_late_may_be_lost_with_its_log_and_nothing_else(logs: Path, tmp_path: Path) -> None:
    client, flag, said = PoolClient(LocalPool()), tmp_path / "flag", tmp_path / "said"
    group = client.group(1)
    run = client.start(
        group,
        textwrap.dedent(f"""\
            import os, threading, time
            def late():
                while not os.path.exists({str(flag)!r}):
                    time.sleep(0.01)
                print('late', flush=True)
                open({str(said)!r}, 'w').close()
            threading.Thread(target=late).start()
            print('now')"""),
    )
    client.finish(run, (0,))
    subprocess.run(["rm", "-r", str(logs / run)], check=True)
    (logs / run).write_text("a file where the folder was")
    flag.touch()
    assert wait_until(said.exists)

    assert client.run(group, "rank").values == {0: 0}
    client.close()


def test_an_agent_that_starts_leaves_the_logs_of_running_runs(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the newest runs stay too, by what was written last."""
    client = PoolClient(LocalPool())
    run = client.start(
        client.group(1),
        textwrap.dedent("""\
            print('here', flush=True)
            import time
            time.sleep(600)"""),
        detached=True,
    )
    client.wait(m.Wrote)
    for number in range(205):
        (logs / f"0a1b2c-{number}").mkdir()
        (logs / f"0a1b2c-{number}" / "rank0.log").write_text("text")
        os.utime(logs / f"0a1b2c-{number}" / "rank0.log", (1000 + number, 1000 + number))
    os.utime(logs / run / "rank0.log", (0, 0))
    os.utime(logs / run, (0, 0))

    monkeypatch.setenv("JUPYTER_DISTRIB_IDLE_S", "60")  # another environment: an agent of its own
    other = PoolClient(LocalPool())
    assert agent_of(other) != agent_of(client)
    gone = {f"0a1b2c-{number}" for number in range(205)} - {path.name for path in logs.iterdir()}
    assert gone == {f"0a1b2c-{number}" for number in range(5)}
    assert (logs / run / "rank0.log").read_text() == "here\n"
    other.close()
    client.close()


def test_an_agent_that_starts_removes_what_killed_ranks_have_left(folder: Path) -> None:
    made = python(
        """\
        from jupyter_distrib.system import scratch
        made = scratch.folder()
        print(made.__enter__(), flush=True)
        import os; os._exit(9)"""
    )
    left = Path(made.communicate()[0].strip())
    assert left.is_dir()
    client = PoolClient(LocalPool())
    assert client.run(client.group(1), "rank").values == {0: 0}
    assert not left.exists()
    client.close()


# ---------------------------------------------------------------------------------------------------- security


LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")


def test_nothing_listens_but_on_loopback(client: PoolClient, shared: Path) -> None:
    """S1: at every phase; and the control channel never."""
    agent = agent_of(client)
    assert listeners(tree(agent)) == set(), "agent and forkserver"
    group = client.group(2)
    ranks = [worker.pid for worker in group.workers]
    idle = listeners(tree(agent))
    assert len(idle) <= 1, "the store's socket, in rank 0"
    everything: set[str] = set(idle)
    source = textwrap.dedent("""\
        import time, torch, torch.distributed as dist
        x = torch.ones(1)
        if dist.is_initialized(): dist.all_reduce(x)
        print('here', flush=True)
        time.sleep(0.3)
        x.item()""")
    for strategy in ("none", "ddp"):
        client.when(m.Wrote, lambda _: everything.update(listeners(tree(agent))))
        assert set(client.run(group, source, strategy=strategy).values) == {0, 1}
    everything |= listeners(tree(agent))
    assert everything
    assert all(address.startswith(LOOPBACK) for address in everything), everything
    assert listeners([agent]) == set()
    assert is_alive(ranks[0])


def test_socket_and_logs_are_the_users_alone(client: PoolClient, shared: Path) -> None:
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    client.run(client.group(1), "print('x')")
    for path in shared.iterdir():
        assert not stat.S_IMODE(path.stat().st_mode) & (0o077 if path.is_file() else 0o022), path


def test_what_agents_and_coordinators_write_is_private_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import os, sys\nprint(oct(os.umask(0)), os.environ['X'], sys.stdin.read())")
    before, log = os.umask(0), tmp_path / "log"
    try:
        with log.open("wb") as file:
            env = {**os.environ, "PYTHONPATH": str(tmp_path), "X": "x"}
            exec_agent(str(tmp_path / "sock"), file, ("server",), env, stdin_text="told").wait(20)
    finally:
        os.umask(before)
    assert log.read_text() == "0o77 x told\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused(client: PoolClient, shared: Path) -> None:
    """Even if the folder were open to them, and they knew what to say."""
    path = socket_of(client, shared)
    program = """
    import os, socket, sys
    uid = int(sys.argv[2])
    os.setgid(uid); os.setuid(uid)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    try:
        sock.connect(sys.argv[1])
        sock.sendall(bytes.fromhex(sys.argv[3]))
        print("closed" if sock.recv(100) == b"" else "heard")
    except PermissionError:
        print("no entry")
    except ConnectionError:
        print("closed")
    """
    hello = m.Hello(protocol=m.PROTOCOL, session="s", pid=os.getpid(), label="x", python="", torch="", cloudpickle="")
    first_words = encode(hello).hex()

    def answer(uid: int) -> str:
        return python(program, str(path), str(uid), first_words).communicate(timeout=20)[0].strip()

    assert answer(os.getuid()) == "heard"
    assert answer(12345) == "no entry"
    shared.chmod(0o777)
    path.chmod(0o777)
    assert answer(12345) == "closed"
    assert answer(os.getuid()) == "heard"
    shared.chmod(0o700)
    assert client.run(client.group(1), "rank").values == {0: 0}


def test_secrets_of_the_environment_stay_there(
    client: PoolClient, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: neither in logs nor in the command line of any process, nor in the runtime folder."""
    monkeypatch.setenv("MY_API_KEY", "canary-4711")
    group = client.group(2)
    (ended,) = [
        client.run(
            group, "import os\nprint('x')\nassert os.environ['MY_API_KEY']", env={"MY_API_KEY": "canary-4711"}
        ).events[-1]
    ]
    assert client.run(group, "1 / 0").failure(0)
    agent = agent_of(client)
    for pid in tree(agent):
        assert b"canary" not in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    for place in (shared, Path(ended.log_directory)):  # type: ignore[union-attr]
        for path in place.rglob("*"):
            if path.is_file():
                assert b"canary" not in path.read_bytes(), path


@pytest.mark.parametrize(
    "data", [b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b'\0\0\0\x0d\0\0\0\x05{"$":"Leave"}']
)
def test_noise_on_the_socket_harms_nobody(data: bytes, client: PoolClient, shared: Path) -> None:
    group = client.group(1)
    path = socket_of(client, shared)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(path))
        stranger.send(data)
        with suppress(ConnectionError):
            assert stranger.recv(10) == b""
    assert client.run(group, "rank").values == {0: 0}


def test_commands_before_the_greeting_are_refused(client: PoolClient, shared: Path) -> None:
    path = socket_of(client, shared)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(10)
    stranger.connect(str(path))
    link = Link(stranger)
    link.send(m.OpenWorkerGroup(group="x", size=1, gpus=False))
    with pytest.raises(EOFError):
        link.receive()
    link.close()


def test_descriptors_that_nobody_asked_for_are_closed(client: PoolClient, shared: Path) -> None:
    agent = agent_of(client)
    client.run(client.group(1), "rank")
    before = len(os.listdir(f"/proc/{agent}/fd"))
    for number in range(20):
        client.send(
            m.OpenWorkerGroup(group=f"x{number}", size=-1, gpus=False),
            Descriptors(os.open(os.devnull, os.O_RDONLY) for _ in range(5)),
        )
        client.wait(m.WorkerGroupRefused)
    assert len(os.listdir(f"/proc/{agent}/fd")) <= before


def test_unreachable_folders_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JUPYTER_DISTRIB_RUNTIME_DIR", str(tmp_path / "file" / "run"))
    with pytest.raises(PoolError, match="cannot be made"):
        PoolClient(LocalPool())


def test_a_store_that_another_node_has_made_while_packages_are_compared_is_used(client: PoolClient) -> None:
    name = f"{client.session}-early"
    packages = m.Packages(mode="check", packages=())
    client.send(m.OpenWorkerGroup(group=name, size=1, gpus=False, first_rank=1, world_size=2, packages=packages))
    client.send(m.UseStore(group=name, host="127.0.0.1", port=4242))
    opened = client.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
    assert isinstance(opened, m.WorkerGroupOpened), opened
    source = "import os\nos.environ['MASTER_ADDR'], os.environ['MASTER_PORT']"
    assert client.run(opened, source, run_size=2).values == {1: ("127.0.0.1", "4243")}
    client.close_group(opened)
