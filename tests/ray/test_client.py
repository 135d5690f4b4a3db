"""Through Ray Client: what a notebook sees when the connection has broken for good."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until_gone
from tests.ray.conftest import Cluster
from tests.settings_files import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


LINE = "%%distributed --ranks 1\n"


def started_anew(old: Cluster) -> Cluster:
    """At the same address."""
    own = Cluster(nodes=1, port=old.client_port)
    assert own.client_address
    return own


def assert_good(book: Notebook) -> None:
    outcome = book.cell(f"{LINE}rank", timeout_s=150)
    assert outcome.result == "rank 0: 0", outcome.text


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    """Gives a lost connection up at once."""
    with Notebook(tmp_path, env={"RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1"}) as one:
        yield one


def begin(book: Notebook, own: Cluster, folder: Path) -> int:
    """Have ranks up; returns the coordinator's pid."""
    write_trusted(
        folder, f'pool = "lab"\n[pools.lab]\nkind = "ray"\naddress = "{own.client_address}"\ninsecure = true\n'
    )
    book.ok("%load_ext jupyter_distrib")
    assert_good(book)
    return int(re.search(r"agent (\d+)", book.ok("%distributed_status").result)[1])  # type: ignore[index]


def test_a_running_cell_is_reported_and_the_next_is_good(book: Notebook, tmp_path: Path) -> None:
    own = Cluster(nodes=1)
    try:
        coordinator = begin(book, own, tmp_path)
        book.start(f"{LINE}import time\nprint('entered', flush=True)\ntime.sleep(300)")
        book.until("entered")
        own.close()
        outcome = book.finish(60)
        assert outcome.ename == "RankLost", outcome.text
        assert re.search("was lost: |is lost, and everything", outcome.traceback), "whichever notices first"
        own = started_anew(own)
        assert wait_until_gone([coordinator], 60) == []
        assert_good(book)
    finally:
        own.close()


def test_without_ranks_nobody_needs_to_hear_of_it(book: Notebook, tmp_path: Path) -> None:
    own = Cluster(nodes=1)
    try:
        coordinator = begin(book, own, tmp_path)
        book.ok("%distributed_pool stop")
        own.close()
        own = started_anew(own)
        assert wait_until_gone([coordinator], 60) == []
        assert_good(book)
    finally:
        own.close()
