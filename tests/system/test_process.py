"""What a process of ours does to its own place in the system."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jupyter_distrib.system import process
from tests.notebook import ROOT


def run(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        **options,
    )


def test_streams_are_taken_at_every_level(tmp_path: Path) -> None:
    program = """
    import ctypes, os, subprocess, sys
    from jupyter_distrib.system import process
    out, err = (os.open(path, os.O_WRONLY | os.O_CREAT) for path in sys.argv[1:3])
    process.redirect_streams(out, err)
    print("python ü \\ud800")
    ctypes.CDLL(None).puts(b"c")
    os.write(1, b"descriptor\\n")
    subprocess.run("echo child; echo child-err >&2", shell=True)
    sys.stderr.write("err\\n")
    try:
        input("name? ")
    except EOFError as error:
        print(str(error)[:32])
    sys.stdout.write("held back")
    process.flush_streams()
    os._exit(0)
    """
    out, err = tmp_path / "out", tmp_path / "err"
    done = run(program, str(out), str(err))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = out.read_text()
    assert text.startswith("python ü \\ud800\nc\ndescriptor\nchild\n")
    assert "no keyboard: input()" in text
    assert text.endswith("held back")
    assert err.read_text() == "child-err\nerr\n"


def test_a_closed_stream_is_no_trouble() -> None:
    done = run(
        """\
        import sys
        from jupyter_distrib.system import process
        sys.stdout.close(); sys.stderr = None
        process.flush_streams()"""
    )
    assert done.returncode == 0


def test_a_process_dies_with_its_parent() -> None:
    program = """
    import os, sys, time
    from jupyter_distrib.system import process
    parent = os.getpid()
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        process.die_with_parent(parent)
        os.write(write_fd, str(os.getpid()).encode())
        time.sleep(60)
    print(os.read(read_fd, 20).decode(), flush=True)
    os._exit(0)
    """
    from tests.processes import wait_until_gone

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=20,
    )
    assert wait_until_gone([int(done.stdout)], 5) == []


def test_a_process_whose_parent_is_gone_already_ends() -> None:
    done = run("""\
        from jupyter_distrib.system import process
        process.die_with_parent(2**22 - 1)
        print('never')""")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_parent_that_is_a_zombie_is_gone() -> None:
    """A killed agent stays one for as long as the kernel that started it lives."""
    program = """
    import os, sys
    from jupyter_distrib.system import process
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    process.die_with_parent(zombie)
    """
    assert run(program).returncode == 1


def test_an_orphan_belongs_to_the_next_subreaper() -> None:
    program = """
    import os
    from jupyter_distrib.system import process
    process.become_subreaper()
    me = os.getpid()
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        if process.fork_orphan() == 0:
            process.die_with_parent(me)
            os.write(write_fd, str(os.getppid() == me).encode())
            os._exit(0)
        os._exit(0)
    print(os.read(read_fd, 10).decode())
    """
    assert run(program).stdout == "True\n"


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    sys.platform != "linux"
    or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1)
    or not HUGE_PAGES.exists()
    or "[never]" in HUGE_PAGES.read_text(),
    reason="this system has no MADV_COLLAPSE (Linux 6.1), or no huge pages",
)
def test_memory_that_is_forked_often_is_in_huge_pages() -> None:
    program = """
        import mmap, re
        from jupyter_distrib.system import process
        block = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_NOHUGEPAGE)
        block[:: 4096] = bytes(16384)
        block.madvise(mmap.MADV_HUGEPAGE)
        process.gather_memory()
        print(re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
        assert block[:] == bytes(64 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) >= 32 << 10, "kB"


def test_streams_stay_as_they_were_where_too_many_files_are_open() -> None:
    code = """
import os, resource
from jupyter_distrib.system import process
before = os.fstat(1).st_ino, len(os.listdir("/proc/self/fd"))
free = os.dup(0)
os.close(free)
for more in (0, 1, 2, 3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        process.renew_streams()
    except OSError as error:
        assert error.errno == 24
    else:
        raise SystemExit(f"{more} descriptors are not enough")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
assert (os.fstat(1).st_ino, len(os.listdir("/proc/self/fd"))) == before
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_program_that_is_missing_is_not_said_to_be_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # so says Python of a PATH that one may not search
    assert process.why_not_started("sbatch", error) == "No such file or directory"
    (tmp_path / "sbatch").write_text("")
    assert process.why_not_started("sbatch", error) == "Permission denied"
    assert process.why_not_started("./sbatch", error) == "Permission denied"


def test_a_limit_of_memory_is_among_the_reasons_for_no_more_processes() -> None:
    program = textwrap.dedent("""\
        import resource, sys
        if sys.argv[1] == "limited":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
        from jupyter_distrib.system import process
        print(process.TOO_MANY_PROCESSES)""")
    command = [sys.executable, "-c", program]
    limited, free = (
        subprocess.run([*command, how], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for how in ("limited", "free")
    )
    assert "(ulimit -v, which limits its memory; ulimit -u, or" in limited
    assert "ulimit -v" not in free
