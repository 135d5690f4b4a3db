"""Large values that have not changed are not sent again, in real kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until

SENT = "import jupyter_distrib.kernel.session.session as _s\n_cache = _s.current().sent_values\n"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as notebook:
        notebook.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import numpy as np
                import torch
            """)
            + SENT
        )
        yield notebook


def segments(notebook: Notebook) -> set[str]:
    return set(eval(notebook.ok("list(_cache._segments)").result))


def test_a_cell_sees_what_the_notebook_has_and_never_what_a_cell_wrote(notebook: Notebook) -> None:
    notebook.ok(
        dedent("""\
            x = np.arange(1_000_000)
            t = torch.arange(1_000_000.0)
            view = x[10:20]""")
    )
    cell = dedent("""\
        %%distributed --ranks 2
        seen = int(x.sum()), float(t[5]), int(x[15])
        x += 1
        t.zero_()
        print('saw', seen)""")
    for _ in range(2):
        out = notebook.ok(cell).text
        assert "[0-1] saw (499999500000, 5.0, 15)" in out
    before = segments(notebook)
    assert before
    notebook.ok(cell)
    assert segments(notebook) == before
    notebook.ok("view[5] = 0\nt[5] = 7")
    out = notebook.ok(cell).text
    assert "[0-1] saw (499999499985, 7.0, 0)" in out


def test_a_queued_run_has_the_values_of_its_submission(notebook: Notebook) -> None:
    notebook.ok(
        dedent("""\
            from jupyter_distrib import distributed
            q = np.ones(2_000_000)
            @distributed(ranks=2)
            def f(a):
                return a.sum()""")
    )
    notebook.ok(
        dedent("""\
            runs = []
            for i in range(4):
                q[3] = i
                runs.append(f.submit(q))""")
    )
    assert notebook.ok("[int(r.result()[0]) for r in runs]").result == "[1999999, 2000000, 2000001, 2000002]"


def test_a_run_that_restarts_has_its_values(notebook: Notebook) -> None:
    notebook.ok("y = np.full(1_000_000, 3)")
    notebook.ok("%%distributed --ranks 2\ny[0]")
    cell = dedent("""\
        %%distributed --ranks 2 --max-restarts 1
        import os
        if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':
            os.kill(os.getpid(), 9)
        print('sum', int(y.sum()))""")
    out = notebook.ok(cell).text
    assert "[0-1] sum 3000000" in out


def test_the_status_says_how_much_is_kept_and_the_end_of_the_ranks_frees_it(notebook: Notebook) -> None:
    notebook.ok("z = np.ones(3_000_000)\n%distributed_pool stop")
    assert segments(notebook) == set()
    notebook.ok("%%distributed --ranks 2\nz[0]")
    assert "24.0 MB of memory hold values that are not sent again" in notebook.ok("%distributed_status").text
    notebook.ok("%%distributed --ranks 2 --cache 0\nz[0]")
    assert "are not sent again" not in notebook.ok("%distributed_status").text
    notebook.ok("%%distributed --ranks 2\nz[0]")
    assert segments(notebook)
    notebook.ok("%distributed_pool stop")
    assert segments(notebook) == set()


def test_explain_says_what_would_be_sent_and_what_the_ranks_have(notebook: Notebook) -> None:
    explained = "%%distributed --explain --ranks 2\n(e[0], f[0])"
    notebook.ok("e, f = np.ones(1_000_000), np.ones(2_000_000)")
    assert "24.0 MB would be sent: the machines of the ranks have none of it yet." in notebook.ok(explained).text
    notebook.ok("%%distributed --ranks 2\n(e[0], f[0])")
    notebook.ok("e += 1")
    text = notebook.ok(explained).text
    assert re.search(r"8\.0 MB would be sent; 16\.0 MB has not changed since the machines of the ranks got it", text)
    notebook.ok("small = np.ones(1000)")
    assert "would be sent" not in notebook.ok("%%distributed --explain\nsmall[0]").text
    notebook.ok("%distributed_pool stop")
    assert "have none of it yet" in notebook.ok(explained).text


def holders(inode: int) -> set[int]:
    """The processes that have a memory open or mapped."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fds = {os.stat(fd).st_ino for fd in (folder / "fd").iterdir() if "memfd:jupyter_distrib" in os.readlink(fd)}
            mapped = re.findall(r" (\d+) +/memfd:jupyter_distrib", (folder / "maps").read_text())
        except OSError:
            continue
        if inode in fds | set(map(int, mapped)):
            found.add(int(folder.name))
    return found


@pytest.mark.slow
def test_the_memory_is_gone_when_the_kernel_is_killed(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.ok(
            dedent("""\
                %load_ext jupyter_distrib
                import numpy as np, os
                x = np.ones(2_000_000)
            """)
            + SENT
        )
        notebook.ok("%%distributed --ranks 2\nx[0]")
        inode = int(notebook.ok("os.fstat(next(iter(_cache._segments.values())).fd).st_ino").result)
        kernel, fd = eval(notebook.ok("os.getpid(), next(iter(_cache._segments.values())).fd").result)
        assert kernel in holders(inode)
        if os.getuid() == 0:
            other = subprocess.run(["cat", f"/proc/{kernel}/fd/{fd}"], user=65534, capture_output=True, check=False)
            assert b"Permission denied" in other.stderr, "no other user may read it"
        shm = set(os.listdir("/dev/shm"))
        os.kill(kernel, 9)
        assert wait_until(lambda: not holders(inode))
        assert not {name for name in set(os.listdir("/dev/shm")) - shm if "jupyter_distrib" in name}


WHERE = """
def where(array):
    at = array.__array_interface__["data"][0]
    for line in open("/proc/self/maps"):
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= at < end and "memfd" in line:
            return int(line.split()[4])
"""
"""A function that tells in which memory of its machine an array lies."""


@pytest.mark.slow
def test_hosts_get_a_value_once_and_every_change(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.ok(f"%load_ext jupyter_distrib\nimport numpy as np\n{SENT}{WHERE}")
        notebook.ok(
            "%distributed_pool add far --kind command --hosts a:1,b:1 --nodes 2 --interface lo "
            f"--start 'env HOST={{host}} {{python}}' --python {sys.executable}"
        )
        notebook.ok("x, w, n = np.arange(5_000_000), np.ones(1_000_000), np.ones(1000)")

        def far(code: str, line: str = "") -> list[object]:
            notebook.ok(f"%%distributed --pool far --out o {line}\n{code}")
            return list(eval(notebook.ok("[o[rank] for rank in sorted(o)] if hasattr(o, 'keys') else list(o)").result))

        cell = dedent("""\
            s = int(x.sum()), int(n.sum()), where(x)
            x += 1
            s""")
        first = far(cell)
        assert [each[:2] for each in first] == [(12499997500000, 1000)] * 2
        for number in range(3):
            notebook.ok(f"n[:] = {number}")
            assert far(cell) == [(12499997500000, number * 1000, each[2]) for each in first]
        notebook.ok("x[7] = 0")
        changed = far(cell)
        assert [each[:2] for each in changed] == [(12499997499993, 2000)] * 2
        assert [each[2] for each in changed] != [each[2] for each in first]
        for number in range(3):
            notebook.ok(f"w[0] = {number}")
            got = far("int(x.sum()), int(w.sum()), where(x)")
            assert got == [(12499997499993, 999_999 + number, each[2]) for each in changed]
        notebook.ok("%distributed_pool stop far")
        assert [each[:2] for each in far(cell)] == [(12499997499993, 2000)] * 2
        assert far("where(x)", "--cache 0") != far("where(x)", "--cache 0")
