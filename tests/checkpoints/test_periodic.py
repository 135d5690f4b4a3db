"""`save(..., every_s, keep)` and `resume` in one process: what stays, what is skipped, and what a kill leaves."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from jupyter_distrib import DistributedError, load, resume, save
from jupyter_distrib.checkpoints import folder as folders
from jupyter_distrib.checkpoints import periodic, series
from jupyter_distrib.checkpoints.periodic import Schedule


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written() -> list[str]:
    """Return the whole checkpoints, when nothing is being written any more."""
    periodic._finish(ok=True)
    return sorted(each.parent.name for each in Path("ckpt").glob("*/.metadata"))


def test_every_call_makes_a_checkpoint_and_the_last_ones_stay():
    for number in range(5):
        save("ckpt", keep=2, number=number)

    assert written() == ["save-000004", "save-000005"]
    assert sorted(each.name for each in Path("ckpt").iterdir()) == written()
    assert resume("ckpt") == {"number": 4} == load("ckpt")
    assert load("ckpt/save-000004") == {"number": 3}


def test_a_call_before_the_time_makes_none_and_computes_no_state():
    class Costly:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    for _ in range(100):
        save("ckpt", every_s=3600, costly=Costly())

    assert written() == []


def test_without_a_checkpoint_resume_returns_nothing():
    assert resume("ckpt", model=nn.Linear(2, 2)) == {}


def test_a_file_or_a_folder_of_other_files_is_no_new_run():
    torch.save({"a": 1}, "model.pt")
    Path("out/run").mkdir(parents=True)
    save("out/run/ckpt", a=1)

    with pytest.raises(DistributedError, match=r"model.pt is a file, and a checkpoint is a folder: torch\.load\(\)"):
        resume("model.pt")
    for folder, found in {"out": "run", "out/run": "ckpt"}.items():
        with pytest.raises(DistributedError, match=rf"{folder} has no checkpoint and holds other files \({found}\)"):
            resume(folder)
    Path("killed/save-000001").mkdir(parents=True)
    assert resume("killed") == {}


def test_the_state_is_taken_at_the_call():
    weights = torch.zeros(1 << 20)
    save("ckpt", keep=1, weights=weights)
    weights.fill_(7)

    assert written() == ["save-000001"]
    assert load("ckpt")["weights"].unique().tolist() == [0.0]


def test_what_could_not_be_written_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch):
    save("ckpt", keep=1, number=1)
    assert written() == ["save-000001"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folders.Writer, "_write_data", full)
        save("ckpt", keep=1, number=2)
        with pytest.raises(DistributedError, match=r"ckpt/save-000002 could not be written: OSError: No space left"):
            save("ckpt", keep=1, number=3)

    assert load("ckpt") == {"number": 1}
    assert written() == ["save-000001"]
    assert sorted(os.listdir("ckpt")) == ["save-000001"]


@pytest.mark.parametrize("damaged", [".metadata", "__*.distcp"])
@pytest.mark.parametrize("left", [None, 0, 40], ids=str)
@pytest.mark.parametrize("function", [load, resume])
def test_a_newest_checkpoint_that_is_cut_off_is_named_and_the_one_before_is_loaded(
    damaged: str, left: int | None, function: Any
):
    for number in range(3):
        save("ckpt", keep=3, number=number, weights=torch.ones(100))
    newest = Path("ckpt") / written()[-1]
    (file,) = newest.glob(damaged)
    if left is None:
        file.unlink()
    else:
        os.truncate(file, left)

    if left is None and damaged == ".metadata":  # a save that was killed leaves the same
        assert function("ckpt")["number"] == 1
        return
    with pytest.warns(UserWarning, match=rf"{file} .*, so ckpt/save-000002 is loaded, the newest one that is whole"):
        assert function("ckpt")["number"] == 1
    with pytest.raises(DistributedError, match=rf"^{file} .*, so {newest} cannot be loaded: load another checkpoint.$"):
        load(newest)
    shutil.rmtree("ckpt/save-000001")
    shutil.rmtree("ckpt/save-000002")
    with pytest.raises(DistributedError, match=rf"^{file} .*, so {newest} cannot be loaded: load another checkpoint.$"):
        function("ckpt")


def test_settings_may_be_numbers_of_numpy():
    for number in range(3):
        save("ckpt", every_s=np.float32(0), keep=np.int64(2), number=number)

    assert written() == ["save-000002", "save-000003"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"every_s": "soon"}, r"every_s is a number of seconds, not 'soon'"),
        ({"every_s": -1}, r"every_s is a number of seconds, not -1"),
        ({"keep": 0}, r"keep is a number of checkpoints, at least 1, not 0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], sentence: str):
    with pytest.raises(DistributedError, match=sentence):
        save("ckpt", number=1, **settings)


@pytest.mark.parametrize("settings", [{}, {"keep": 1}])
def test_what_the_system_a_desktop_or_jupyterlab_leaves_in_a_folder_is_in_nobodys_way(settings: dict[str, Any]):
    for name in ("lost+found", ".ipynb_checkpoints", ".snapshot"):
        Path("disk", name).mkdir(parents=True)
    Path("disk/.DS_Store").touch()
    assert resume("disk", model=nn.Linear(2, 2)) == {}

    save("disk", number=1, **settings)
    periodic._finish(ok=True)

    assert load("disk") == {"number": 1}
    assert {"lost+found", ".ipynb_checkpoints", ".snapshot", ".DS_Store"} < set(os.listdir("disk"))


def test_a_folder_of_other_files_and_one_checkpoint_are_left_alone():
    save("single", number=1)
    with pytest.raises(DistributedError, match="single is one checkpoint, written without every_s or keep"):
        save("single", keep=2, number=2)
    Path("other").mkdir()
    Path("other/notes.txt").touch()
    with pytest.raises(DistributedError, match=r"other holds other files \(notes.txt\)"):
        save("other", keep=2, number=2)
    save("several", keep=2, number=1)
    with pytest.raises(DistributedError, match="several holds other files"):
        save("several", number=2)


NO_ROOM = """
import resource, sys, torch
from jupyter_distrib import load, save
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save("ckpt", weights=torch.ones(100_000), **eval(sys.argv[1]))
    load("ckpt")
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("options", [{}, {"keep": 2}], ids=str)
def test_a_file_that_cannot_grow_is_told_in_the_words_of_the_system(options: dict[str, int]):
    """As on a full disk; torch says then that it has met an unexpected position."""
    run = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(options)], check=True, capture_output=True, text=True, timeout=60
    )
    assert "OSError: " in run.stdout
    assert "File too large" in run.stdout


KILLED = """
import os, signal, torch
from jupyter_distrib import save
from jupyter_distrib.checkpoints import folder, periodic
save("ckpt", keep=2, number=1, weights=torch.ones(1000))
periodic._finish(ok=True)
write = folder.Writer._write_data
def half(self, planner, queue):
    write(self, planner, queue)
    os.kill(os.getpid(), signal.SIGKILL)
folder.Writer._write_data = half
save("ckpt", keep=2, number=2, weights=torch.ones(1000))
periodic._finish(ok=True)
"""


@pytest.mark.slow
def test_a_process_killed_in_the_middle_of_a_write_leaves_the_older_checkpoint_whole():
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert os.listdir("ckpt/save-000002")

    assert resume("ckpt")["number"] == 1
    save("ckpt", keep=2, number=3)
    assert written() == ["save-000001", "save-000003"]
    assert sorted(os.listdir("ckpt")) == ["save-000001", "save-000003"]


def test_of_checkpoints_the_newest_whole_one_counts():
    save("ckpt", keep=3, number=1)
    assert written()
    Path("ckpt/save-000002").mkdir()

    assert series.newest(Path("ckpt")) == Path("ckpt/save-000001")
    assert series.make_following(Path("ckpt")) == Path("ckpt/save-000003")


# ------------------------------------------------------------------------------------------------ when


def meetings(every_s: float, call_s: float) -> tuple[int, int]:
    """Return the number of calls and meetings until a checkpoint is due."""
    now_s, schedule, at = 0.0, Schedule(every_s, 0.0), 1
    for calls in itertools.count(1):
        now_s += call_s
        schedule.count()
        if calls == at:
            if schedule.due(now_s):
                return calls, calls
            at += schedule.calls_to_meeting(now_s)
    raise AssertionError


@pytest.mark.parametrize("call_s", [0.001, 0.05, 7.0, 100.0])
def test_a_checkpoint_is_due_at_the_call_nearest_to_its_time(call_s: float):
    calls, _ = meetings(60.0, call_s)

    assert abs(calls * call_s - 60.0) <= max(call_s, 0.06)


def test_ranks_meet_rarely():
    now_s, schedule, at, met = 0.0, Schedule(60.0, 0.0), 1, 0
    for calls in range(1, 100_000):
        now_s += 0.001
        schedule.count()
        if calls == at:
            met += 1
            if schedule.due(now_s):
                break
            at += schedule.calls_to_meeting(now_s)

    assert calls == pytest.approx(60_000, rel=0.001)
    assert met < 40


def test_an_interval_without_end_has_meetings_too():
    schedule = Schedule(float("inf"), 0.0)
    schedule.count()

    assert schedule.calls_to_meeting(1.0) == 1
    assert not schedule.due(1e9)


# ------------------------------------------------------------------------------------------------ loaders


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(40))


class Shuffled(Sampler[int]):
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Any:
        order = list(range(40))
        self.generator.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 40


def loader(kind: str) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(40))
    generator = torch.Generator().manual_seed(3)
    match kind:
        case "in order":
            return DataLoader(data, batch_size=4)
        case "shuffled":
            return DataLoader(data, batch_size=4, shuffle=True)
        case "own generator":
            return DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        case "generator of an inner sampler":
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator), 4, False))
        case "python's generator":
            return DataLoader(data, batch_size=4, sampler=Shuffled(random.Random(3)))
        case "numpy's generator":
            return DataLoader(data, batch_size=4, sampler=Shuffled(np.random.default_rng(3)))
        case "workers":
            return DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
        case "persistent workers":
            return DataLoader(data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
        case "stream of persistent workers":
            return DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=True)
        case "stream":
            return DataLoader(Stream(), batch_size=4)
        case _:
            return DataLoader(TensorDataset(torch.arange(10)), batch_size=None, shuffle=True)


def reading(kind: str, stop_at: int = 10**6) -> tuple[list[Any], float]:
    """Read three epochs with a random number in each step, as a dropout draws it, from where the checkpoint is.
    Return what was read since."""
    batches = loader(kind)
    plain = resume("ckpt", loader=batches)
    seen: list[Any] = []
    for epoch in range(plain.get("epoch", 0), 3):
        for batch in batches:
            seen.append((epoch, str(batch), torch.rand(1).item()))
            save("ckpt", keep=1, loader=batches, epoch=epoch)
            if len(seen) == stop_at:
                periodic._finish(ok=True)
                return seen, 0.0
    periodic._finish(ok=True)
    return seen, torch.rand(1).item()


@functools.cache
def undisturbed(kind: str) -> tuple[list[Any], float]:
    torch.manual_seed(1)
    whole = reading(kind)
    shutil.rmtree("ckpt")
    return whole


@pytest.mark.parametrize(
    "kind",
    [
        "in order",
        "shuffled",
        "own generator",
        "generator of an inner sampler",
        "python's generator",
        "numpy's generator",
        pytest.param("workers", marks=pytest.mark.slow),
        pytest.param("persistent workers", marks=pytest.mark.slow),
        pytest.param("stream of persistent workers", marks=pytest.mark.slow),
        "stream",
        "single",
    ],
)
@pytest.mark.parametrize("stop_at", [1, 7, 10, 13, 24])
def test_a_loader_goes_on_where_it_was_and_reads_what_an_undisturbed_one_reads(kind: str, stop_at: int):
    whole, end = undisturbed(kind)

    torch.manual_seed(1)
    first, _ = reading(kind, stop_at)
    torch.manual_seed(99)
    rest, end_after = reading(kind)

    assert first + rest == whole
    assert end_after == end


def test_between_two_passes_the_next_one_begins_at_its_beginning():
    batches = loader("shuffled")
    resume("ckpt", loader=batches)
    torch.manual_seed(4)
    list(batches)
    save("ckpt", keep=1, loader=batches)
    periodic._finish(ok=True)
    expected = str(list(batches))

    again = loader("shuffled")
    resume("ckpt", loader=again)

    assert str(list(again)) == expected


def test_a_loader_that_was_read_uncounted_is_refused():
    with pytest.raises(DistributedError, match=r"`batches` is a data loader .*resume\(path, batches=batches"):
        save("ckpt", keep=1, batches=loader("in order"))


def test_a_counted_loader_still_pickles():
    import pickle

    batches = loader("in order")
    resume("ckpt", batches=batches)

    assert len(list(pickle.loads(pickle.dumps(batches)))) == 10


def test_a_changed_bit_in_metadata_is_never_a_riddle():
    for number in range(2):
        save("ckpt", keep=2, number=number, weights=torch.ones(100))
    (file,) = (Path("ckpt") / written()[-1]).glob(".metadata")
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 41):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with warnings.catch_warnings(), suppress(DistributedError):
            warnings.simplefilter("ignore")
            resume("ckpt")
