"""A package of somebody else, as an installation leaves it in a folder: modules, and entry points that name them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.notebook import ROOT


def bring(folder: Path, entry_points: str, **modules: str) -> dict[str, str]:
    """Install a package with these modules and entry points; returns the environment that has it."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    info = folder / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def old_torch(folder: Path) -> dict[str, str]:
    """Let a folder say that torch 2.6 is installed; returns the environment in which it is found first."""
    info = folder / "torch-2.6.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
