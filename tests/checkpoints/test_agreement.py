"""How ranks agree on the checkpoint that they load, whatever order they come in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from jupyter_distrib import DistributedError
from jupyter_distrib.checkpoints import agreement
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

Load = Callable[..., str]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that loads as one of two ranks."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not exported for checkers
    boards = StoreBoard(store), StoreBoard(store)

    def load(rank: int, found: str, *, collectives: int = 0, saves: int = 0, saving: str | None = None) -> str:
        monkeypatch.setattr(private, "counts_of_groups", lambda: {"0 gloo": collectives})
        if saving is not None:
            agreement.announce_save(boards[0], "/run", saving)
        return agreement.agreed(boards[rank], "/run", lambda: found, saves=saves, rank=rank)

    return load


def test_rank_0_decides_even_if_it_has_never_saved(load: Load):
    assert load(0, "save-000002") == "save-000002"
    assert load(1, "save-000001") == "save-000002"


def test_a_rank_that_cannot_know_of_a_save_reads_the_disk_and_rank_0_notices_a_difference(load: Load):
    assert load(1, "save-000001") == "save-000001"
    assert load(0, "save-000001") == "save-000001"
    assert load(1, "save-000001") == "save-000001"
    with pytest.raises(DistributedError, match=r"rank 1 has loaded save-000001 from /run, and rank 0 now finds save-0"):
        load(0, "save-000002", saving="save-000002", saves=1)


def test_loads_of_one_rank_before_a_collective_do_not_count(load: Load):
    load(1, "save-000001")
    load(1, "save-000001")
    assert load(0, "save-000002", collectives=1, saving="save-000002") == "save-000002"
    assert load(0, "save-000003", collectives=2, saving="save-000003") == "save-000003"
    assert load(1, "", collectives=2) == "save-000003"


def test_what_rank_0_has_begun_since_is_not_passed_over(load: Load, monkeypatch: pytest.MonkeyPatch):
    load(0, "save-000001", saves=1, saving="save-000001")
    monkeypatch.setattr(agreement._Waiting, "is_past", lambda self: True)
    assert load(1, "", saves=2) == "save-000001"
    load(0, "save-000001", saves=1)
    agreement_lost = pytest.raises(
        DistributedError, match="was called on rank 1, and rank 0, which decides, has gone on"
    )
    with agreement_lost:
        load(1, "", saves=3, saving="save-000002")
