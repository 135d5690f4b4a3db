"""Ranks of a kernel or a script whose parent ignores or blocks signals: `script &`, `nohup`, a service manager."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook
from tests.processes import agents, wait_until_gone

pytestmark = pytest.mark.slow

PARENT = """
import os, signal, sys
ignored, blocked = (filter(None, word.split(",")) for word in sys.argv[1:3])
for name in ignored:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in blocked])
os.execvp(sys.argv[3], sys.argv[3:])
"""
CELL = """%%distributed --ranks 2
import os, subprocess, sys
assert subprocess.run([sys.executable, "-c", "raise SystemExit(7)"]).returncode == 7
assert os.waitstatus_to_exitcode(os.system("exit 5")) == 5
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
"""


@pytest.fixture
def agents_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for agents of this test's own, which a parent with other signals starts."""
    yield tmp_path / "run"
    found = agents(tmp_path / "run")
    for agent in found:
        os.kill(agent, signal.SIGTERM)
    assert wait_until_gone(found, 20) == []


def below(ignored: str = "", blocked: str = "") -> list[str]:
    return [sys.executable, "-c", PARENT, ignored, blocked]


@pytest.mark.parametrize(
    ("ignored", "blocked"),
    [
        ("SIGINT", ""),
        ("SIGCHLD", ""),
        ("SIGINT,SIGTERM,SIGHUP,SIGPIPE,SIGUSR1,SIGQUIT", "SIGTERM,SIGHUP,SIGUSR1,SIGCHLD,SIGALRM"),
    ],
)
def test_a_cell_of_such_a_kernel_and_its_programs_are_as_ever(
    tmp_path: Path, agents_folder: Path, ignored: str, blocked: str
) -> None:
    env = {"JUPYTER_DISTRIB_RUNTIME_DIR": str(agents_folder)}
    with Notebook(tmp_path, env, below=below(ignored, blocked)) as book:
        book.ok("%load_ext jupyter_distrib")
        text = book.ok(CELL).text
        assert re.findall(r"Sig(?:Ign|Blk):\s+(\w+)", text), text
        assert set(re.findall(r"Sig(?:Ign|Blk):\s+(\w+)", text)) == {"0" * 16}, text
        book.start(
            dedent("""\
                %%distributed --ranks 2
                import time
                print('begun', flush=True)
                while True: time.sleep(0.01)""")
        )
        book.until("begun")
        book.interrupt()
        assert book.finish(20).ename == "KeyboardInterrupt"
        assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
        outcome = book.fails(
            dedent("""\
                %%distributed --ranks 2
                import os
                if rank == 1: os._exit(3)""")
        )
        assert outcome.ename == "RankLost"
        assert "status 3" in outcome.text
        assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


SCRIPT = """
import os, signal, sys, threading, time
from jupyter_distrib import distributed
from jupyter_distrib.kernel.session import session

@distributed(ranks=2, POOL)
def train():
    import time
    print("begun", flush=True)
    while True:
        time.sleep(0.01)

def stop():
    while not (history := session.current().history) or not any(rank.pid for rank in history[-1].record.ranks.values()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # ignored, as its caller wants it
    history[-1].cancel()

if sys.argv[1] == "cancel":
    threading.Thread(target=stop, daemon=True).start()
try:
    train.distributed()
except BaseException as error:
    print("ended by", type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("pool", ["", "pool='inline'"])
@pytest.mark.parametrize("ignored", ["SIGINT", "SIGINT,SIGHUP"])
def test_a_function_in_a_script_that_ignores_interrupts_is_stopped_by_cancel(
    tmp_path: Path, agents_folder: Path, ignored: str, pool: str
) -> None:
    with script(tmp_path, agents_folder, ignored, pool, "cancel") as process:
        try:
            output = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert "ended by CancelledError" in output or "ended by KeyboardInterrupt" in output, output


SWALLOWED = """
import threading, time
from pathlib import Path
from jupyter_distrib import distributed
from jupyter_distrib.kernel.session import session

class Lost:
    def __del__(self):
        Path("entered").touch()
        time.sleep(60)  # an interrupt in a finalizer is printed, and ignored

@distributed(pool="inline", ranks=2)
def train():
    from pathlib import Path
    import time
    lost = Lost()
    del lost
    while True:
        time.sleep(0.01)

def stop():
    while not Path("entered").exists():
        time.sleep(0.01)
    session.current().history[-1].cancel()

threading.Thread(target=stop, daemon=True).start()
try:
    THREAD
except BaseException as error:
    print("ended by", type(error).__name__, flush=True)
"""
IN_A_THREAD = """from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as thread:
        thread.submit(train.distributed).result()"""


@pytest.mark.parametrize("how", ["train.distributed()", IN_A_THREAD], ids=["main", "thread"])
def test_a_stop_on_the_inline_pool_that_the_cell_swallows_is_repeated(tmp_path: Path, how: str) -> None:
    code = SWALLOWED.replace("THREAD", how)
    if how != "train.distributed()":  # the exception comes when a call of C returns
        code = code.replace("time.sleep(60)", "[time.sleep(0.01) for _ in range(6000)]")
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert "Exception ignored in" in done.stderr, done.stderr
    assert re.search("ended by (CancelledError|KeyboardInterrupt)", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("ignored", ["SIGINT", "SIGINT,SIGHUP"])
def test_such_a_script_ends_by_sigterm_and_its_ranks_with_it(tmp_path: Path, agents_folder: Path, ignored: str) -> None:
    with script(tmp_path, agents_folder, ignored, "", "terminate") as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        assert any("begun" in line for line in process.stdout)
        os.kill(process.pid, signal.SIGINT)
        if "SIGHUP" in ignored:
            os.kill(process.pid, signal.SIGHUP)
        (agent,) = agents(agents_folder)
        ranks = [pid for pid in children(agent) if os.readlink(f"/proc/{pid}/fd/1").startswith("pipe:")]
        assert len(ranks) == 2
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert wait_until_gone(ranks, 10) == []


def script(folder: Path, agents_folder: Path, ignored: str, pool: str, *words: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT.replace("POOL", pool))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_DISTRIB_RUNTIME_DIR": str(agents_folder)}
    return subprocess.Popen(
        [*below(ignored), sys.executable, str(folder / "script.py"), *words],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
