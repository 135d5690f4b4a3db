"""Where /dev/shm is small, as in a container, cells run, and what needs more of it is answered by its size."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import leftovers_after
from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
]

BELOW = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
LOADS = """%%distributed --ranks 2
import torch
data = torch.utils.data.TensorDataset(torch.zeros(64, 1 << 18))
for batch in torch.utils.data.DataLoader(data, batch_size=16, num_workers=1):
    pass
"""


def test_a_small_dev_shm_is_named_where_loaders_fill_it(tmp_path: Path) -> None:
    tried = subprocess.run((*BELOW, "true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr}")
    with Notebook(tmp_path, below=BELOW) as book:
        book.ok("%load_ext jupyter_distrib")
        session = book.ok("from jupyter_distrib.kernel.session import session; print(session.current().identity.name)")
        book.ok("import torch\nlarge = torch.ones(1 << 21)")
        assert "2097152" in book.ok("%%distributed --ranks 2\nint((large * 1).sum())").text
        failed = book.fails(LOADS)
        assert "/dev/shm has 1.0 MB" in failed.text
        assert "--shm-size=8g" in failed.text
        assert "2097152" in book.ok("%%distributed --ranks 2\nint((large * 1).sum())").text
    leftovers_after(session.stdout.strip())
