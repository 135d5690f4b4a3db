"""Where /dev/shm is small, as in a container, cells run, and what needs more of it is answered by its size."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

BELOW = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
"""A container without `--shm-size` has that much."""
LOADS = """%%distributed --ranks 2
import torch
data = torch.utils.data.TensorDataset(torch.zeros(64, 1 << {power}))
sum(len(batch) for batch, in torch.utils.data.DataLoader(data, batch_size=16, num_workers=2))
"""
LARGE = "33554432"
"""Number of elements of a value that has twice the size of /dev/shm."""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    tried = subprocess.run((*BELOW, "true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr}")
    with Notebook(tmp_path_factory.mktemp("book"), below=BELOW) as found:
        found.ok("%load_ext jupyter_distrib")
        said = found.ok("from jupyter_distrib.kernel.session import session; print(session.current().identity.name)")
        found.ok(f"import torch\nlarge = torch.ones({LARGE})")
        yield found
    leftovers_after(said.stdout.strip())


def still_runs(book: Notebook, pids: str) -> None:
    """Check that the ranks are the same, and that a value larger than /dev/shm reaches them."""
    assert book.ok(f"%%distributed --ranks 2\nint((large * 1).sum()) == {LARGE}").result == "ranks 0-1: True"
    assert pids_of(book) == pids


def pids_of(book: Notebook) -> str:
    cell = dedent("""\
        %%distributed --ranks 2
        import os
        os.getpid()""")
    return book.ok(cell).result


def test_values_do_not_need_dev_shm(book: Notebook) -> None:
    pids = pids_of(book)
    book.ok("%%distributed --ranks 2 --out sent\nlarge * 2")
    assert book.ok(f"float(sent[1].sum()) == 2 * {LARGE}").result == "True"
    book.ok(
        dedent(f"""\
            %%distributed --ranks 2 --keep kept
            import torch
            kept = torch.ones({LARGE})""")
    )
    still_runs(book, pids)


def test_loaders_with_workers_run_if_their_batches_fit(book: Notebook) -> None:
    assert book.ok(LOADS.format(power=10)).result == "ranks 0-1: 64"


def test_a_small_dev_shm_is_named_where_loaders_fill_it(book: Notebook) -> None:
    pids = pids_of(book)
    failed = book.fails(LOADS.format(power=20))
    assert "/dev/shm has 67.1 MB" in failed.text
    assert "--shm-size=8g" in failed.text
    assert "num_workers=0" in failed.text
    still_runs(book, pids)


def test_a_full_dev_shm_is_named_where_there_is_no_room_for_a_lock(book: Notebook) -> None:
    pids = pids_of(book)
    book.ok("with open('/dev/shm/fills', 'wb') as file: file.truncate(1)")
    book.ok("!head -c 100m /dev/zero >/dev/shm/fills 2>&1 || true")
    try:
        failed = book.fails(LOADS.format(power=10))
        assert failed.ename == "OSError"
        assert "/dev/shm has 67.1 MB, of which 0 bytes are free" in failed.text
        still_runs(book, pids)
    finally:
        book.ok("import os\nos.remove('/dev/shm/fills')")
    assert book.ok(LOADS.format(power=10)).result == "ranks 0-1: 64"


def test_a_rank_that_dies_of_a_full_dev_shm_is_lost_with_the_reason(book: Notebook) -> None:
    lost = book.fails(
        dedent("""\
            %%distributed --ranks 2
            from multiprocessing import shared_memory
            memory = shared_memory.SharedMemory(create=True, size=100 << 20)
            memory.buf[:] = bytes(100 << 20)""")
    )
    assert lost.ename == "RankLost"
    assert "crashed with SIGBUS" in lost.text
    assert "as in a full /dev/shm" in lost.text
    assert book.ok(f"%%distributed --ranks 2\nint((large * 1).sum()) == {LARGE}").result == "ranks 0-1: True"
