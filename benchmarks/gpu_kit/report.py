"""The rows of a run of the kit, and the two files they are kept in."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.gpu_kit.step import Check, Where

Verdict = Literal["PASS", "FAIL", "SKIP"]
PLACES = {"gpu": "GPU", "bed": "feigned GPUs", "cpu": "CPU ranks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one step."""

    step: str
    title: str
    verdict: Verdict
    where: Where
    reason: str
    """Why it was left out or broke off; empty if its checks tell all."""
    took_s: float
    checks: tuple[Check, ...]


def verdict(checks: Sequence[Check], broke: str, skipped: str) -> Verdict:
    """Return the verdict on a step: one that broke off or has a failed check has failed, one that checked nothing was
    left out."""
    if broke or any(check.ok is False for check in checks):
        return "FAIL"
    return "SKIP" if skipped or all(check.ok is None for check in checks) else "PASS"


def counted(rows: Sequence[Row]) -> str:
    """Return how many rows have which verdict: `3 PASS, 1 FAIL`."""
    each = [row.verdict for row in rows]
    return ", ".join(f"{each.count(one)} {one}" for one in ("PASS", "FAIL", "SKIP") if one in each) or "no steps"


def save(folder: Path, about: dict[str, str], rows: Sequence[Row]) -> Path:
    """Write both files as of now; return the Markdown one."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / file_name(about)
    whole = {"machine": about, "verdicts": counted(rows), "rows": [asdict(row) for row in rows]}
    _write(stem.with_suffix(".json"), json.dumps(whole, indent=1) + "\n")
    _write(stem.with_suffix(".md"), page(about, rows))
    return stem.with_suffix(".md")


def file_name(about: dict[str, str]) -> str:
    gpus = re.sub(r"\W+", "-", about["gpus"]).strip("-").lower()
    return f"gpu-kit-{about['day']}-{gpus[:50] or 'no-gpu'}"


def today() -> str:
    return dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")


def page(about: dict[str, str], rows: Sequence[Row]) -> str:
    """Return everything to read: the machine, a line for each step, then each step's checks."""
    parts = [f"# The GPU kit, {about['day']}", _machine(about), f"{counted(rows)}."]
    if any(row.where != "gpu" for row in rows if row.verdict != "SKIP"):
        parts.append(
            "**Rows on feigned GPUs or CPU ranks show that the kit works and what holds without a GPU. They are no "
            "proof for a GPU.**"
        )
    head = [("step", "", "on", "s", "what must hold", "what was found")]
    lines = [(row.step, row.verdict, PLACES[row.where], f"{row.took_s:.0f}", row.title, short(row)) for row in rows]
    parts += [_table([*head, *lines]), *(_details(row) for row in rows if row.checks)]
    return "\n\n".join(parts) + "\n"


def _machine(about: dict[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in about.items() if value and name != "day")


def short(row: Row) -> str:
    """Return what failed; if nothing did, what was measured."""
    failed = [_told(check) for check in row.checks if check.ok is False]
    told = [*filter(None, [row.reason]), *failed] or [_told(check) for check in row.checks]
    return "; ".join(text if len(text) <= 160 else f"{text[:157]}..." for text in told[:6])


def _told(check: Check) -> str:
    return f"{check.what}: {check.measured}" if check.measured else check.what


def _details(row: Row) -> str:
    marks = {True: "holds", False: "**does not hold**", None: "figure"}
    lines = [f"- {marks[check.ok]}: {' '.join(_told(check).split())}" for check in row.checks]
    return "\n".join([f"## {row.step}: {row.title}", "", *lines])


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    lines.insert(1, "|" + "---|" * len(cells[0]))
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    """In one go: who reads while the kit runs, or after it was killed, finds a whole file."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, "utf-8")
    fresh.rename(path)
