"""Saved runs: what is written, what is kept, and how runs are listed and compared."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.history import listing, run_files, saved_run
from jupyter_distrib.kernel.history.run_files import Limits
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.history.writer import HistoryWriter
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.sidebar import run_page
from jupyter_distrib.system.record_file import DamagedFile
from jupyter_distrib.wire import messages as m

NO_SESSION: Any = SimpleNamespace(history=())
"""A session in which nothing has run."""
ROOMY = Limits(runs=100, days=90.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "jupyter_distrib" / "history"


def observed(
    run: str,
    *,
    source: str = "train()",
    lr: float = 0.1,
    notes: list[str] | None = None,
    arguments: dict[str, object] | None = None,
) -> ObservedRun:
    return ObservedRun(
        id=run, label="Cell In[5]", source=source, options={"ranks": 2, "with": f"lr={lr}"}, strategy="ddp",
        pool="local", ranks=(0, 1), world_size=2, gpus=False, detached=False, attached=False,
        began_at_s=time.time(), note=(notes if notes is not None else []).append,
        arguments=arguments or {},
    )  # fmt: skip


def ended(run: str, losses: list[float], *, lost: bool = False) -> RunRecord:
    record = RunRecord(run=run, label="Cell In[5]", ranks=[0, 1], world_size=2, strategy="ddp")
    events: list[m.RunEvent] = [m.Started(run=run, rank=rank, pid=1, device="cpu", at_s=1.0) for rank in (0, 1)]
    for step, loss in enumerate(losses):
        events += [m.Measured(run=run, rank=rank, step=step, values={"loss": loss}, at_s=2.0 + step) for rank in (0, 1)]
    events.append(m.Returned(run=run, rank=0, value=None, at_s=50.0))
    if lost:
        events.append(m.Exited(run=run, rank=1, pid=1, exit_code=-9, asked=False, at_s=50.0))
    else:
        events.append(m.Returned(run=run, rank=1, value=None, at_s=50.0))
    for event in (*events, m.Ended(run=run, at_s=51.0)):
        record.apply(event)
    return record


def save(run: str, losses: list[float], *, limits: Limits = ROOMY, lost: bool = False, **facts: object) -> None:
    record = ended(run, losses, lost=lost)
    saved = saved_run.of(observed(run, **facts), record, "lab.ipynb", limits.project)  # type: ignore[arg-type]
    run_files.save([(saved, record)], limits)


def test_a_saved_run_has_its_code_options_versions_end_and_numbers(home: Path) -> None:
    save("a-7", [0.9, 0.5], source="model.fit()")

    saved = run_files.find("a-7")
    assert (saved.number, saved.state, saved.notebook, saved.source) == (1, "done", "lab.ipynb", "model.fit()")
    assert saved.facts["option.with"] == "lr=0.1"
    assert "version.python" in saved.facts
    assert saved.last == {"loss": 0.5}
    assert saved.elapsed_s == 50.0
    assert saved.metrics["loss"] == {0: [(0, 0.9), (1, 0.5)], 1: [(0, 0.9), (1, 0.5)]}


def test_the_real_peak_of_a_run_is_shown_beside_the_dry_runs() -> None:
    record = RunRecord(run="a-1", label="", ranks=[0, 1], world_size=2, gpus=True, strategy="ddp")
    for rank, peak_bytes in ((0, 1_030_000_000), (1, 1_020_000_000)):
        record.apply(m.Returned(run="a-1", rank=rank, value=None, peak_tensor_bytes=peak_bytes))
    run = replace(observed("a-1"), gpus=True, predicted_bytes=1_000_000_000)
    run_files.save([(saved_run.of(run, record, ""), record)], ROOMY)

    saved = run_files.find("a-1")
    assert saved.deviation == pytest.approx(0.03)
    assert "1.0 GB, +3.0% compared with the 1.0 GB of the dry run" in repr(listing.Comparison((saved,)))


def failed(run: str, notes: tuple[str, ...] = ()) -> RunRecord:
    record = RunRecord(run=run, label="Cell In[5]", ranks=[0, 1], world_size=2, strategy="none")
    frame = m.Frame(filename="Cell In[5]", line=3, function="train", text="loss = model(x)[y]")
    failure = m.Failure(type_name="builtins.KeyError", message="'lr'", frames=(frame,), notes=notes)
    for rank in (0, 1):
        record.apply(m.Failed(run=run, rank=rank, failure=failure, at_s=2.0))
    record.apply(m.Ended(run=run, at_s=3.0))
    return record


def test_the_traceback_of_a_failed_run_is_saved_and_shown(home: Path) -> None:
    record = failed("a-1", notes=tuple(f"{number} <b>" for number in range(1000)))
    run_files.save([(saved_run.of(observed("a-1"), record, ""), record)], ROOMY)

    saved = run_files.find("a-1")
    expected = [
        "KeyError  Traceback (ranks 0-1 of 2)", "Cell In[5], line 3, in train(...)", "----> 3 loss = model(x)[y]",
        "KeyError: 'lr'", "0 <b>",
    ]  # fmt: skip
    assert saved.traceback[:5] == expected
    assert len(saved.traceback) == failures.MOST_LINES
    one = listing.Comparison((saved,))
    assert "----> 3 loss = model(x)[y]" in repr(one)
    assert "0 &lt;b&gt;" in one._repr_html_()
    assert run_page.page(NO_SESSION, "1")["page"]["traceback"] == saved.traceback

    path = home / "00000001_a-1.json"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps({**json.loads(second), 'traceback': [1]})}")
    with pytest.raises(DamagedFile):
        _ = saved.traceback
    assert "----> 3" not in repr(one)
    assert run_page.page(NO_SESSION, "1")["page"]["traceback"] == []


def test_a_run_that_did_not_fail_has_no_traceback() -> None:
    save("a-1", [0.5])

    assert run_files.find("a-1").traceback == []


def test_only_the_user_can_read_it(home: Path) -> None:
    before = os.umask(0)
    try:
        save("a-1", [])
    finally:
        os.umask(before)

    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}


def test_the_oldest_make_room_and_numbers_go_on() -> None:
    for number in range(5):
        save(f"a-{number}", [], limits=Limits(runs=3, days=90.0))

    assert [run.number for run in run_files.load()] == [3, 4, 5]


def test_all_runs_together_stay_below_a_total(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        save(f"a-{number}", [0.5] * 50)
    one = max(path.stat().st_size for path in home.glob("*.json"))
    monkeypatch.setattr(run_files, "TOTAL_BYTES", int(3.5 * one))
    save("a-4", [0.5] * 50)

    assert [run.run for run in run_files.load()] == ["a-2", "a-3", "a-4"]
    assert sum(path.stat().st_size for path in home.glob("*.json")) <= 3.5 * one


def test_a_run_with_very_many_metrics_is_saved_so_that_it_can_be_read(home: Path) -> None:
    record = RunRecord(run="a-1", label="", ranks=[0], world_size=1, strategy="none")
    names = [f"metric {number}" for number in range(1500)]
    record.apply(m.Started(run="a-1", rank=0, pid=1, device="cpu", at_s=1.0))
    for step in range(500):
        values = dict.fromkeys(names, step + 0.123456789012345)
        record.apply(m.Measured(run="a-1", rank=0, step=step, values=values, at_s=2.0))
    record.apply(m.Ended(run="a-1", at_s=51.0))
    run_files.save([(saved_run.of(observed("a-1"), record, ""), record)], ROOMY)

    assert next(home.glob("*.json")).stat().st_size < 12_000_000
    points = run_files.find("a-1").metrics["metric 1499"][0]
    assert (points[0][0], points[-1][0]) == (0, 499)


def test_on_a_full_disk_old_runs_are_removed_all_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        save(f"a-{number}", [])
    with monkeypatch.context() as disk:
        disk.setattr(run_files.paths, "write_whole", _full)
        with pytest.raises(OSError, match="No space left"):
            save("a-5", [], limits=Limits(runs=3, days=90.0))

    assert [run.run for run in run_files.load()] == ["a-2", "a-3", "a-4"]


def _full(path: Path, text: str, *, tidy: bool = True) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_old_runs_are_removed(home: Path) -> None:
    save("a-1", [])
    long_ago_s = time.time() - 100 * run_files.DAY_S
    os.utime(next(home.glob("*.json")), (long_ago_s, long_ago_s))
    save("a-2", [])

    assert [run.run for run in run_files.load()] == ["a-2"]


def test_a_clock_that_a_cell_has_set_to_the_future_makes_no_run_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `freezegun` and `time_machine` do it, for the whole notebook."""
    save("a-1", [])
    future_s = time.time() + 400 * run_files.DAY_S
    with monkeypatch.context() as frozen:
        frozen.setattr(time, "time", lambda: future_s)
        save("a-2", [])
    save("a-3", [])

    assert [run.run for run in run_files.load()] == ["a-1", "a-2", "a-3"]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose names were read, one entry for each time."""
    read, listdir = [], os.listdir

    def counted(folder: Path) -> list[str]:
        read.append(str(folder))
        return listdir(folder)

    monkeypatch.setattr(run_files.os, "listdir", counted)
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: read.append(str(folder)) or iter(()))
    return read


def test_a_folder_that_nobody_else_has_changed_is_not_listed_again(home: Path, listed: list[str]) -> None:
    save("a-1", [])
    listed.clear()
    for number in range(2, 6):
        save(f"a-{number}", [], limits=replace(of_project("", runs=2), runs=3))

    assert listed == []
    assert [run.number for run in run_files.load()] == [4, 5]


@pytest.mark.parametrize("limits", [ROOMY, Limits(runs=2, days=90.0)])
def test_what_others_add_and_remove_meanwhile_counts(home: Path, limits: Limits) -> None:
    """Another kernel may write at the same tick of the file system's clock."""
    save("a-1", [], limits=limits)
    for number in range(2, 40, 2):
        (home / f"{number:08}_b-{number}.json").write_bytes(
            (home / f"{number - 1:08}_a-{number - 1}.json").read_bytes()
        )
        save(f"a-{number + 1}", [], limits=limits)
        assert [each.number for each in run_files.load()][-2:] == [number, number + 1]
    (home / "00000039_a-39.json").unlink()
    save("a-39", [], limits=limits)
    assert [run.number for run in run_files.load()][-2:] == [38, 39]


def test_a_folder_without_times_of_its_own_is_listed_each_time(
    listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files.os, "utime", lambda *arguments, **keywords: None)
    save("a-1", [])
    listed.clear()
    save("a-2", [])
    assert listed


def test_a_save_that_fails_is_repeated_from_what_is_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("a-1", [])
    with monkeypatch.context() as full:
        full.setattr(run_files.paths, "write_whole", lambda *arguments, **keywords: os.open("/nowhere/at/all", 0))
        with pytest.raises(OSError, match="nowhere"):
            save("a-2", [])
    save("a-2", [])
    assert [run.run for run in run_files.load()] == ["a-1", "a-2"]


def of_project(folder: str, *, runs: int | None = None, days: float | None = None) -> Limits:
    return replace(ROOMY, project=folder, project_runs=runs, project_days=days)


def test_the_limit_of_a_project_counts_its_own_runs_only() -> None:
    for number in range(3):
        save(f"user-{number}", [])
        save(f"one-{number}", [], limits=of_project("/one", runs=2))
        save(f"two-{number}", [], limits=of_project("/two", runs=1))
    save("one-9", [], limits=of_project("/one", days=0.0))

    assert [run.run for run in run_files.load()] == ["user-0", "user-1", "user-2", "two-2"]


def test_a_user_who_saves_nothing_loses_nothing_to_a_project_that_does() -> None:
    save("a-1", [])
    save("b-1", [], limits=replace(of_project("/b", runs=1), runs=None))

    assert [run.run for run in run_files.load()] == ["a-1", "b-1"]


def test_a_run_that_is_attached_again_is_saved_once() -> None:
    save("a-1", [0.5])
    save("a-1", [])

    assert [run.last for run in run_files.load()] == [{"loss": 0.5}]


def test_lists_that_the_notebook_has_share_their_runs(home: Path) -> None:
    for number in range(3):
        save(f"a-{number}", [0.5])
    first = run_files.load()
    save("a-3", [0.5])
    (home / "00000002_a-1.json").write_text((home / "00000002_a-1.json").read_text().replace("lab.ipynb", "new.ipynb"))
    second = run_files.load()

    assert [run is old for run, old in zip(second, first, strict=False)] == [True, False, True]
    assert [run.notebook for run in second] == ["lab.ipynb", "new.ipynb", "lab.ipynb", "lab.ipynb"]
    del first, second
    gc.collect()
    assert not run_files._known_runs


def test_damaged_files_are_left_out(home: Path) -> None:
    save("a-1", [])
    (home / "00000002_a-2.json").write_text("{")
    (home / "00000003_a-3.json").write_text('{"run": "a-3"}\n')

    assert [run.run for run in run_files.load()] == ["a-1"]
    with pytest.raises(DistributedError, match="no saved run has the number or id 2"):
        run_files.find("2")


ODD = ["1e30", "-1", "[]", "{}", "null", '"x"', "true", "NaN", "9" * 400, '{"a": []}', "[[1, 2]]", r'"\ud800"']


def everything_shown() -> list[str]:
    """All that can be shown of the history, as it reaches the notebook."""
    saved = run_files.load_with_note()
    runs = listing.matching(saved.runs, [], saved.note)
    shown = [repr(runs), runs._repr_html_()]
    for run in saved.runs:
        alone = listing.Comparison((run, saved.runs[0]))
        shown += [repr(alone), alone._repr_html_()]
        sent = (run_page.compared([str(run.number)]), run_page.page(NO_SESSION, str(run.number), str(run.number)))
        shown += [json.dumps(each, allow_nan=False) for each in sent]
    for text in shown:
        text.encode()
    return shown


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("field", [each.name for each in fields(SavedRun)])
def test_each_field_of_a_saved_run_may_be_anything(home: Path, field: str, odd: str) -> None:
    save("a-1", [0.5])
    save("a-2", [0.7])
    path = home / "00000002_a-2.json"
    summary, _, metrics = path.read_text().partition("\n")
    path.write_text(json.dumps({**json.loads(summary), field: "HERE"}).replace('"HERE"', odd) + "\n" + metrics)
    assert "a-1" in [run.run for run in run_files.load()]
    everything_shown()


@pytest.mark.parametrize(
    "line",
    [
        "", "[1]", "{", "[" * 5000, "null", '{"columns": []}', '{"columns": ["rank", "step", "seconds"], "rows": [[1]]}',
        *(
            '{"columns": ["rank", "step", "seconds", "loss"], "rows": [' + row + "]}"
            for row in ("1", '"abcd"', "[0, 0, 1]", '["a", 0, 1, 1]', "[0, NaN, 1, 1]", '[0, 0, 1, "x"]', "[0, 1e400, 0, 1]",
                        "[0, 0, 1, null]", "[0, 0, 1, NaN], [0, 1, 2, Infinity]", "[0, 0, 1, 1e308], [0, 1, 2, -1e308]",
                        "[null, 0, 1, 1]", f"[0, 0, 1, {9 * 10**400}]")
        ),
    ],
)  # fmt: skip
def test_the_reports_of_a_saved_run_may_be_anything(home: Path, line: str) -> None:
    save("a-1", [0.5])
    path = home / "00000001_a-1.json"
    path.write_text(path.read_text().partition("\n")[0] + "\n" + line)
    assert [run.run for run in run_files.load()] == ["a-1"]
    everything_shown()
    with suppress(DamagedFile):
        for row in run_files.find("1").metrics:
            assert list(row)[:3] == ["rank", "step", "seconds"]
            assert isinstance(row["step"], int)


@pytest.mark.parametrize(
    "over_time",
    [
        "1", "[]", "{}", '{"seconds": NaN, "ranks": [0], "rows": {"busy": ["1"]}}', '{"seconds": 9, "ranks": [0], "rows": {}}',
        '{"seconds": 9, "ranks": [0], "rows": {"busy": ["<img>"]}}', '{"seconds": 9, "ranks": [0, 1], "rows": {"busy": ["1"]}}',
        '{"seconds": 9, "ranks": [0], "rows": {"busy": ["1"]}, "waits": [[1, 2]]}',
        '{"seconds": 9, "ranks": [0], "rows": {"busy": ["1"]}, "waits": [["a", 1, 2]]}',
    ],
)  # fmt: skip
def test_a_course_over_time_that_is_damaged_is_left_out_of_the_page(home: Path, over_time: str) -> None:
    save("a-1", [0.5, 0.7])
    path = home / "00000001_a-1.json"
    first, second = path.read_text().splitlines()
    path.write_text(
        first + "\n" + json.dumps({**json.loads(second), "over_time": 0}).replace('e": 0}', f'e": {over_time}}}')
    )

    page = run_page.page(NO_SESSION, "1")["page"]
    assert page["over_time"] is None
    assert page["ranks"][0]["columns"]["=loss"] == [0.5, 0.7]


def test_a_run_that_an_older_version_saved_has_a_page(home: Path) -> None:
    save("a-1", [0.5, 0.7], source="model.fit()")
    path = home / "00000001_a-1.json"
    summary, numbers = (json.loads(line) for line in path.read_text().splitlines())
    older = ("number", "run", "label", "notebook", "began_at_s", "elapsed_s", "state", "source")
    path.write_text(
        json.dumps({name: summary[name] for name in older if name in summary})
        + "\n"
        + json.dumps({name: numbers[name] for name in ("columns", "rows")})
    )
    page = run_page.page(NO_SESSION, "1")["page"]
    assert (page["code"], page["notes"], page["over_time"], page["logged"]) == (["model.fit()"], [], None, [0, 1])

    path.write_text(path.read_text().partition("\n")[0])  # without reported numbers
    page = run_page.page(NO_SESSION, "1")["page"]
    assert (page["code"], page["ranks"]) == (["model.fit()"], [])


def test_a_page_has_all_that_is_known_and_how_the_code_differs() -> None:
    save("a-1", [0.5], source="lr = 1\ntrain(lr)")
    save("a-2", [0.7, float("nan")], source="lr = 2\ntrain(lr)", lost=True)

    page = run_page.page(NO_SESSION, "2", "1")["page"]
    assert (page["run"], page["number"], page["state"], page["goes_on"]) == ("a-2", "2", "lost", False)
    assert page["difference"][2:] == ["@@ -1,2 +1,2 @@", "-lr = 1", "+lr = 2", " train(lr)"]
    assert ["strategy", "ddp"] in page["configuration"]
    assert "python" in [name for name, _ in page["environment"]]
    assert page["ranks"][1]["columns"]["=loss"] == [0.7, "nan"]
    assert page["ranks"][1]["columns"]["not_finite"] == {"loss": ["nan", 1, 1, True]}
    assert any("nan" in note for note in page["notes"])
    assert run_page.page(NO_SESSION, "1")["page"]["difference"] == []
    with pytest.raises(DistributedError, match="no saved run has the number or id 99"):
        run_page.page(NO_SESSION, "1", "99")


def test_up_to_twenty_runs_are_compared() -> None:
    for number in range(21):
        save(f"a-{number}", [0.5, number])

    compared = run_page.compared([str(number) for number in range(1, 21)])["comparison"]
    assert [each["columns"]["=loss"] for each in compared["ranks"]] == [[0.5, number] for number in range(20)]
    with pytest.raises(DistributedError, match="2 to 20 runs"):
        run_page.compared([str(number) for number in range(1, 22)])


def test_saved_runs_are_a_data_frame_with_parameters_and_metrics() -> None:
    pytest.importorskip("pandas")
    save("a-1", [0.5], arguments={"lr": "0.1", "kind": "<b>"})
    save("a-2", [0.7], arguments={"lr": "2", "kind": "big"})

    table = listing.matching(run_files.load(), []).to_pandas()
    assert table[["run", "lr", "kind", "loss"]].to_numpy().tolist() == [[2, 2.0, "big", 0.7], [1, 0.1, "<b>", 0.5]]


def test_rows_of_another_length_are_damage(home: Path) -> None:
    save("a-1", [0.5])
    path = home / "00000001_a-1.json"
    path.write_text(path.read_text().replace("0.5]", "0.5, 0.7]"))
    with pytest.raises(DamagedFile):
        run_files.find("1").metrics  # noqa: B018


def test_damage_is_counted_in_one_note(home: Path) -> None:
    save("a-1", [])
    for number, name in enumerate(("a-2", "a-3"), 2):
        (home / f"0000000{number}_{name}.json").mkdir()
    shown = everything_shown()
    assert (
        f"2 saved runs are left out, since their files are damaged; the first is {home}/00000002_a-2.json" in shown[0]
    )
    save("a-4", [])
    assert [run.number for run in run_files.load()] == [1, 4]


@pytest.mark.parametrize(
    "name",
    [
        "00000007.json",
        "0000000x_a.json",
        "x.json",
        "00000007_.json",
        "٠٠٠٠٠٠٠٩_a.json",
        "99999999_a.json",
        "b\udcff.json",
    ],
)
def test_names_that_nobody_gives_do_not_count(home: Path, name: str) -> None:
    save("a-1", [])
    (home / name).write_text("{}")
    save("a-2", [])
    assert [run.number for run in run_files.load()] == [1, 2]
    everything_shown()
    with pytest.raises(DistributedError):
        run_files.find("7")


@pytest.mark.parametrize("place", ["lock", ""])
@pytest.mark.parametrize("what", ["file", "folder", "fifo", "link"])
def test_lock_and_folder_may_be_anything(home: Path, place: str, what: str) -> None:
    save("a-1", [])
    path = home / place
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    match what:
        case "file":
            path.write_text("in the way")
        case "folder":
            (path / "inside").mkdir(parents=True)
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/nowhere")
    everything_shown()
    with suppress(OSError, PoolError):  # the writer tells it in the next run
        save("a-2", [])
        assert "a-2" in [run.run for run in run_files.load()]
    everything_shown()


def test_many_reports_are_thinned() -> None:
    save("a-1", [float(step) for step in range(5000)])

    points = run_files.find("1").metrics["loss"][1]
    assert len(points) <= saved_run.ROWS / 2 + 1
    assert points[-1] == (4999, 4999.0)


def test_runs_are_listed_newest_first_and_searched_by_words() -> None:
    save("a-1", [0.5], source="train_resnet()")
    save("a-2", [], lost=True)
    runs = run_files.load()

    assert [run.run for run in listing.matching(runs, [])] == ["a-2", "a-1"]
    assert [run.run for run in listing.matching(runs, ["RESNET", "ddp"])] == ["a-1"]
    shown = repr(listing.matching(runs, []))
    assert "killed by SIGKILL" in shown
    assert "loss 0.5" in shown
    assert repr(listing.matching(runs, ["nothing"])) == "no saved run matches these words."
    assert repr(listing.matching([], [])) == "no run is saved."


def test_two_runs_show_only_what_differs() -> None:
    save("a-1", [0.9, 0.5], source="a = 1\nb = 2\n")
    save("a-2", [0.9, 0.3], source="a = 1\nb = 3\n", lr=0.2)
    both = listing.Comparison((run_files.find("1"), run_files.find("2")))

    shown = repr(both)
    assert [line.split() for line in shown.splitlines() if line.startswith("option.with")] == [
        ["option.with", "lr=0.1", "lr=0.2"]
    ]
    assert "strategy" not in shown
    assert "-b = 2\n+b = 3" in shown
    assert 'alt="loss, run 1 fell from 0.9 to 0.5 in 1 step"' in both._repr_html_()


def test_a_metric_that_became_nan_says_since_when_in_lists_and_comparisons() -> None:
    nan = float("nan")
    save("a-1", [0.9, 0.5, 0.4])
    save("a-2", [0.9, nan, nan])
    save("a-3", [0.9, nan, 0.3])

    listed = listing.matching(run_files.load(), []).as_dicts()
    assert [row["metrics"] for row in listed] == ["loss 0.3 (nan at step 1)", "loss nan from step 1", "loss 0.4"]
    rows = listing.matching(run_files.load(), []).as_table(2)
    assert [row["values"]["loss"] for row in rows] == [[0.3, "0.3 (nan at step 1)"], [None, "nan from step 1"]]
    both = listing.Comparison((run_files.find("1"), run_files.find("2")))
    assert ("loss", "0.4", "nan from step 1") in both.table().rows
    assert "run 2 nan from step 1" in both._repr_html_()
    ((_, points, turned),) = listing.points(run_files.find("2"))
    assert points == [(0.0, 0.9)]
    assert turned is not None
    assert turned.text == "nan from step 1"


def test_the_code_of_one_run_is_shown_whole() -> None:
    save("a-1", [], source="a = 1\nb = 2\n")

    assert "a = 1\nb = 2" in repr(listing.Comparison((run_files.find("1"),)))


def test_runs_that_end_together_are_saved_in_order_and_once(home: Path) -> None:
    run_files.save([(saved_run.of(observed(run), ended(run, []), ""), ended(run, [])) for run in ("a-2", "a-1")], ROOMY)
    run_files.save([(saved_run.of(observed(run), ended(run, []), ""), ended(run, [])) for run in ("a-1", "b-1")], ROOMY)

    assert [(each.number, each.run) for each in run_files.load()] == [(1, "a-2"), (2, "a-1"), (3, "b-1")]


def test_a_folder_that_cannot_be_written_is_reported_once(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("in the way")
    notes: list[str] = []
    writer = HistoryWriter(
        lambda runs: run_files.save([(saved_run.of(run, record, ""), record) for run, record in runs], ROOMY)
    )
    for number in range(3):
        observer = writer.follow(observed(f"a-{number}", notes=notes))
        observer.observe(m.Ended(run=f"a-{number}", at_s=1.0), ended(f"a-{number}", []))
        writer.flush()
    writer.close()

    assert [note.partition(":")[0] for note in notes] == ["Runs are not saved in the history"]


@pytest.mark.parametrize("broken", ["a-1", "a-2", "a-3"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), TypeError("not JSON")], ids=["disk", "record"])
def test_a_run_that_cannot_be_written_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception
) -> None:
    whole = run_files.paths.write_whole

    def write(path: Path, text: str, *, tidy: bool = True) -> None:
        if path.name.endswith(f"_{broken}.json"):
            raise error
        whole(path, text, tidy=tidy)

    monkeypatch.setattr(run_files.paths, "write_whole", write)
    writer = HistoryWriter(
        lambda runs: run_files.save([(saved_run.of(run, record, ""), record) for run, record in runs], ROOMY)
    )
    for run in ("a-1", "a-2", "a-3"):
        writer.put(observed(run), ended(run, []))
    writer.close()

    assert [run.run for run in run_files.load()] == [run for run in ("a-1", "a-2", "a-3") if run != broken]
    assert writer.trouble == str(error)


def test_runs_that_end_while_others_wait_are_written_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str]] = []
    writer = HistoryWriter(lambda runs: batches.append([run.id for run, _ in runs]))
    rest = ["a-3", "a-2"]

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if rest:
                writer.put(observed(run := rest.pop()), ended(run, []))
            return False

    monkeypatch.setattr(writer, "_hurry", Waits())
    writer.put(observed("a-1"), ended("a-1", []))
    writer.close()

    assert batches == [["a-1", "a-2", "a-3"]]


def test_nothing_is_written_in_the_thread_that_tells_the_end() -> None:
    threads: list[threading.Thread] = []
    writer = HistoryWriter(lambda runs: threads.append(threading.current_thread()))
    writer.follow(observed("a-1")).observe(m.Ended(run="a-1", at_s=1.0), ended("a-1", []))
    writer.flush()
    (thread,) = threads
    assert thread is not threading.current_thread()
    writer.close()
    thread.join(5)
    assert not thread.is_alive()

    writer.put(observed("a-2"), ended("a-2", []))  # a run may end while its session closes
    writer.flush()
    assert len(threads) == 2


def test_a_writer_that_is_closed_while_it_hangs_saves_later_runs_in_the_same_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jupyter_distrib.kernel.history.writer.FLUSH_S", 0.1)
    goes_on, batches, threads = threading.Event(), list[list[str]](), set[threading.Thread]()

    def write(runs: Sequence[tuple[ObservedRun, RunRecord]]) -> None:
        goes_on.wait(10)
        threads.add(threading.current_thread())
        batches.append([run.id for run, _ in runs])

    writer = HistoryWriter(write)
    writer.put(observed("a-1"), ended("a-1", []))
    writer.close()
    writer.put(observed("a-2"), ended("a-2", []))
    goes_on.set()
    monkeypatch.setattr("jupyter_distrib.kernel.history.writer.FLUSH_S", 10.0)
    writer.flush()

    assert batches == [["a-1"], ["a-2"]]
    (thread,) = threads
    thread.join(5)
    assert not thread.is_alive()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "made")
    with run_files._locked(tmp_path):
        assert (tmp_path / "lock").is_file()
    assert not (tmp_path / "lock").is_symlink()
    assert not (tmp_path / "made").exists()


def test_the_end_of_a_program_waits_for_a_writer_that_is_only_just_made(monkeypatch: pytest.MonkeyPatch) -> None:
    start, is_made, written = threading.Thread.start, threading.Event(), list[Any]()

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "jupyter_distrib-history":
            is_made.set()
            time.sleep(0.1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    writer = HistoryWriter(written.extend)
    threading.Thread(target=writer.put, args=(observed("a-1"), ended("a-1", []))).start()
    is_made.wait(5)
    writer.flush()
    writer.close()

    assert [run.id for run, _ in written] == ["a-1"]
