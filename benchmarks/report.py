"""Figures, the tables they are shown in, and the files they are kept in."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured thing and what it should be."""

    what: str
    measured: str
    target: str = ""
    ok: bool | None = None
    """None: nothing was promised."""
    numbers: dict[str, object] = field(default_factory=dict)
    """Everything behind it: times in the unit that the key names."""

    @property
    def verdict(self) -> str:
        return {True: "ok", False: "MISSED", None: ""}[self.ok]


def spread(times_s: Sequence[float]) -> str:
    """`0.12 s (median 0.13, worst 0.20)`, or the same in ms."""
    if not times_s:
        return "never"
    scale, unit, digits = (1000, "ms", 1) if max(times_s) < 0.1 else (1, "s", 2)
    best, median, worst = (scale * f(times_s) for f in (min, statistics.median, max))
    return f"{best:.{digits}f} {unit} (median {median:.{digits}f}, worst {worst:.{digits}f})"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": cpu[1] if cpu else platform.processor(),
        "memory": f"{int(memory[1]) / 2**20:.0f} GB" if memory else "",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "ipykernel", "ipython")},
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def sentence(about: dict[str, str]) -> str:
    return (
        f"{about['cores']} cores of {about['cpu']}, {about['memory']}, {about['system']}, Python {about['python']}, "
        f"torch {about['torch']}, ipykernel {about['ipykernel']}; load before the run {about['load']}."
    )


def table(figures: Iterable[Figure]) -> str:
    rows = [("what", "measured", "target", ""), *((f.what, f.measured, f.target, f.verdict) for f in figures)]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def save(folder: Path, about: dict[str, str], figures: Sequence[Figure], peers: Sequence[dict[str, str]]) -> Path:
    """Write everything as JSON and the tables as Markdown; returns the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    day = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")
    cpu = re.sub(r"\W+", "-", about["cpu"]).strip("-").lower()[:40]
    stem = folder / f"{day}-{about['cores']}x-{cpu}"
    whole = {"machine": about, "figures": [asdict(f) | {"verdict": f.verdict} for f in figures], "peers": list(peers)}
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    page = stem.with_suffix(".md")
    page.write_text(f"# {day}\n\n{text(about, figures, peers)}\n")
    return page


def text(about: dict[str, str], figures: Sequence[Figure], peers: Sequence[dict[str, str]]) -> str:
    parts = [sentence(about)]
    if figures:
        parts.append(table(figures))
    if peers:
        parts.append(peer_table(peers))
    return "\n\n".join(parts)


def peer_table(peers: Sequence[dict[str, str]]) -> str:
    """One column for each peer."""
    names = list(dict.fromkeys(name for peer in peers for name in peer))
    return markdown([[name, *(peer.get(name, "") for peer in peers)] for name in names])


def write_page(body: str) -> None:
    """Put the figures between their markers."""
    before, start, rest = PAGE.read_text("utf-8").partition("<!-- figures -->\n")
    _, end, after = rest.partition("<!-- /figures -->")
    if not start or not end:
        raise SystemExit(f"{PAGE} has no figures markers")
    PAGE.write_text(f"{before}{start}{body}\n{end}{after}", "utf-8")
