"""`torch.save` by several ranks to one path, as a cell does that was written for one device."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these


def test_nobody_finds_half_of_a_file_or_a_mixture(notebook: Notebook) -> None:
    notebook.ok("%load_ext jupyter_distrib")
    notebook.ok(
        dedent("""\
            %%distributed --ranks 2
            import torch
            for number in range(200):
                torch.save({'x': torch.full((20_000 + 1000 * rank,), float(rank))}, 'best.pt')
                found = torch.load('best.pt')['x']
                assert found.unique().tolist() in ([0.0], [1.0]) and len(found) == 20_000 + 1000 * found[0]""")
    )
    assert notebook.ok("import os\nsorted(os.listdir('.'))").result == "['best.pt']"


def test_what_is_not_a_plain_path_is_written_as_always(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("%load_ext jupyter_distrib")
    shown = notebook.ok(
        dedent(f"""\
            %%distributed --ranks 1
            import io, os, pathlib, torch
            folder = pathlib.Path({str(tmp_path)!r})
            file = io.BytesIO()
            torch.save(1, file)
            torch.save(2, '/dev/null')
            torch.save(3, folder / 'a.pt')
            os.symlink('a.pt', folder / 'b.pt')
            torch.save(4, folder / 'b.pt')
            try:
                torch.save(lambda: 1, folder / 'c.pt')
            except Exception as error:
                print('refused', type(error))
            (len(file.getvalue()) > 0, torch.load(folder / 'a.pt'), (folder / 'b.pt').is_symlink())""")
    )
    assert shown.result == "rank 0: (True, 4, True)"
    assert "refused" in shown.view
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]
