"""All logs together stay below a total, in real notebooks: what goes, what stays, and what the user is told."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.processes import agents, wait_until, wait_until_gone
from tests.ray.conftest import write_trusted

pytestmark = pytest.mark.slow

TOTAL = 2_000_000
FLOOD = "%%distributed --ranks 2 --out _\nfor number in range(3000): print(f'{number:099}')"
"""600 kB of two ranks."""
RUN = "from jupyter_distrib.kernel.session import session as _s; print(_s.current().history[-1].id)"


@pytest.fixture
def books(tmp_path: Path) -> Iterator[list[Notebook]]:
    """Two notebooks with agents of their own that share the folder of logs, as in two containers."""
    runtimes = [tmp_path / "1", tmp_path / "2"]
    env = {"JUPYTER_DISTRIB_LOG_DIR": str(tmp_path / "logs"), "JUPYTER_DISTRIB_LOG_TOTAL_BYTES": str(TOTAL)}
    made = [Notebook(tmp_path, {**env, "JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) for runtime in runtimes]
    for book in made:
        book.ok("%load_ext jupyter_distrib")
    yield made
    for book in made:
        book.close()
    found = [agent for runtime in runtimes for agent in agents(runtime)]
    for agent in found:
        os.kill(agent, signal.SIGTERM)
    assert wait_until_gone(found, 20) == []


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "logs").rglob("*.log"))


def test_old_logs_go_while_notebooks_work_and_those_of_a_run_that_goes_on_stay(
    books: list[Notebook], tmp_path: Path
) -> None:
    one, two = books
    one.ok(
        dedent("""\
            %%distributed --ranks 1 --detach --out job
            print('going on', flush=True)
            import time
            time.sleep(600)""")
    )
    detached = one.ok(RUN).stdout.strip()
    assert wait_until((tmp_path / "logs" / detached / "rank0.log").exists)
    first = ""
    said = []
    for _ in range(8):
        said.append(two.ok(FLOOD).view)
        first = first or two.ok(RUN).stdout.strip()
        assert size_bytes(tmp_path) < TOTAL
    assert sum("oldest run" in view for view in said) == 1, "said once"
    assert "all logs together may take 2.0 MB (JUPYTER_DISTRIB_LOG_TOTAL_BYTES)" in "".join(said)

    error = two.fails(f"%distributed_logs {first}")
    assert f"PoolError: the logs of run {first} were removed" in error.traceback
    assert len(two.ok("%distributed_logs").stdout) > 600_000
    assert one.ok(f"%distributed_logs {detached}").stdout == "--- rank 0\ngoing on\n"
    assert two.fails(f"%distributed_logs {first} --json").ename == "PoolError"
    one.fails("job.cancel()\njob.result(timeout_s=20)")


def test_a_run_that_alone_exceeds_the_total_keeps_its_beginning_and_its_end(
    books: list[Notebook], tmp_path: Path
) -> None:
    book = books[0]
    view = book.ok(FLOOD.replace("3000", "30_000")).view
    assert "is truncated: all logs together may take 2.0 MB" in view
    assert size_bytes(tmp_path) < TOTAL
    log = book.ok("%distributed_logs --rank 1").stdout
    assert log.startswith(f"{0:099}\n")
    assert "[log truncated here: all logs together may take 2.0 MB" in log
    assert log.endswith(f"{29_999:099}\n")


def test_agents_on_other_nodes_have_the_limits(tmp_path: Path) -> None:
    """A host whose own environment lacks them, as ssh's does."""
    names = ("JUPYTER_DISTRIB_LOG_LIMIT_BYTES", "JUPYTER_DISTRIB_LOG_TOTAL_BYTES")
    unset = " ".join(f"-u {name}" for name in names)
    start = f"env {unset} HOST={{host}} {{python}}"
    write_trusted(
        tmp_path,
        f'pool = "far"\n[pools.far]\nkind = "command"\nhosts = "a"\nstart = "{start}"\npython = "{sys.executable}"\n'
        'interface = "lo"\nranks = 1\n',
    )
    with Notebook(tmp_path, dict(zip(names, ("100000", "50000000"), strict=True))) as book:
        book.ok("%load_ext jupyter_distrib")
        outcome = book.ok(
            dedent("""\
                %%distributed
                import os
                os.environ['JUPYTER_DISTRIB_LOG_TOTAL_BYTES']
                print('x' * 200_000)""")
        )
        assert "the log of rank 0 is truncated: it has reached 100.0 kB" in outcome.text, outcome.text[-2000:]
