"""A cell runs where its notebook is: in its container, its job and its control group, and not in those of the user's
other notebooks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook
from tests.processes import agents, tree, wait_until, wait_until_gone
from tests.product.control_groups import members, memory_group
from tests.settings_files import write_trusted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="control groups and namespaces are made by root"),
]

IN_A_GROUP = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
ALONE = 'ip link set lo up && mount -t tmpfs none /mnt && echo inside > /mnt/file && hostname job-two && exec "$@"'
SEEN = (
    "import os, socket\n"
    "print('seen', socket.gethostname(), os.path.exists('/mnt/file'), "
    "*(os.readlink(f'/proc/self/ns/{name}') for name in ('mnt', 'net', 'uts')), flush=True)"
)
Open = Callable[..., Notebook]


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[Open]:
    """Starts kernels with the extension loaded; their ranks are gone afterwards."""
    sessions = []
    with ExitStack() as stack:

        def start(*below: str, sockets: Path | None = None, **env: str) -> Notebook:
            book = stack.enter_context(Notebook(tmp_path, env, below=below, sockets=sockets))
            book.ok("%load_ext jupyter_distrib")
            sessions.append(
                book.ok("from jupyter_distrib.kernel.session import session; print(session.current().identity.name)")
            )
            return book

        yield start
    for each in sessions:
        leftovers_after(each.stdout.strip())


@pytest.fixture
def groups() -> Iterator[tuple[Path, Path]]:
    """Two control groups; agents in them are ended afterwards."""
    with memory_group("jd-a", 3 << 30) as one, memory_group("jd-b", 4 << 30) as other:
        yield one, other
        _empty(one, other)


def _runtime() -> Path:
    return Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"])


def _empty(*folders: Path) -> None:
    """End what is in control groups, as the end of a job does."""
    for pid in {pid for folder in folders for pid in members(folder)}.intersection(agents(_runtime())):
        os.kill(pid, signal.SIGTERM)
    assert wait_until(lambda: not any(map(members, folders)), 20), [*map(members, folders)]


ONE = """\
%%distributed --ranks 1
import os
print('pid', os.getpid(), flush=True)"""
KEPT = """\
%%distributed --ranks 2 --keep kept
import os
kept = rank
print('pid', os.getpid(), flush=True)"""


def _pids(book: Notebook) -> list[int]:
    """The ranks of a notebook, which stay as they are from now on."""
    return sorted(map(int, re.findall(r"pid (\d+)", book.ok(KEPT).view)))


def test_ranks_are_in_the_control_group_of_their_notebook(groups: tuple[Path, Path], kernels: Open) -> None:
    """Also after the other group has ended, with everything in it."""
    books = [kernels("sh", "-c", IN_A_GROUP, str(group)) for group in groups]
    pids = [_pids(book) for book in books]

    for group, own in zip(groups, pids, strict=True):
        assert len(own) == 2
        assert set(own) <= set(members(group)), "the ranks are in another control group"
    books[0].close()
    _empty(groups[0])
    assert _pids(books[1]) == pids[1], "ranks in the other group do not outlive it"
    assert books[1].ok("%%distributed --ranks 2\nkept").result == "rank 0: 0\nrank 1: 1"


def test_an_agent_that_was_moved_elsewhere_starts_no_further_ranks(groups: tuple[Path, Path], kernels: Open) -> None:
    """As by `cgclassify`, or by a daemon that sorts processes by rules."""
    before = set(agents(_runtime()))
    first = kernels("sh", "-c", IN_A_GROUP, str(groups[0]))
    first_pids = _pids(first)
    (agent,) = set(agents(_runtime())) - before
    for pid in set(tree(agent)) - set(first_pids):  # and its forkserver
        (groups[1] / "cgroup.procs").write_text(str(pid))

    second = kernels("sh", "-c", IN_A_GROUP, str(groups[0]))
    assert set(_pids(second)) <= set(members(groups[0]))
    third = kernels("sh", "-c", IN_A_GROUP, str(groups[0]))
    _pids(third)

    assert len(set(agents(_runtime())) - before) == 2, "the third kernel shares the agent of the second"
    assert _pids(first) == first_pids, "who has ranks there keeps them"
    (new,) = map(int, re.findall(r"pid (\d+)", first.ok(ONE).view))
    assert new in members(groups[0]), "the same notebook, too, gets no more of them"
    assert len(set(agents(_runtime())) - before) == 2


def test_a_notebook_that_is_moved_has_new_ranks_where_it_is(groups: tuple[Path, Path], kernels: Open) -> None:
    """As by a daemon that sorts processes by rules. Values stay where they are kept; idle ranks do not."""
    book = kernels("sh", "-c", IN_A_GROUP, str(groups[0]))
    kept = _pids(book)
    (idle,) = map(int, re.findall(r"pid (\d+)", book.ok(ONE).view))
    (groups[1] / "cgroup.procs").write_text(str(book.pid))

    (new,) = map(int, re.findall(r"pid (\d+)", book.ok(ONE).view))
    assert new in members(groups[1])
    assert not wait_until_gone([idle])
    assert book.ok("%%distributed --ranks 2\nkept").result == "rank 0: 0\nrank 1: 1"
    assert set(kept) <= set(members(groups[0])), "who has ranks there keeps them"
    assert [int(pid) for pid in re.findall(r"pid (\d+)", book.ok(ONE).view)] == [new], "they are warm now"


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip`, which starts loopback in a namespace")
def test_ranks_are_in_the_namespaces_of_their_notebook(kernels: Open) -> None:
    unshare = ("unshare", "--mount", "--uts", "--net", "sh", "-c", ALONE, "sh")
    if (refused := subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"this system makes no namespaces: {refused.stderr}")
    outside, inside = kernels(), kernels(*unshare, sockets=_runtime().parent / "kernel")
    cell = f"%%distributed --ranks 2 --strategy ddp\n{SEEN}"
    for book, name in ((outside, os.uname().nodename), (inside, "job-two")):
        own = book.ok(SEEN).stdout.strip()
        assert own.startswith(f"seen {name} {book is inside}")
        seen = set(re.findall(r"seen .*\]", book.ok(cell).view))
        assert seen == {own}


def test_notebooks_of_two_jobs_have_agents_of_their_own(kernels: Open) -> None:
    """Also where the scheduler uses no control groups: the end of the job ends its processes, and they are counted."""
    books = [kernels(SLURM_JOB_ID=job) for job in ("17", "18", "17")]
    cell = dedent("""\
        %%distributed --ranks 1
        import os
        print('job', os.environ['SLURM_JOB_ID'], os.getppid(), flush=True)""")
    seen = [re.findall(r"job (\d+) (\d+)", book.ok(cell).view)[0] for book in books]

    assert [job for job, _ in seen] == ["17", "18", "17"]
    assert seen[0][1] == seen[2][1] != seen[1][1]


def test_notebooks_that_remove_the_variables_of_their_job_stay_in_it(tmp_path: Path) -> None:
    cell = dedent("""\
        %%distributed --ranks 1
        import os
        print('of', os.getppid(), os.environ.get('SLURM_JOB_ID'), flush=True)""")
    with ExitStack() as stack:
        books = [stack.enter_context(Notebook(tmp_path, {"SLURM_JOB_ID": job})) for job in ("27", "28", "27")]
        for book in books:
            book.ok("import os; del os.environ['SLURM_JOB_ID']\n%load_ext jupyter_distrib")
        seen = [re.findall(r"of (\d+) (\w+)", book.ok(cell).view)[0] for book in books]
    assert seen[0][0] == seen[2][0] != seen[1][0]
    assert {job for _, job in seen} == {"None"}, "a cell sees the variables of its notebook"


def test_a_detached_run_is_found_from_another_container_and_reported_with_its_place(kernels: Open) -> None:
    """One in which process ids mean something else."""
    inside = (
        "unshare",
        "--mount",
        "--uts",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        'hostname c1; exec "$@"',
        "sh",
    )
    if (refused := subprocess.run([*inside, "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"this system makes no namespaces: {refused.stderr}")
    book, other = kernels(*inside), kernels()
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --detach --out job
            import time
            print('begun', flush=True)
            time.sleep(600)""")
    )

    for _ in range(2):  # a look from outside must not make it unknown
        assert re.search(r"running .*kernel \d+ +c1", other.ok("%distributed_status").result)
    assert "runs on c1" in other.ok("%distributed_attach").view
    other.ok("from jupyter_distrib.kernel.session import session; session.runs()[-1].cancel()")
    book.ok("job.wait_ended(30)")
    assert book.fails("job.result()").ename == "KeyboardInterrupt"


def _confined(book: Notebook) -> list[str]:
    report = book.ok("%distributed_status --doctor").result
    return [
        line for line in report.splitlines() if "confined by" in line or line.strip().startswith("-> they do not share")
    ]


def test_the_doctor_names_job_and_control_group_with_their_limits(groups: tuple[Path, Path], kernels: Open) -> None:
    book = kernels("sh", "-c", IN_A_GROUP, str(groups[0]), SLURM_JOB_ID="17")
    _pids(book)
    kernel, agents_and_ranks = _confined(book)

    assert re.search(r"agent and ranks 0-1 of local: as the kernel", agents_and_ranks)
    assert f"kernel {book.pid}: " in kernel
    assert f"Slurm job 17, control group /{groups[0].name}" in kernel.replace("/process_api", "")
    assert "at most 3.2 GB of memory" in kernel


def test_the_doctor_warns_of_ranks_in_another_control_group(groups: tuple[Path, Path], kernels: Open) -> None:
    book = kernels("sh", "-c", IN_A_GROUP, str(groups[0]))
    (groups[1] / "cgroup.procs").write_text(str(_pids(book)[1]))
    lines = _confined(book)

    (moved,) = [line for line in lines if groups[1].name in line]
    assert re.search(r"! +confined by +rank [01] of local: ", moved)
    assert "at most 4.3 GB of memory" in moved
    assert any("do not share the kernel's control group" in line for line in lines), lines


def test_the_doctor_names_namespaces_and_containers(kernels: Open) -> None:
    book = kernels("unshare", "--uts", APPTAINER_CONTAINER="/images/torch.sif")
    outside = kernels()
    _pids(book)
    assert "Apptainer container /images/torch.sif" in _confined(book)[0]
    assert "Apptainer" not in _confined(outside)[0]


def test_the_doctor_asks_ranks_behind_a_command(kernels: Open, tmp_path: Path) -> None:
    """They are asked themselves: their processes may be on another machine."""
    write_trusted(
        tmp_path,
        f"[pools.lab]\nkind = 'command'\nhosts = 'a'\npython = '{sys.executable}'\n"
        "start = 'env HOST={host} unshare --uts sh -c \"hostname node-a; exec {python}\"'\n",
    )
    book = kernels()
    book.ok("%distributed_pool use lab")
    _pids(book)
    lines = _confined(book)
    assert any(re.search(r"ranks 0-1 of lab: node-a: .*cores?", line) for line in lines), lines
