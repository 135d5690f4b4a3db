"""Manages a folder of successive checkpoints: finds the newest complete one, and removes old ones.

    ckpt/save-000007/   whole: it has a `.metadata` file
    ckpt/save-000008/   being written, or left by a process that was killed

A checkpoint counts if it belongs to the owner of `ckpt`, to this user or to root: otherwise somebody who may put
folders there could add one with a higher number, which would count as the newest. Links do not count, and are not
followed.

Runs on rank 0, in its main thread and in the thread that writes; other processes only look for the newest.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jupyter_distrib.checkpoints import reader
from jupyter_distrib.checkpoints.folder import is_checkpoint, is_ignored, is_of_checkpoint, taken_away
from jupyter_distrib.checkpoints.place import METADATA, CheckpointFolder, Identity
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system import other_users, outside_text

_NAME = re.compile(r"save-([0-9]{1,18})")
_TRIES = 100
_LAST = 10**18 - 1
"""Largest number that `_NAME` matches: a later checkpoint would never be found."""


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a folder, which may be a checkpoint itself; None if there is none.
    Warns about a newer checkpoint that does not count, or is damaged."""
    members, others = _members(folder)
    if is_checkpoint(folder) and not (members and _is_planted(folder / METADATA)):
        return folder
    found = _newest_undamaged([each for each in members if is_checkpoint(each)])
    newer = [each for each in others if is_checkpoint(each) and (found is None or _number(each) > _number(found))]
    if newer:
        instead = f"{found} is loaded" if found else "nothing is loaded"
        warnings.warn(f"{_whose(newer[-1])}, so {instead}; load it by its own name if you want it.", stacklevel=3)
    return found


def _newest_undamaged(whole: list[Path]) -> Path | None:
    """Return the last checkpoint that has all its bytes, with a warning about later ones; the last one of all if none
    has, so that loading it says why."""
    problems: list[str] = []
    for each in reversed(whole):
        if not (problem := reader.damage_of(each)):
            for text in problems:
                warnings.warn(f"{text}, so {each} is loaded, the newest one that is whole.", stacklevel=4)
            return each
        problems.append(problem)
    return whole[-1] if whole else None


def make_following(folder: Path, held: Identity | None = None) -> Path:
    """Create the folder of the next checkpoint.

    Args:
        folder: The folder of all checkpoints.
        held: Its identity when it was prepared; None: any.

    Raises:
        DistributedError: It cannot be created; the message says why.
    """
    with _held_open(folder, held) as place:
        members, _ = _members(folder, place.fd)
        first = max(map(_number, members), default=0) + 1
        for number in range(first, min(first + _TRIES, _LAST + 1)):
            made = folder / f"save-{number:06d}"
            try:
                place.make_folder(made.name)
            except FileExistsError:
                continue  # another user's folder, or a link
            except OSError as error:
                raise DistributedError(f"{made} cannot be written: {error.strerror or error}.") from None
            return made
    raise DistributedError(
        f"{folder} has no room for another checkpoint: no name from save-{min(first, _LAST):06d} on is free. "
        "Choose another folder."
    )


def member(folder: Path, name: object) -> Path:
    """Return the checkpoint of this name in the folder. Raises `DistributedError` if a series has none of such a name:
    ranks hear the name through torch's store, to which every user of the machine can connect."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise DistributedError(_misled(folder, name))
    return folder / name


def check_named(folder: Path, found: object) -> None:
    """Refuse a path, heard as above, that is neither the folder nor a checkpoint in it."""
    path = Path(found).absolute() if isinstance(found, str) else None
    if path is None or (path != folder.absolute() and path != member(folder, path.name).absolute()):
        raise DistributedError(_misled(folder, found))


def _misled(folder: Path, name: object) -> str:
    return (
        f"rank 0 seems to have named {outside_text.shown(str(name))!r}, which is no checkpoint of {folder}: give every "
        "rank the same folder. If they have it, another program has written into the ranks' torch store."
    )


def refusal_to_extend(folder: Path) -> str | None:
    """Return the reason why the folder cannot hold successive checkpoints; None if it can."""
    if is_checkpoint(folder):
        return (
            f"{folder} is one checkpoint, written without every_s or keep, and would be mixed with others: "
            "choose another folder."
        )
    if os.path.isfile(folder):
        return f"{folder} is a file, and checkpoints are folders: choose another name."
    if not os.path.isdir(folder):
        return None
    members, foreign = _members(folder)
    if foreign:
        return f"{_whose(foreign[0])}: choose a folder of your own for the checkpoints."
    if others := [each.name for each in {*folder.iterdir()} - {*members} if not is_ignored(each.name)]:
        found = outside_text.shown(min(others))
        return f"{folder} holds other files ({found}): choose another folder for the checkpoints."
    return None


def refusal_to_resume(folder: Path) -> str | None:
    """Return the reason why a folder without a checkpoint is none to begin in: `save` would never write there."""
    if os.path.isfile(folder):
        return f"{folder} is a file, and a checkpoint is a folder: torch.load() may be able to read it."
    try:
        members = {each for found in _members(folder) for each in found}
        names = [each.name for each in folder.iterdir() if each not in members]
    except OSError:  # there is none
        return None
    others = [each for each in names if not is_of_checkpoint(each) and not is_ignored(each)]
    if not others:
        return None
    return (
        f"{folder} has no checkpoint and holds other files ({outside_text.shown(min(others))}), so that nothing can "
        "be saved into it: give jupyter_distrib.resume() the folder that jupyter_distrib.save() writes into."
    )


def prune(folder: Path, keep: int, held: Identity | None = None) -> None:
    """Remove all but the newest complete checkpoints, and older leftovers of killed processes.

    Raises:
        DistributedError: The folder is not the one that was `held`.
    """
    with _held_open(folder, held) as place:
        members, _ = _members(folder, place.fd)
        whole = [each for each in members if place.is_whole(each.name)]
        if not whole:
            return
        kept = {*whole[-keep:]}
        for each in members[: members.index(whole[-1])]:
            if each not in kept:
                _remove(place, each.name)


def _remove(place: CheckpointFolder, name: str) -> None:
    """Remove the files of a checkpoint, and its folder unless it contains something else: another program may use such
    a name, or somebody may have added notes to a checkpoint."""
    with suppress(OSError):  # a link that has taken its place
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)
        try:
            # `.metadata` first: without it, the rest does not count as a checkpoint
            for each in sorted(filter(is_of_checkpoint, os.listdir(fd))):
                with suppress(OSError):
                    os.unlink(each, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=place.fd)


@contextmanager
def _held_open(folder: Path, held: Identity | None) -> Iterator[CheckpointFolder]:
    """Yield the open folder of all checkpoints. Whoever may rename it can put another folder of this user, or a link to
    one, in its place; nothing is created or removed there."""
    try:
        place = CheckpointFolder(folder)
    except OSError as error:
        raise DistributedError(f"{folder} cannot be written: {error.strerror or error}.") from None
    try:
        if held not in (None, place.identity):
            raise DistributedError(taken_away(folder))
        yield place
    finally:
        place.close()


def _members(folder: Path, fd: int | None = None) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints that count and those of other users, each by number; `fd` is the open folder."""
    ours, others = list[Path](), list[Path]()
    try:
        owners = {os.stat(folder if fd is None else fd).st_uid, os.geteuid(), 0}
        found = [*os.scandir(folder if fd is None else fd)]
    except PermissionError as error:
        raise DistributedError(f"{folder} cannot be read: {error.strerror}.") from None
    except OSError:  # there is none
        return [], []
    for each in found:
        if _NAME.fullmatch(each.name) and _number(folder / each.name):
            with suppress(OSError):  # it has just been removed
                info = each.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    (ours if info.st_uid in owners else others).append(folder / each.name)
    return sorted(ours, key=_number), sorted(others, key=_number)


def _is_planted(metadata: Path) -> bool:
    """Return whether somebody else has put `.metadata` into a folder of several checkpoints."""
    try:
        return metadata.lstat().st_uid not in {metadata.parent.stat().st_uid, os.geteuid(), 0}
    except OSError:  # it has just been removed
        return True


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("save-"))


def _whose(checkpoint: Path) -> str:
    folder = checkpoint.parent
    try:
        owners = [other_users.login(each.stat().st_uid) for each in (checkpoint, folder)]
    except OSError:  # it has just been removed
        return f"{checkpoint} belongs to another user"
    return f"{checkpoint} belongs to {owners[0]}, not to {owners[1]}, the owner of {folder}"
