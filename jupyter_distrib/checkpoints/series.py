"""Manages a folder of successive checkpoints: which one is the newest whole one, and which ones go.

    ckpt/save-000007/   whole: it has a `.metadata` file
    ckpt/save-000008/   being written, or left by a process that was killed

Runs on rank 0, in its main thread and in the thread that writes; other processes only look for the newest.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from jupyter_distrib.checkpoints.folder import METADATA, is_checkpoint

_NAME = "save-*"


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a folder, which may be a checkpoint itself; None if there is none."""
    if is_checkpoint(folder):
        return folder
    return next((each for each in reversed(_members(folder)) if is_checkpoint(each)), None)


def following(folder: Path) -> Path:
    """Return the folder of the next checkpoint."""
    numbers = [_number(each) for each in _members(folder)]
    return folder / f"save-{max(numbers, default=0) + 1:06d}"


def refusal_to_extend(folder: Path) -> str | None:
    """Return why the folder cannot hold successive checkpoints; None if it can."""
    if is_checkpoint(folder):
        return (
            f"{folder} is one checkpoint, written without every_s or keep, and would be mixed with others: "
            "choose another folder."
        )
    if folder.is_file():
        return f"{folder} is a file, and checkpoints are folders: choose another name."
    if folder.is_dir() and (others := {*folder.iterdir()} - {*_members(folder)}):
        return f"{folder} holds other files ({min(others).name}): choose another folder for the checkpoints."
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last whole checkpoints, and what killed processes have left before these."""
    members = _members(folder)
    whole = [each for each in members if is_checkpoint(each)]
    if not whole:
        return
    kept = {*whole[-keep:]}
    for each in members[: members.index(whole[-1])]:
        if each not in kept:
            (each / METADATA).unlink(missing_ok=True)  # first: a half-removed checkpoint is none
            shutil.rmtree(each, ignore_errors=True)


def _members(folder: Path) -> list[Path]:
    found = [each for each in folder.glob(_NAME) if _number(each) > 0 and each.is_dir()]
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    text = folder.name.removeprefix("save-")
    return int(text) if text.isdecimal() else 0
