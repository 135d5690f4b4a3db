"""Reads the training cells of `cells.txt`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.dry_run.play import play_each

FITS = "fits"
_KEYS = ("needs", "strategy", "none", "ddp", "fsdp")


@dataclass(frozen=True)
class Cell:
    """A training cell, and the answers of its dry runs."""

    name: str
    source: str
    needs: str
    """A package that it imports beside torch and numpy."""
    answers: dict[str, tuple[str, str]]
    """The verdict and words of its reason, by strategy."""


def read() -> list[Cell]:
    """Return all cells."""
    text = (Path(__file__).parent / "cells.txt").read_text()
    return [_cell(each) for each in re.split(r"(?m)^== ", text)[1:]]


def _cell(text: str) -> Cell:
    name, _, rest = text.partition("\n")
    given = dict[str, str]()
    while (key := rest.partition(": ")[0]) in _KEYS:
        line, _, rest = rest.partition("\n")
        given[key] = line.partition(": ")[2]
    strategies = given["strategy"].split() if "strategy" in given else ["ddp", "fsdp"]
    parted = {each: given.get(each, FITS).partition(": ") for each in strategies}
    answers = {each: (verdict, words) for each, (verdict, _, words) in parted.items()}
    return Cell(name=name, source=rest, needs=given.get("needs", ""), answers=answers)


def check(cell: Cell, folder: Path) -> None:
    """Play a cell in a folder, under its strategies at once, and compare the answers."""
    found = play_each(cell.source, list(cell.answers), folder=folder)
    for run, (verdict, words) in zip(found, cell.answers.values(), strict=True):
        assert run.verdict == verdict, repr(run)
        assert words in repr(run)
        if verdict == FITS:
            assert run.steps >= 2, repr(run)
            assert run.by_kind["parameters"] > 0
            assert sum(run.by_kind.values()) == run.peak_bytes
    assert [each.name for each in folder.iterdir() if each.is_file()] == []
