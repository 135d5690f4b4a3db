"""What other users of the machine leave in torch's store, to which everybody can connect, leads no rank out of its
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jupyter_distrib import DistributedError, load, resume, save
from jupyter_distrib.checkpoints import meeting, periodic
from jupyter_distrib.checkpoints.folder import Writer, new_save_id
from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

OUTSIDE = ["../other", "save-000001/../../other", "/other", "save-1x", "save-000001\n"]
NO_NAMES = [*OUTSIDE, ".", "save-000001/", 3]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreBoard:
    """Make this process rank 1 of 2, and return the board of both."""
    monkeypatch.chdir(tmp_path)
    save("other", value=1)
    board = StoreBoard(dist.HashStore())  # type: ignore[attr-defined]  # public, but not exported for checkers
    monkeypatch.setattr(identity, "rank", lambda: 1)
    monkeypatch.setattr(identity, "world_size", lambda: 2)
    monkeypatch.setattr(identity, "is_rank", lambda: True)
    monkeypatch.setattr(meeting, "run_board", lambda: board)
    return board


def saving(monkeypatch: pytest.MonkeyPatch) -> periodic.Periodic:
    """Return the checkpoints in `run`, as rank 1 saves them."""
    place = Path("run").absolute()
    running = periodic.Periodic(place, "run", 0.0)
    running._rank, running._ranks = 1, 2
    monkeypatch.setitem(periodic._running, place, running)
    return running


@pytest.mark.parametrize("name", NO_NAMES)
def test_no_shard_is_written_outside_the_folder(
    words: StoreBoard, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    running = saving(monkeypatch)
    running._sharded = True
    words.put("save save/save series 1/1", json.dumps((name, new_save_id(), "", 1, "run")))

    with pytest.raises(DistributedError, match=r"rank 0 seems to have named .* which is no checkpoint of .*run"):
        running.call({"weight": torch.ones(1)}, dict, every_s=0.0, keep=1)


@pytest.mark.parametrize("save_id", ["", "../x", "a/b", "a\0", "a\n", ["a"]])
def test_no_file_of_a_shard_has_a_path_for_a_name(tmp_path: Path, save_id: Any) -> None:
    with pytest.raises(DistributedError, match="which is no name of a save"):
        Writer(tmp_path, save_id, 1, is_new=False)


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_is_resumed_from_outside_the_folder(words: StoreBoard, name: str) -> None:
    words.put("resume save/resume run/1", json.dumps((f"run/{name}", "")))

    with pytest.raises(DistributedError, match=r"rank 0 seems to have named .* which is no checkpoint of run"):
        resume("run")


@pytest.mark.parametrize("name", NO_NAMES)
def test_nothing_is_loaded_from_outside_the_folder(
    words: StoreBoard, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    place = saving(monkeypatch)._folder
    words.put(f"load {place}/1", json.dumps({"name": name, "rank": 0, "saves": 0, "collectives": {}}))

    with pytest.raises(DistributedError, match="rank 0 seems to have"):
        load("run")


@pytest.mark.parametrize("text", ["other", "3", "{}", '{"name": "", "rank": 0, "saves": 0, "collectives": 3}'])
def test_what_is_no_answer_is_no_riddle(words: StoreBoard, text: str) -> None:
    words.put(f"load {Path('run').absolute()}/1", text)

    with pytest.raises(DistributedError, match=r"rank 0 seems to have left .* which is no answer of a load"):
        load("run")


def test_what_rank_0_names_is_resumed(words: StoreBoard) -> None:
    words.put("resume save/resume other/1", json.dumps(("other", "")))
    assert resume("other") == {"value": 1}
