"""Through Ray Client: what a notebook sees when the connection has broken for good."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until, wait_until_gone
from tests.ray.conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


LINE = "%%distributed --ranks 1\n"


def gate_of(book: Notebook) -> int:
    return int(re.search(r"agent (\d+)", book.ok("%distributed_status").result)[1])  # type: ignore[index]


def started_anew(port: int) -> Cluster:
    """Ray's own start does not wait for the side of Ray Client."""
    own = Cluster(nodes=1, port=port)
    with socket.socket() as probe:
        assert wait_until(lambda: probe.connect_ex(("127.0.0.2", port)) == 0, 60)
    return own


def assert_good(book: Notebook) -> None:
    outcome = book.cell(f"{LINE}rank", timeout_s=150)
    assert outcome.result == "rank 0: 0", outcome.text


def test_after_the_head_was_started_anew_the_next_cell_is_good(tmp_path: Path) -> None:
    """It is told to the cell that runs; without ranks, nobody needs to hear of it."""
    own = Cluster(nodes=1)
    port = int(own.client_address.rpartition(":")[2])
    (tmp_path / "jupyter_distrib.toml").write_text(
        f'pool = "lab"\n[pools.lab]\nkind = "ray"\naddress = "{own.client_address}"\ninsecure = true\n'
    )
    try:
        with Notebook(tmp_path, env={"RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1"}) as book:
            book.ok("%load_ext jupyter_distrib")
            assert_good(book)
            gate = gate_of(book)
            book.start(f"{LINE}import time\nprint('in', flush=True)\ntime.sleep(300)")
            book.until("in")
            own.close()
            outcome = book.finish(60)
            assert outcome.ename == "RankLost", outcome.text
            assert "was lost: " in outcome.traceback
            own = started_anew(port)
            assert wait_until_gone([gate], 60) == []
            assert_good(book)
            book.ok("%distributed_pool stop")
            gate = gate_of(book)
            own.close()
            own = started_anew(port)
            assert wait_until_gone([gate], 60) == []
            assert_good(book)
    finally:
        own.close()
