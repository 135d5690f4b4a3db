"""`--profile`: real kernels and ranks, whose traces are read."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.notebook import Notebook
from tests.processes import agents, wait_until, wait_until_gone

pytestmark = pytest.mark.slow  # each trains on ranks

TRAINING = """
import time, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, STEPS + 1):
    loss = model(torch.full((4, 16), rank + 1.0)).sum()
    time.sleep(0.03 * (rank == 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    EXTRA
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def book(folder: Path) -> Iterator[Notebook]:
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib\nimport jupyter_distrib")
        yield book


def training(steps: int = 20, extra: str = "pass") -> str:
    return TRAINING.replace("STEPS", str(steps)).replace("EXTRA", extra)


def trace(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the newest trace."""
    newest = max(folder.glob("runs/*/trace.json.gz"), key=lambda path: path.stat().st_mtime_ns)
    with gzip.open(newest, "rt") as file:
        return json.load(file)["traceEvents"]  # type: ignore[no-any-return]


def steps(events: list[dict[str, Any]], rank: int) -> dict[str, tuple[float, float]]:
    """Return the beginning and the end of each step of a rank, in milliseconds."""
    found = [event for event in events if event.get("cat") == "step" and event["name"].startswith("step ")]
    return {
        event["name"]: (event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000)
        for event in found
        if event["pid"] == 100 * rank
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_leaves_one_trace_of_all_ranks_with_their_clocks_aligned(
    book: Notebook, folder: Path, strategy: str
) -> None:
    shown = book.ok(f"%%distributed --ranks 2 --strategy {strategy} --profile 5\n{training()}")

    assert "shows steps 4-8 on ranks 0-1" in shown.text
    assert "A step takes" in shown.text
    assert "Rank 1 works" in shown.text
    assert 'trace.json.gz" download>' in "".join(shown.displays_html.values())
    events = trace(folder)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    first, second = steps(events, 0), steps(events, 1)
    assert list(first) == list(second) == [f"step {number}" for number in range(4, 9)]
    # Both ranks leave the reduction of the same step, of which rank 1 takes 30 ms.
    apart = sorted(abs(first[name][1] - second[name][1]) for name in first)
    assert apart[len(apart) // 2] < 25
    assert {event["pid"] for event in events if event["name"] == "aten::addmm"} == {0, 100}


def test_a_cell_without_steps_is_recorded_as_a_whole_and_its_own_profiler_has_the_way(
    book: Notebook, folder: Path
) -> None:
    shown = book.ok(
        dedent("""\
            %%distributed --ranks 2 --profile
            import torch
            for _ in range(9):
                torch.ones(3).cumsum(0)""")
    )

    assert "of the cell on ranks 0-1" in shown.text
    assert [event["pid"] for event in trace(folder) if event["name"] == "aten::cumsum"].count(100) == 9

    own = dedent("""\
        with torch.profiler.profile() as found:
            torch.ones(3).cumsum(0)
        len(found.events()) > 0""")
    shown = book.ok(f"%%distributed --ranks 2 --profile\nimport torch\n{own}")
    assert "ranks 0-1: the cell uses torch's profiler itself, so --profile leaves it alone" in shown.text
    assert shown.result == "ranks 0-1: True"


def test_a_trace_holds_what_came_before_an_exception_and_before_a_death(book: Notebook, folder: Path) -> None:
    failed = book.fails(
        "%%distributed --ranks 2 --strategy ddp --profile\n"
        + training(extra="assert rank == 0 or step < 6, 'half way'")
    )
    assert "half way" in failed.text
    assert "shows steps 4-6 on ranks 0-1" in failed.text
    assert list(steps(trace(folder), 1)) == ["step 4", "step 5", "step 6"]

    lost = book.fails(
        "%%distributed --ranks 2 --strategy ddp --profile\nimport os\n"
        + training(extra="rank == 1 and step == 6 and os._exit(3)")
    )
    assert "Rank 1: it ended before it could send its part" in lost.text
    assert not steps(trace(folder), 1)


def test_a_detached_run_and_one_that_is_stopped_leave_a_trace_and_the_ranks_stay(book: Notebook, folder: Path) -> None:
    book.ok(f"%%distributed --ranks 2 --strategy ddp --profile --detach --out job\n{training(400)}")
    # The trace is there while the training goes on.
    while "shows steps 4-11" not in book.ok("[note.text for note in job.record.notes]").result:
        assert book.ok("job.done()").result == "False"
    book.ok("job.cancel()\njob.wait_ended(30)")
    assert len(steps(trace(folder), 0)) == 8

    processes = dedent("""\
        %%distributed --ranks 2
        import os
        os.getpid()""")
    before = book.ok(processes).result
    book.start(
        f"%%distributed --ranks 2 --strategy ddp --profile 300\n{training(400, 'step == 20 and print(chr(8226))')}"
    )
    book.until("\u2022")
    book.interrupt()
    stopped = book.finish()
    assert "shows steps 4-" in stopped.text
    assert book.ok(processes).result == before


def test_a_script_is_profiled_too(book: Notebook, folder: Path) -> None:
    (folder / "train.py").write_text(f"import os\nrank = int(os.environ['RANK'])\n{training()}")

    assert (
        "shows steps 4-11 on ranks 0-1" in book.ok("%distributed_run --ranks 2 --strategy ddp --profile train.py").text
    )


STARTER = """#!/bin/sh
host=$1
shift
[ "$host" = a ] || exec unshare --time --monotonic {ahead_s} "$@"
exec "$@"
"""
CLOCK = "import time; print(time.monotonic())"


def test_the_clocks_of_two_hosts_are_aligned(book: Notebook, folder: Path, tmp_path: Path) -> None:
    """A host's clock runs since it was started: here, in a time namespace of Linux."""
    ahead_s = 100_000
    command = ["unshare", "--time", "--monotonic", str(ahead_s), sys.executable, "-c", CLOCK]
    ahead = subprocess.run(command, capture_output=True, text=True, check=False)
    if ahead.returncode or float(ahead.stdout) < ahead_s:
        pytest.skip(f"no time namespaces here: {ahead.stderr}")
    (tmp_path / "start").write_text(STARTER.format(ahead_s=ahead_s))
    (tmp_path / "start").chmod(0o755)
    book.ok(
        f"%distributed_pool add clocks --kind command --hosts a,b --nodes 2 --start '{tmp_path}/start {{host}} {{python}}' "
        f"--python {sys.executable} --interface lo"
    )

    shown = book.ok(
        f"%%distributed --pool clocks --ranks 2 --strategy ddp --profile 5 --out clocks\n{training()}\ntime.monotonic()"
    )

    own_s = float(book.ok("clocks[1] - clocks[0]").result)
    assert abs(own_s - ahead_s) < 60
    assert "shows steps 4-8 on ranks 0-1" in shown.text
    first, second = steps(trace(folder), 0), steps(trace(folder), 1)
    # Both ranks leave the reduction of the same step.
    apart_ms = sorted(abs(first[name][1] - second[name][1]) for name in first)
    assert apart_ms[len(apart_ms) // 2] < 25, apart_ms


KILLER = """
import glob, os, sys
while not glob.glob(sys.argv[1] + "/**/trace.json*", recursive=True):
    pass
os.kill(int(sys.argv[2]), 9)
"""
"""A program that kills a process as soon as that has begun to write its trace."""


def test_nothing_is_left_of_a_trace_whose_rank_is_killed_while_it_writes(tmp_path: Path) -> None:
    temporary, runtime = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    with Notebook(tmp_path, {"TMPDIR": str(temporary), "JUPYTER_DISTRIB_RUNTIME_DIR": str(runtime)}) as book:
        book.ok(f"%load_ext jupyter_distrib\nkiller, temporary = {KILLER!r}, {str(temporary)!r}")
        many = "for _ in range(5000): torch.ones(1).add_(1)"
        outcome = book.cell(
            dedent("""\
                %%distributed --ranks 1 --profile
                import os, subprocess, sys
                subprocess.Popen([sys.executable, '-c', killer, temporary, str(os.getpid())])
            """)
            + training(8, many)
        )
        assert outcome.ename == "RankLost", outcome.text
        assert wait_until(lambda: not left(temporary), 10), left(temporary)
    (agent,) = agents(runtime)
    os.kill(agent, signal.SIGTERM)
    assert wait_until_gone([agent]) == []


def left(temporary: Path) -> list[str]:
    return [str(path) for path in temporary.rglob("*") if "trace.json" in path.name or path.name.startswith("jd-")]
