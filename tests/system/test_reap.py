"""Which processes are killed, and which sockets are cut."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from jupyter_distrib.system import reap
from jupyter_distrib.system.event_loop import Loop
from tests.notebook import ROOT
from tests.processes import is_alive, wait_until, wait_until_gone


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = signal.getsignal(signal.SIGCHLD)
    loop = Loop()
    yield loop
    signal.signal(signal.SIGCHLD, before)
    loop._selector.close()


def program(text: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True, **options
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


TALK = """
import socket, sys, time
kind, port = sys.argv[1], int(sys.argv[2])
if kind == "listen":
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    ends = [server.accept()[0] for _ in range(port)]
    print("connected", flush=True)
elif kind == "connect6":
    end = socket.create_connection(("::ffff:127.0.0.1", port))
    print("connected", flush=True)
else:
    end = socket.create_connection(("127.0.0.1", port))
    print("connected", flush=True)
time.sleep(60)
"""


def sockets_of(pid: int) -> set[int]:
    found = set()
    for fd in (Path("/proc") / str(pid) / "fd").iterdir():
        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))) is not None:
            found.add(int(match[1]))
    return found


def test_only_sockets_between_the_ranks_are_found() -> None:
    """Two ranks talk to each other; one of them also to a third process, a tracking server say."""
    first = program(TALK, "listen", "1")
    outsider = program(TALK, "listen", "1")
    port, other_port = line_of(first), line_of(outsider)
    both = TALK.replace(
        "time.sleep(60)",
        f"extra = socket.create_connection(('127.0.0.1', {other_port}))\nprint('both', flush=True)\ntime.sleep(60)",
    )
    second = program(both, "connect", port)
    try:
        assert [line_of(first), line_of(outsider), line_of(second), line_of(second)] == [
            "connected",
            "connected",
            "connected",
            "both",
        ]
        found = set(reap.sockets_between([first.pid, second.pid]))
        assert len(found) == 2
        assert found <= sockets_of(first.pid) | sockets_of(second.pid)
        assert found & sockets_of(first.pid)
        assert found & sockets_of(second.pid)
        assert not found & sockets_of(outsider.pid)
        assert reap.sockets_between([first.pid]) == ()
        assert reap.sockets_between([]) == ()
        assert len(reap.sockets_between([first.pid, second.pid, outsider.pid])) == 4
    finally:
        end(first, second, outsider)


def test_an_ipv4_end_inside_ipv6_is_the_same_end() -> None:
    first = program(TALK, "listen", "1")
    second = program(TALK, "connect6", line_of(first))
    try:
        assert line_of(first) == line_of(second) == "connected"
        assert len(reap.sockets_between([first.pid, second.pid])) == 2
    finally:
        end(first, second)


NEST = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, daemon.pid, flush=True)
time.sleep(60)
"""


def test_a_session_is_killed_and_nothing_else() -> None:
    rank = program(NEST, start_new_session=True)
    bystander = program("import time; print(1, flush=True); time.sleep(60)")
    child, daemon = map(int, line_of(rank).split())
    line_of(bystander)
    reap.kill_left({rank.pid}, set())
    rank.wait()
    assert wait_until_gone([child], 5) == []
    assert is_alive(daemon), "a session of its own"
    assert is_alive(bystander.pid)
    os.kill(daemon, signal.SIGKILL)
    end(bystander, rank)


def test_marked_processes_are_killed_and_no_others() -> None:
    marks = {"JUPYTER_DISTRIB_WORKER": "x-c1.0.1"}
    rank = program(NEST, start_new_session=True, env={**os.environ, **marks})
    namesake = program(
        "import time; print(1, flush=True); time.sleep(60)", env={**os.environ, "JUPYTER_DISTRIB_WORKER": "x-c1.0.10"}
    )
    child, daemon = map(int, line_of(rank).split())
    line_of(namesake)
    # A program's environment is there a moment after its process.
    assert wait_until(lambda: reap.mark_of(daemon, "JUPYTER_DISTRIB_WORKER") == "x-c1.0.1", 5)
    assert reap.mark_of(os.getpid(), "JUPYTER_DISTRIB_NOT_SET") == ""
    reap.kill_left(set(), {"x-c1.0.1"})
    rank.communicate()
    assert wait_until_gone([child, daemon], 5) == []
    assert is_alive(namesake.pid)
    end(namesake)


def test_what_ranks_have_left_that_end_together_is_found_with_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    others = reap._others

    def counted(chosen: Callable[[int], bool]) -> list[int]:
        looks.append(chosen)
        return others(chosen)

    monkeypatch.setattr(reap, "_others", counted)
    ranks = [
        program(NEST, start_new_session=True, env={**os.environ, "JUPYTER_DISTRIB_WORKER": f"x-c1.{n}.1"})
        for n in range(2)
    ]
    started = [int(pid) for rank in ranks for pid in line_of(rank).split()]
    loop = Loop()
    sweep = reap.Sweep(loop)
    for n, rank in enumerate(ranks):
        loop.later(0, partial(sweep.add, rank.pid, f"x-c1.{n}.1"))
    loop.later(0, loop.stop)
    loop.run()
    for rank in ranks:
        rank.communicate()
    assert wait_until_gone(started, 5) == []
    assert len(looks) == 1


def test_what_is_gone_is_no_trouble() -> None:
    gone = program("pass")
    gone.communicate()
    reap.kill_left({gone.pid}, set())
    assert reap.session_of(gone.pid) == 0
    assert reap.rss_bytes(gone.pid) == 0
    assert reap.children(gone.pid) == []
    assert reap.mark_of(gone.pid, "PATH") is None


def test_children_and_memory_of_a_process() -> None:
    child = program("import time; print(1, flush=True); time.sleep(60)")
    line_of(child)
    assert child.pid in reap.children(os.getpid())
    assert reap.rss_bytes(child.pid) > 1 << 20
    assert reap.session_of(child.pid) == os.getsid(0)
    end(child)


def test_adopted_children_are_killed_unless_known() -> None:
    text = """
import os, subprocess, sys
from jupyter_distrib.system import reap
start = lambda: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
known, spared, stray = start(), start(), start()
reap.kill_adopted(frozenset([known.pid]), lambda pid: pid == spared.pid)
states = stray.wait(), known.poll(), spared.poll()
known.kill(); spared.kill()  # before anybody reads on and ends this program
print(*states)
"""
    process = program(text, cwd=ROOT)
    assert line_of(process) == "-9 None None"
    end(process)


AGENT_IN_ANOTHER_TIME = """
import os, subprocess, sys
from jupyter_distrib.system import launch, run_list
from jupyter_distrib.system.confinement import pid_namespace
from pathlib import Path
rank = subprocess.Popen(["sleep", "60"], env={**os.environ, launch.AGENT: launch.own_mark()})
run = run_list.ListedRun(run="a-1", label="", holder="", notebook="", began_at_s=1.0, ended=False, server="agent-0",
                         pid=os.getpid(), protocol=1, pid_namespace=pid_namespace())
run_list.write(Path(sys.argv[1]), run)
print(rank.pid, flush=True)
sys.stdin.read()
rank.kill()
"""
LOOKS_FROM_OUTSIDE = f"""
import os, signal, socket, subprocess, sys
from pathlib import Path
from jupyter_distrib.system import reap, run_list
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1] + "/agent-0.sock")
    listener.listen()
    inside = ["unshare", "--time", "--boottime", "5000", sys.executable, "-c", {AGENT_IN_ANOTHER_TIME!r}, sys.argv[1]]
    agent = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rank = int(agent.stdout.readline())
    reap.kill_orphans()
    state = Path(f"/proc/{{rank}}/stat").read_text().rpartition(")")[2].split()[0]
    print(state not in "ZX", [run.run for run in run_list.listed(Path(sys.argv[1]))], flush=True)
    agent.communicate()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root")
def test_an_agent_whose_clock_is_another_is_alive(tmp_path: Path) -> None:
    """In a namespace of times, processes began at other times: an agent inside is none that has taken the number of a
    dead one. The test has a namespace of processes, so that it looks at nothing else."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run(
        [*alone, "unshare", "--time", "--boottime", "5000", "true"], capture_output=True, check=False
    ).returncode:
        pytest.skip("this system makes no namespaces of times and processes")
    looked = subprocess.run(
        [*alone, sys.executable, "-c", LOOKS_FROM_OUTSIDE, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert looked.stdout.split("\n")[0] == "True ['a-1']"
