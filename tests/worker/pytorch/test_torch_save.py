"""`torch.save` by several ranks to one path, as a cell does that was written for one device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these


def test_nobody_finds_half_of_a_file_or_a_mixture(notebook: Notebook) -> None:
    notebook.ok("%load_ext jupyter_distrib")
    notebook.ok(
        "%%distributed --ranks 2\nimport torch\nfor number in range(200):\n"
        "    torch.save({'x': torch.full((20_000 + 1000 * rank,), float(rank))}, 'best.pt')\n"
        "    found = torch.load('best.pt')['x']\n"
        "    assert found.unique().tolist() in ([0.0], [1.0]) and len(found) == 20_000 + 1000 * found[0]"
    )
    assert notebook.ok("import os\nsorted(os.listdir('.'))").result == "['best.pt']"


def test_what_is_not_a_plain_path_is_written_as_always(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("%load_ext jupyter_distrib")
    shown = notebook.ok(
        f"%%distributed --ranks 1\nimport io, os, pathlib, torch\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "file = io.BytesIO()\ntorch.save(1, file)\n"
        "torch.save(2, '/dev/null')\n"
        "torch.save(3, folder / 'a.pt')\nos.symlink('a.pt', folder / 'b.pt')\ntorch.save(4, folder / 'b.pt')\n"
        "try:\n    torch.save(lambda: 1, folder / 'c.pt')\nexcept Exception as error:\n    print('refused', type(error))\n"
        "(len(file.getvalue()) > 0, torch.load(folder / 'a.pt'), (folder / 'b.pt').is_symlink())"
    )
    assert shown.result == "rank 0: (True, 4, True)"
    assert "refused" in shown.view
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]
