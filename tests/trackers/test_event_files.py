"""Weights & Biases in its offline mode, and TensorBoard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.libraries.tensorboard import is_of_rank
from tests.notebook import Notebook

pytestmark = pytest.mark.slow
RUN = """\
for step in range(3):
    jupyter_distrib.report(loss=3.0 - step + rank, step=step)
until_s = time.monotonic() + 1.5
while time.monotonic() < until_s:
    pass"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def book(folder: Path) -> Iterator[Notebook]:
    for module in ("wandb", "tensorboard"):
        pytest.importorskip(module, reason=f"needs {module}: sh .ci/trackers")
    with Notebook(folder, env={"WANDB_MODE": "offline"}) as book:
        book.ok("%load_ext jupyter_distrib\nimport os, time, jupyter_distrib")
        yield book


SCALARS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
print(json.dumps([scalars, texts]))
"""


def test_tensorboard_has_the_numbers_in_a_folder_for_each_run_beside_the_notebook(book: Notebook, folder: Path) -> None:
    outcome = book.ok(f"%%distributed --ranks 2 --track tensorboard\n{RUN}")
    (run,) = (folder / "runs").iterdir()
    assert f"TensorBoard: %tensorboard --logdir runs (this run is in runs/{run.name})" in outcome.view
    done = subprocess.run([sys.executable, "-c", SCALARS, str(run)], capture_output=True, text=True, check=True)
    scalars, texts = json.loads(done.stdout)
    assert scalars["loss"] == [[0, 3.0], [1, 2.0], [2, 1.0]]
    assert scalars["rank_1/loss"] == [[0, 4.0], [1, 3.0], [2, 2.0]]
    assert all(scalars[f"system/rank_{rank}/memory_mb"][0][1] > 1 for rank in (0, 1))
    assert "| run.strategy | none |" in texts["run/parameters"]
    assert texts["run/cell"].startswith("    for step in range(3):")
    assert texts["run/state"] == "FINISHED"
    assert book.ok("import sys\n'torch' in sys.modules").result == "False"


def test_tensorboard_knows_a_run_that_failed(book: Notebook, folder: Path) -> None:
    before = set((folder / "runs").iterdir())
    book.fails("%%distributed --ranks 2 --track tensorboard\n1 / rank")
    (run,) = set((folder / "runs").iterdir()) - before
    done = subprocess.run([sys.executable, "-c", SCALARS, str(run)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[1]["run/state"] == "FAILED"


def test_a_folder_that_cannot_be_written_is_reported_in_one_sentence_and_the_run_is_good(
    book: Notebook, folder: Path
) -> None:
    book.ok(
        dedent("""\
            os.makedirs('other', exist_ok=True)
            os.chdir('other')
            open('runs', 'w').close()""")
    )
    outcome = book.ok("%%distributed --ranks 2 --track tensorboard\nrank")
    book.ok("os.chdir('..')")
    assert outcome.result == "rank 0: 0\nrank 1: 1"
    (line,) = (line for line in outcome.view.splitlines() if "tensorboard" in line)
    assert re.search(r"The observer tensorboard was dropped: \w+Error: .*runs.* The run is not affected\.$", line), line


HISTORY = """
import json, sys
from wandb.proto import wandb_internal_pb2

def entries(data):
    # LevelDB's log, behind a header of 7 bytes: blocks of 32 KB with pieces of entries, 1 whole, 2-4 first to last
    at, entry = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        entry += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield entry
            entry = b""

rows, run, code = [], None, None
for data in entries(open(sys.argv[1], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run = record.run
    elif kind == "history":
        rows.append({(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item})
    elif kind == "exit":
        code = record.exit.exit_code
config = {item.key: json.loads(item.value_json) for item in run.config.update}
print(json.dumps([rows, run.display_name, run.run_group, config, code]))
"""


def test_wandb_has_the_numbers_in_an_offline_run(book: Notebook, folder: Path) -> None:
    outcome = book.ok(f"%%distributed --ranks 2 --track wandb\n{RUN}\nos.environ['WANDB_RUN_GROUP']")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert f"W&B: run {file.stem.removeprefix('run-')}, offline" in outcome.view
    done = subprocess.run([sys.executable, "-c", HISTORY, str(file)], capture_output=True, text=True, check=True)
    rows, name, group, config, code = json.loads(done.stdout)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert [row["rank_1/loss"] for row in rows if "rank_1/loss" in row] == [4.0, 3.0, 2.0]
    assert any("system/rank_0/memory_mb" in row for row in rows)
    assert (name.startswith("Cell In["), config["run.strategy"], code) == (True, "none", 0)
    assert outcome.result == f"ranks 0-1: '{group}'"


def test_wandb_follows_the_runs_of_a_notebook_that_has_one_open(book: Notebook, folder: Path) -> None:
    before = set((folder / "wandb").glob("offline-run-*"))
    book.ok("import wandb\nopen_run = wandb.init(project='p', settings=wandb.Settings(console='off'))")
    outcome = book.ok("%%distributed --ranks 1\njupyter_distrib.report(loss=1.0)\nos.environ['WANDB_RUN_GROUP'] ")
    assert book.ok("wandb.run is open_run, open_run.id").result == f"(True, {outcome.result.removeprefix('rank 0: ')})"
    book.ok("open_run.finish()")
    assert len(set((folder / "wandb").glob("offline-run-*")) - before) == 2


def offline_runs(folder: Path) -> set[Path]:
    return set((folder / "wandb").glob("offline-run-*"))


def test_a_run_that_a_cell_begins_is_one_from_its_first_rank_and_is_closed_with_it(
    book: Notebook, folder: Path
) -> None:
    for value in (1.0, 2.0):
        before = offline_runs(folder)
        book.ok(
            dedent("""\
                @jupyter_distrib.distributed(ranks=2)
                def train(value):
                    import wandb
                    run = wandb.init(project='p', settings=wandb.Settings(console='off'))
                    wandb.log({'loss': value + int(os.environ['RANK'])})
            """)
        )
        book.ok(f"train.distributed({value})")
        (made,) = offline_runs(folder) - before
        (file,) = made.glob("*.wandb")
        book.ok(
            dedent("""\
                %%distributed --ranks 2
                import wandb
                assert wandb.run is None""")
        )
        done = subprocess.run([sys.executable, "-c", HISTORY, str(file)], capture_output=True, text=True, check=True)
        assert [row["loss"] for row in json.loads(done.stdout)[0] if "loss" in row] == [value]


@pytest.mark.parametrize("line", ["group='all'", ""])
def test_a_group_means_a_run_for_each_rank_and_so_does_no_tracking(book: Notebook, folder: Path, line: str) -> None:
    before = offline_runs(folder)
    book.ok(
        dedent(f"""\
            %%distributed --ranks 2{"" if line else " --track none"}
            import wandb
            wandb.init(project='p', settings=wandb.Settings(console='off'), {line}).finish()""")
    )
    assert len(offline_runs(folder) - before) == 2


def test_a_summary_writer_writes_on_the_first_rank_unless_its_folder_is_that_of_a_rank(
    book: Notebook, folder: Path
) -> None:
    cell = """
        from torch.utils.tensorboard import SummaryWriter
        for place in ("logs/all", f"logs/rank{rank}", f"logs/exp_{rank}"):
            with SummaryWriter(place) as writer:
                writer.add_scalar("loss", 1.0, 0)
                writer.add_scalars("both", {"a": 1.0, "b": 2.0}, 0)
                writer.add_hparams({"lr": 0.1}, {"accuracy": 1.0})
                writer.add_scalar("loss", 0.5, 1)"""
    book.ok("%%distributed --ranks 2" + dedent(cell))

    once = len(list((folder / "logs" / "rank0").rglob("events.*")))
    counts = {each.name: len(list(each.rglob("events.*"))) for each in (folder / "logs").iterdir()}
    assert counts == dict.fromkeys(("all", "rank0", "rank1", "exp_0", "exp_1"), once)
    book.ok("%%distributed --ranks 2\n" + dedent(cell).replace("rank{rank}", "new_1").replace("exp_{rank}", "v1"))
    assert len(list((folder / "logs" / "new_1").rglob("events.*"))) == once, "a number that is not the rank's"
    book.ok(
        "%%distributed --ranks 2\nif rank == world_size - 1:"
        + dedent(cell).replace("\n", "\n    ").replace("all", "last")
    )
    assert len(list((folder / "logs" / "last").rglob("events.*"))) == once, "one that only the last rank makes"


@pytest.mark.parametrize(
    ("place", "is_of_1", "if_asked"),
    [
        ("runs/rank1", True, True),
        ("runs/gpu_1_of_2", True, True),
        ("runs/1", True, True),
        ("runs/1/more", True, True),
        ("runs/exp_1", False, True),
        ("runs/rank10", False, False),
        ("runs/Nov28_11-21-31_host", False, False),
        ("/home/u/project1/runs/new", False, False),
        ("/mnt/node1/runs/a", False, False),
        ("runs/v1_resnet", False, False),
    ],
)
def test_a_folder_is_that_of_a_rank_if_its_name_says_so(place: str, is_of_1: bool, if_asked: bool) -> None:
    assert is_of_rank(place, "1", asks_rank=False) == is_of_1
    assert is_of_rank(place, "1", asks_rank=True) == if_asked
