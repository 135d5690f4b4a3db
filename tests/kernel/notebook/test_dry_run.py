"""`--dry-run` as it is typed in a notebook, and the end of its process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.kernel.notebook import dry_run
from tests import processes
from tests.dry_run.play import play, prepared
from tests.dry_run.trainings import GOOD, LIMIT_S, WRONG
from tests.notebook import ROOT, Notebook, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CAPTURED = """\
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 10))
data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,)))
before = sum(each.double().sum().item() for each in model.parameters())
"""
TRAINING = """\
opt = torch.optim.AdamW(model.parameters())
for x, y in DataLoader(data, batch_size=64):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def played(book: Notebook, code: str) -> Outcome:
    """Run a cell with several dry runs, which take long on a busy machine."""
    outcome = book.cell(code, LIMIT_S)
    assert outcome.status == "ok", outcome.text
    return outcome


def test_a_training_of_captured_values_is_played_and_nothing_of_the_notebook_changes(book: Notebook) -> None:
    book.ok(CAPTURED)
    outcome = played(book, f"%%distributed --gpus 8 --strategy fsdp --gpu-type A100 --dry-run\n{TRAINING}")
    assert outcome.result.startswith("dry run: fits · --strategy fsdp · rank 0 of 8 on A100 (85.0 GB)\n[")
    assert "optimizer state" in outcome.result
    assert "line 5" in outcome.result
    assert "1/8 of 2,142,218 parameters" in outcome.result
    assert "<table>" in outcome.result_html
    book.ok("assert before == sum(each.double().sum().item() for each in model.parameters())")
    book.ok(
        dedent("""\
            from jupyter_distrib.kernel.session import session
            assert [*session.current().pools.groups()] == [] and session.current().history == ()
            assert 'opt' not in globals()""")
    )


def test_an_error_of_the_cell_is_part_of_the_answer(book: Notebook) -> None:
    book.ok(CAPTURED)
    wrong = TRAINING.replace("model(x)", "model(x[:, 1:])")
    outcome = played(book, f"%%distributed --gpus 8 --strategy ddp --dry-run\n{wrong}")
    assert outcome.result.startswith("dry run: fails")
    assert "line 4: loss = nn.functional.cross_entropy(model(x[:, 1:]), y)" in outcome.result
    assert "RuntimeError: " in outcome.result

    timed = played(
        book, f"%%distributed --gpus 8 --strategy ddp --dry-run\n{wrong.replace('loss =', '%time loss =', 1)}"
    )
    assert "line 4: %time loss = nn.functional.cross_entropy(model(x[:, 1:]), y)" in timed.result
    assert "get_ipython" not in timed.result


def waiting_dry_runs(book: Notebook, place: Path) -> list[int]:
    """Start four dry runs that wait. Return their processes, their forkserver, and what they have started."""
    os.mkfifo(place)
    book.start(
        dedent(f"""\
            %%distributed --gpus 2 --dry-run
            import os, subprocess, time
            child = subprocess.Popen(['sleep', '600'])
            file = open({str(place)!r}, 'w')
            print(os.getpid(), os.getppid(), child.pid, file=file, flush=True)
            time.sleep(600)""")
    )
    with place.open() as file:  # as long as one of them lives, there is no end of the file
        return [int(pid) for _ in range(4) for pid in file.readline().split()]


def test_stop_ends_all_processes_and_the_cell(book: Notebook, tmp_path: Path) -> None:
    pids = waiting_dry_runs(book, tmp_path / "pids")
    book.interrupt()
    outcome = book.finish()
    assert outcome.ename == "KeyboardInterrupt"
    assert len(set(pids)) == 4 + 1 + 4
    assert processes.wait_until_gone(pids) == []


def test_dry_runs_end_with_the_kernel(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        pids = waiting_dry_runs(book, tmp_path / "pids")
        os.kill(book.pid, signal.SIGKILL)
        own = [pid for place, pid in enumerate(pids) if place % 3 < 2]
        assert processes.wait_until_gone(own) == []
        for pid in pids[2::3]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_cell_that_takes_too_long_cannot_be_run_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "LIMIT_S", 2.0)
    found = play("import time\ntime.sleep(600)")
    assert found.verdict == "cannot be run dry"
    assert "within 2 s" in found.refused


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; os.write(2, b'no GPU\\n'); os._exit(3)", "ended with exit code 3: no GPU."),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
        ("import os, time; os.kill(os.getppid(), 9); time.sleep(600)", "was ended by SIGKILL"),
    ],
)
def test_a_native_abort_says_nothing_about_the_memory(source: str, how: str) -> None:
    found = play(source)
    assert found.verdict == "cannot be run dry"
    assert f"The process of the dry run {how}" in found.refused
    assert "about a real run" in found.refused


def test_an_abort_leaves_the_other_dry_runs() -> None:
    with dry_run.Forkserver() as forkserver:
        aborted, other = forkserver.play([prepared("import os; os.abort()"), prepared(GOOD, "ddp")])
        (later,) = forkserver.play([prepared(GOOD, "ddp")])
    assert "was ended by SIGABRT" in aborted.refused
    assert other.steps == later.steps == 2
    assert other.peak_bytes == later.peak_bytes > 0


def test_a_dry_run_sees_nothing_of_the_one_before_or_of_threads() -> None:
    planted = dedent("""\
        import json, os, sys, torch
        sys.modules['planted'] = json
        torch.planted = os.environ['PLANTED'] = '1'
    """)
    look = dedent("""\
        import os, sys, torch
        threads = len(os.listdir(f'/proc/{os.getppid()}/task'))
        raise ValueError('planted' in sys.modules, hasattr(torch, 'planted'), 'PLANTED' in os.environ, threads)""")
    with dry_run.Forkserver() as forkserver:
        (before,) = forkserver.play([prepared(f"{planted}{GOOD}", "fsdp")])
        (found,) = forkserver.play([prepared(look)])
    assert before.steps == 2
    assert found.error is not None
    assert found.error.text == "(False, False, False, 1)"


# ------------------------------------------------------------------------------------------------ what is asked for


def test_without_a_strategy_those_that_are_possible_stand_side_by_side(book: Notebook) -> None:
    book.ok(CAPTURED)
    outcome = played(book, f"%%distributed --gpus 8 --gpu-type T4 --dry-run\n{TRAINING}\n")
    rows = [line.split("  ")[0] for line in outcome.result.splitlines()[:5]]
    assert rows == ["strategy", "none", "ddp", "fsdp", "fsdp --precision bf16"]
    assert "all that the data has for two steps; the cell has 64" in " ".join(outcome.result.split())


def test_the_largest_batch_is_found_by_a_line_and_a_check(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import torch, torch.nn as nn
            class Long(torch.utils.data.Dataset):
                def __len__(self): return 10_000_000
                def __getitem__(self, i): return torch.randn(10_000_000)
        """)
    )
    outcome = played(
        book,
        dedent("""\
            %%distributed --gpus 8 --gpu-type T4 --strategy ddp --dry-run
            model = nn.Linear(10_000_000, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in torch.utils.data.DataLoader(Long(), batch_size=4):
                model(x).sum().backward(); opt.step(); opt.zero_grad()
        """),
    )
    found = re.search(r"about (\d+) for each rank, with a peak of (\S+) GB; the cell has 4\.", outcome.result)
    assert found is not None, outcome.result
    # 90% of 15.6 GB less 1.6 GB is 12.48 GB; each sample takes 0.08 GB, since a batch lives until the next one is there.
    assert 153 <= int(found[1]) <= 156
    assert 12.4 <= float(found[2]) <= 12.5


def test_first_starts_the_cell_only_if_it_fits(book: Notebook) -> None:
    book.ok(CAPTURED)
    outcome = book.fails(f"%%distributed --ranks 2 --dry-run first\n{TRAINING.replace('model(x)', 'model(x[1:, 1:])')}")
    assert "The cell was not started: the dry run says that it fails" in outcome.traceback
    assert "line 4: loss" in outcome.view
    book.ok("from jupyter_distrib.kernel.session import session\nassert session.current().history == ()")
    outcome = played(book, f"%%distributed --ranks 2 --strategy ddp --dry-run first\n{TRAINING}\nrank")
    assert outcome.result == "rank 0: 0\nrank 1: 1"


def test_auto_takes_the_first_strategy_that_fits_and_says_why(book: Notebook) -> None:
    book.ok(CAPTURED)
    outcome = played(book, f"%%distributed --ranks 2 --strategy auto\n{TRAINING}\ntype(model).__name__")
    assert "--strategy auto took ddp: its peak is" in outcome.text
    assert "Sequential wrapped" in outcome.text


def test_a_function_is_played_with_its_arguments(book: Notebook) -> None:
    book.ok(CAPTURED)
    body = "".join(f"    {line}\n" for line in TRAINING.splitlines())
    book.ok(f"import jupyter_distrib\ndef train(width):\n{body}")
    outcome = played(
        book, "jupyter_distrib.distributed(gpus=8, strategy='ddp', gpu_type='H100', dry_run=True)(train).distributed(3)"
    )
    assert outcome.result.startswith("dry run: fits · --strategy ddp · rank 0 of 8 on H100")
    outcome = book.fails("jupyter_distrib.distributed(gpus=8, dry_run=True)(train).submit(3)")
    assert "dry_run has its answer at once" in outcome.traceback


OF_ONE_DEVICE = """\
import asyncio, functools, torch, torch.nn as nn
def main(width=16):
    model = nn.Linear(16, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, width, device=model.weight.device)).sum().backward()
        opt.step(); opt.zero_grad()
async def later(*args):
    await asyncio.sleep(0)
    main(*args)
    await asyncio.sleep(0)
"""
WAYS = {
    "await": "await later({})",
    "gather": "await asyncio.gather(later({}))",
    "a loop of its own": "asyncio.run(later({}))",
    "a decorated function": dedent("""\
        @functools.wraps(main)
        def wrapped(*args): main(*args)
        wrapped({})"""),
    "%time": "%time main({})",
    "%run": "%run train.py {}",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_is_found_however_the_cell_begins_it(book: Notebook, way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{OF_ONE_DEVICE}\nimport sys\nmain(*map(int, sys.argv[1:]))\n")
    book.ok(f"import os; os.chdir({str(tmp_path)!r})")
    found = {}
    for width in ("", "17"):
        cell = f"{OF_ONE_DEVICE}{WAYS[way].format(width)}"
        found[width] = played(book, f"%%distributed --gpus 2 --gpu-type A10 --strategy ddp --dry-run\n{cell}").result
    assert found[""].startswith("dry run: fits"), found[""]
    assert found["17"].startswith("dry run: fails"), found["17"]
    assert re.search(r"line [67]: model\(torch.randn\(8, width", found["17"]), found["17"]


def test_two_notebooks_play_at_once(book: Notebook, tmp_path: Path) -> None:
    """Each waits for the other in its dry run."""
    ends = [tmp_path / "one", tmp_path / "other"]
    for each in ends:
        os.mkfifo(each)
    with Notebook(tmp_path) as other:
        other.ok("%load_ext jupyter_distrib")
        for each, (own, theirs) in ((book, ends), (other, ends[::-1])):
            order = (f"open({str(own)!r}, 'w')", f"open({str(theirs)!r})")
            waits = "; ".join(order if each is book else order[::-1])
            each.start(f"%%distributed --gpus 2 --strategy ddp --dry-run\n{waits}\n{OF_ONE_DEVICE}main()")
        results = [each.finish(LIMIT_S).result for each in (book, other)]
    assert all(each.startswith("dry run: fits") for each in results), results


@pytest.mark.parametrize(("width", "status"), [("64", 0), ("63", 1)])
def test_a_script_is_played_in_a_shell(tmp_path: Path, width: str, status: int) -> None:
    program = "import sys, torch, torch.nn as nn\nmodel = nn.Linear(64, 8).cuda()\n"
    program += "opt = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(3):\n"
    program += "    model(torch.randn(4, int(sys.argv[1]), device='cuda')).sum().backward()\n    opt.step()\n"
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-c", "from jupyter_distrib.kernel.notebook.command_line import main; main()"]
    done = subprocess.run(
        [*command, "run", "--gpus", "4", "--strategy", "none", "--dry-run", "train.py", width],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("dry run: fits" if status == 0 else "train.py, line 5: model(") in done.stdout


def test_a_detached_cell_and_a_sweep_are_started_only_if_they_fit(book: Notebook) -> None:
    head = "%%distributed --ranks 1 --strategy ddp --dry-run first"
    book.ok(
        dedent("""\
            width = 16
            from jupyter_distrib.kernel.session import session
            before = session.current().history""")
    )
    wide = GOOD.replace("randn(8, 16", "randn(8, width")
    for more, source in (("--detach", WRONG), ("--sweep width=[16,17]", wide.replace("Linear(16", "Linear(15"))):
        refused = book.cell(f"{head} {more}\n{source}", LIMIT_S)
        assert "the dry run says" in refused.traceback, refused.text
    book.ok("assert session.current().history == before")
    started = book.cell(f"{head} --detach --out run\n{GOOD}", LIMIT_S)
    assert started.status == "ok", started.text
    book.ok("run.result()")
    swept = book.cell(f"{head} --sweep width=[16,17] --out runs\n{wide.replace('Linear(16', 'Linear(width')}", LIMIT_S)
    assert swept.status == "ok", swept.text
    assert book.ok("print(len(runs))").stdout == "2\n"


KEPT = """\
%%distributed --ranks 2 --strategy {strategy} --keep model,opt
import torch, torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 4096), nn.Linear(4096, 10)
    def forward(self, x): return self.down(self.up(x).relu())
model = Net()
opt = torch.optim.AdamW(model.parameters())
for x in torch.utils.data.DataLoader(torch.randn(64, 512), batch_size=16):
    model(x).sum().backward(); opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_cell_that_reads_kept_values_is_played_with_their_shapes(book: Notebook, strategy: str) -> None:
    book.ok(KEPT.format(strategy=strategy))
    going_on = """\
for x in torch.utils.data.DataLoader(torch.randn(64, 512), batch_size=16):
    model(x).sum().backward(); opt.step(); opt.zero_grad()
"""
    outcome = played(book, f"%%distributed --ranks 2 --strategy {strategy} --dry-run\nimport torch\n{going_on}")
    assert outcome.result.startswith("dry run: fits"), outcome.text
    shown = book.ok("print(_.by_kind['parameters'], _.by_kind['optimizer state'], _.steps)").stdout
    parameters, states, steps = map(int, shown.split())
    all_bytes = (512 * 4096 + 4096 + 4096 * 10 + 10) * 4
    share_bytes = all_bytes / (2 if strategy == "fsdp" else 1)
    assert parameters == pytest.approx(share_bytes, rel=0.05)
    assert states == pytest.approx(2 * share_bytes, rel=0.05)
    assert steps == 2


def test_a_call_with_a_kept_value_is_played_with_its_shapes(book: Notebook) -> None:
    book.ok(KEPT.format(strategy="ddp"))
    book.ok(
        dedent("""\
            import torch
            from jupyter_distrib import distributed
            @distributed(ranks=2, strategy='ddp', dry_run=True)
            def go_on(model, more):
                opt = torch.optim.SGD(model.parameters())
                for _ in range(2): model(torch.randn(16, 512)).sum().backward(); opt.step(); opt.zero_grad()
        """)
    )
    assert played(book, "go_on.distributed(model, more=[opt])").result.startswith("dry run: fits")


def test_a_value_whose_ranks_have_ended_has_no_shapes(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep kept\nkept = 1")
    book.ok("%distributed_pool stop")
    outcome = book.cell("%%distributed --ranks 2 --dry-run\nkept + 1")
    assert (
        "a dry run needs the shapes of `kept`, whose ranks have ended: run the cell that keeps it again" in outcome.text
    )
