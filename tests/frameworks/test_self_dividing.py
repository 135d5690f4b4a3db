"""Data sets that divide themselves among the ranks are not divided once more. The real libraries, on shards of theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.notebook import ROOT, Notebook

pytestmark = pytest.mark.slow

SAMPLES = 80
WRITE = {
    "streaming": f"""
import numpy
with streaming.MDSWriter(out="streaming-data", columns={{"x": "ndarray:float32:4", "i": "int"}}, size_limit=500) as out:
    for i in range({SAMPLES}):
        out.write({{"x": numpy.full(4, i, dtype=numpy.float32), "i": i}})
""",
    "litdata": f"""
import subprocess, sys
open("prepare.py", "w").write('''
import litdata
def sample(i):
    return {{"x": [float(i)] * 4, "i": i}}
if __name__ == "__main__":
    litdata.optimize(fn=sample, inputs=list(range({SAMPLES})), output_dir="litdata-data", chunk_size=10, num_workers=1)
''')
subprocess.run([sys.executable, "prepare.py"], check=True, capture_output=True)
""",
}
OPEN = {
    "streaming": '(local="streaming-data", batch_size=10, shuffle=True)',
    "litdata": '("litdata-data", shuffle=True)',
}
TRAIN = """%%distributed --ranks 2 --strategy ddp
import torch, LIBRARY
from torch.utils.data import DataLoader
class Derived(LIBRARY.StreamingDataset):
    pass
data = DATA
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
seen = []
for _ in range(2):
    for batch in LOADER(data, batch_size=10):
        x = batch["x"] if torch.is_tensor(batch["x"]) else torch.stack(batch["x"], 1)
        model(x.float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += batch["i"].tolist()
print(*seen)"""
TORCHVISION = {
    "__init__.py": "",
    "datasets.py": "class VisionDataset: pass",
    "transforms/__init__.py": "",
    "transforms/functional.py": "to_tensor = None",
}
"""What mosaicml-streaming imports of torchvision, whose build for the CPU is on no package index."""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    for path, text in TORCHVISION.items():
        file = folder / "stub" / "torchvision" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with Notebook(folder, {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder / "stub")))}) as one:
        one.ok("%load_ext jupyter_distrib\nimport os")
        yield one


@pytest.mark.parametrize("loader", ["DataLoader", "LIBRARY.StreamingDataLoader"])
@pytest.mark.parametrize("derived", [False, True], ids=["own", "derived"])
@pytest.mark.parametrize("library", WRITE)
def test_each_sample_is_trained_on_once_an_epoch(book: Notebook, library: str, derived: bool, loader: str) -> None:
    if book.cell(f"import {library}").status != "ok":
        pytest.skip(f"{library} is missing: sh .ci/frameworks installs it")
    if book.ok(f"print(os.path.exists('{library}-data'))").stdout.strip() == "False":
        book.ok(WRITE[library])
    data = ("Derived" if derived else "LIBRARY.StreamingDataset") + OPEN[library]
    cell = TRAIN.replace("LOADER", loader).replace("DATA", data).replace("LIBRARY", library)
    outcome = book.cell(cell, 100)
    assert outcome.status == "ok", outcome.text
    assert "dealt" not in outcome.text
    assert "different samples" not in outcome.text
    logs = [
        book.ok(f"import jupyter_distrib\nprint(jupyter_distrib.runs()[-1].logs({rank}))").stdout for rank in (0, 1)
    ]
    seen = [
        [int(each) for each in next(line for line in log.splitlines() if line[:1].isdigit()).split()] for log in logs
    ]
    assert [len(each) for each in seen] == [SAMPLES, SAMPLES]
    assert sorted(seen[0] + seen[1]) == sorted([*range(SAMPLES)] * 2)
