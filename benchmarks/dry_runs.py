"""Compare the peaks of dry runs with the memory of real CPU ranks, for the cells of `tests/dry_run/cells.txt`.

python benchmarks/dry_runs.py [--save] [WORDS]...      cells whose names have one of these words, or all

Real peaks come from the events of torch's allocator, and separate tensors from what kernels of the CPU take while they
run (`tests/dry_run/real_peaks.py`). The ranks of one run differ with `fsdp`, since gloo's threads let go of what they
have gathered a moment later or sooner, so the least of three runs is taken.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent

from driver import ROOT, Notebook
from report import machine, sentence

sys.path.insert(0, str(ROOT))
from tests.dry_run import cells
from tests.dry_run.play import play_each

RUNS = {"none": 1, "ddp": 1, "fsdp": 3}
RANKS = 2
_CELL = """\
%%distributed --ranks {ranks} --strategy {strategy} --hang-timeout 20
import json
from tests.dry_run.real_peaks import measured
def train():
{training}
print("PEAKS" + json.dumps({{name: size for name, size in measured(train).items() if name != "held"}}))
"""
_ON_CPU = (
    (r"\.cuda\((non_blocking=True)?\)", ".cpu()"),
    (r"torch\.backends\.cuda\.matmul\.allow_tf32 = True", "pass"),
    (r"\bcuda(:0)?\b", "cpu"),
    (r",\s*(num_workers|prefetch_factor)=\d+", ""),
    (r",\s*(pin_memory|persistent_workers)=True", ""),
    (r"\.pin_memory\(\)", ""),
)
"""What is replaced in a cell, by what, so that it trains on the CPU and loads its data in the rank's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cell with one strategy."""

    cell: str
    strategy: str
    dry_bytes: int
    tensors_bytes: int = 0
    with_workspaces_bytes: int = 0
    all_bytes: int = 0
    why: str = ""
    """Why it was not compared; empty if it was."""

    @property
    def deviation(self) -> float:
        return self.dry_bytes / self.tensors_bytes - 1

    @property
    def text(self) -> str:
        if self.why:
            return f"| {self.cell} | {self.strategy} | not compared: {self.why} | | | |"
        others = (size / self.tensors_bytes - 1 for size in (self.with_workspaces_bytes, self.all_bytes))
        numbers = " | ".join(f"{each:+.1%}" for each in (self.deviation, *others))
        return f"| {self.cell} | {self.strategy} | {self.tensors_bytes / 1e6:.3f} MB | {numbers} |"


def on_cpu(source: str) -> str:
    """Return a cell's source as it is run."""
    for before, after in _ON_CPU:
        source = re.sub(before, after, source)
    return f"import torch\n{source.rstrip()}"


def compared(book: Notebook, cell: cells.Cell) -> list[Row]:
    """Return the rows of a cell."""
    source = on_cpu(cell.source)
    rows = list[Row]()
    for strategy, dry in zip(RUNS, play_each(source, list(RUNS), ranks=RANKS, gpu=""), strict=True):
        peaks, why = list[dict[str, int]](), ""
        if dry.refused or dry.error is not None:
            why = f"the dry run {dry.verdict}" if dry.error else f"it {dry.verdict}"
        for _ in range(0 if why else RUNS[strategy]):
            code = _CELL.format(ranks=RANKS, strategy=strategy, training=indent(source, "    "))
            outcome = book.cell(code)
            if outcome.status != "ok":
                why = f"{outcome.ename} on the ranks"
                break
            peaks += map(json.loads, re.findall(r"PEAKS(\{.*\})", outcome.all_text))
        least = min(peaks, key=lambda each: each["tensors_bytes"]) if peaks and not why else {}
        rows.append(Row(cell=cell.name, strategy=strategy, dry_bytes=dry.peak_bytes, why=why, **least))
        print(rows[-1].text, flush=True)
    return rows


def summary(rows: list[Row]) -> str:
    """Return how far the dry runs were from the tensors of real ranks."""
    lines = [
        "| strategy | cells | within 2% | within 8% | furthest below | furthest above |",
        "|---|---|---|---|---|---|",
    ]
    for strategy in RUNS:
        found = sorted(row.deviation for row in rows if row.strategy == strategy and not row.why)
        if found:
            near = [sum(abs(each) <= most for each in found) for most in (0.02, 0.08)]
            lines.append(f"| {strategy} | {len(found)} | {near[0]} | {near[1]} | {found[0]:+.1%} | {found[-1]:+.1%} |")
    return "\n".join(lines)


def main(words: list[str], *, saves: bool) -> None:
    """Compare the cells, and print the tables."""
    chosen = [each for each in cells.read() if not each.needs]
    chosen = [each for each in chosen if not words or any(word in each.name for word in words)]
    about, rows = sentence(machine()), list[Row]()
    with tempfile.TemporaryDirectory(prefix="jdb-") as folder, Notebook() as book:
        os.chdir(folder)  # some cells write files
        book.good("%load_ext jupyter_distrib")
        for cell in chosen:
            rows += compared(book, cell)
    loads = f"Load in the last 15 minutes of it: {os.getloadavg()[2]:.1f}."
    day = datetime.now(UTC).date()
    text = f"""\
# Dry runs beside real CPU ranks, {day}

{about} {loads} Two ranks, gloo. Repeat it with `python benchmarks/dry_runs.py`.

*Tensors* is the peak of memory that outlives the operator that has allocated it. The last columns are relative to it:
the dry run; tensors with the workspaces that the CPU's kernels free before they return; and these with copies of gloo
and of other threads, and states of random numbers.

{summary(rows)}

| cell | strategy | tensors | dry run | with workspaces | everything |
|---|---|---|---|---|---|
{chr(10).join(row.text for row in rows)}
"""
    print(text)
    if saves:
        (Path(__file__).parent / "results" / f"{day}-dry-runs.md").write_text(text)


if __name__ == "__main__":
    main([each for each in sys.argv[1:] if not each.startswith("--")], saves="--save" in sys.argv)
