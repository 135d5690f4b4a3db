"""What other users put where checkpoints are written and read: it is refused by name, or read without running anything.
A real second user; exploits run as far as they get."""

from __future__ import annotations

import enum
import functools
import io
import itertools
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_distrib import DistributedError, load, resume, save
from jupyter_distrib.checkpoints import folder, part, periodic, series, strict_metadata
from jupyter_distrib.checkpoints.folder import Writer
from jupyter_distrib.checkpoints.place import CheckpointFolder, ThisUser
from jupyter_distrib.checkpoints.snapshot import Snapshot
from tests.notebook import Notebook

STRANGER = 12345
THEY = f"user {STRANGER}"
as_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)  # strangers start in it; the folders above are closed to them


def stranger_does(program: str) -> None:
    """Run a program as another user, in the present folder."""
    become = f"import os, pickle\nos.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
    subprocess.run([sys.executable, "-c", become + textwrap.dedent(program)], check=True, timeout=60)


BOMB = """
class Bomb:
    def __reduce__(self):
        return os.system, ("id > exploded",)
"""


class Bomb:
    """A pickle that leaves a file when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("id > exploded",)


@pytest.fixture(autouse=True)
def _nothing_explodes(_in_a_folder_of_its_own: None, tmp_path: Path) -> Any:
    yield
    assert not [*tmp_path.rglob("exploded")]


def refused(call: Any, *args: Any, **objects: Any) -> str:
    with pytest.raises(DistributedError) as raised:
        call(*args, **objects)
    return str(raised.value).replace(f"{os.getcwd()}/", "")


def give(folder: str | Path, uid: int = STRANGER) -> None:
    """Make somebody else the owner of a folder and all that is in it."""
    for path in [Path(folder), *Path(folder).rglob("*")]:
        os.chown(path, uid, uid, follow_symlinks=False)


def finish() -> None:
    periodic._finish(ok=True)


# ------------------------------------------------------------------------------------------------ where we write


@as_two_users
@pytest.mark.parametrize("options", [{}, {"keep": 2}, {"every_s": 0}])
def test_a_folder_of_somebody_else_is_refused_by_name_and_one_in_it_is_good(options: dict[str, Any]) -> None:
    os.mkdir("shared")
    os.chmod("shared", 0o1777)
    stranger_does("os.mkdir('shared/run'); os.chmod('shared/run', 0o777)")

    said = refused(save, "shared/run", a=1, **options)
    save("shared/run/mine", a=1, **options)
    finish()

    assert said.startswith(f"shared/run belongs to {THEY}, who could replace the files")
    assert load("shared/run/mine") == {"a": 1}
    assert stat.S_IMODE(os.stat("shared/run/mine").st_mode) & 0o022 == 0
    assert os.listdir("shared/run") == ["mine"]


@as_two_users
def test_root_saves_into_a_folder_of_somebody_else_unless_everybody_may_write_there() -> None:
    """As in a container, where a folder of the host belongs to its user. It is read as what others have written."""
    os.mkdir("host")
    give("host")

    save("host", a=1, weight=torch.ones(2))
    save("host", a=2, weight=torch.ones(2))
    assert load("host")["a"] == 2
    for path in Path("host").iterdir():
        path.unlink()
    save("host", keep=1, a=1)
    save("host", keep=1, a=Fraction(1, 3))
    finish()
    assert os.listdir("host") == ["save-000002"]
    assert resume("host") == {"a": Fraction(1, 3)}

    os.chmod("host", 0o757)
    assert refused(save, "host", keep=1, a=2).startswith(f"host belongs to {THEY}, who could replace")


@as_two_users
def test_what_root_has_saved_into_a_folder_of_somebody_else_is_read_without_running_it() -> None:
    os.mkdir("host")
    give("host")
    save("host", a=Fraction(1, 3))

    assert f"is in a folder that belongs to {THEY}, and `a` in it is more" in refused(load, "host")


@pytest.mark.parametrize("to_link", [True, False])
def test_a_folder_that_is_swapped_while_it_is_looked_at_is_none_to_save_into(
    monkeypatch: pytest.MonkeyPatch, to_link: bool
) -> None:
    """Whoever may rename it can have the link in place when it is opened, and not when its owner is looked at."""
    save("precious", a="precious")
    save("team", a=1)
    before = sorted(os.listdir("precious"))

    def swapped(path: Path) -> CheckpointFolder:
        os.rename("team", "away")
        os.symlink("precious", "team") if to_link else os.rename("precious", "team")
        opened = CheckpointFolder(path)
        os.unlink("team") if to_link else os.rename("team", "precious")
        os.rename("away", "team")
        return opened

    monkeypatch.setattr(folder, "CheckpointFolder", swapped)
    assert refused(folder.make_ready, Path("team")).startswith("team was replaced by another folder")
    assert sorted(os.listdir("precious")) == before


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder whose path a stranger can follow."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.slow
@as_two_users
def test_a_folder_of_root_is_as_good_as_ones_own(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a team that an administrator has made, or a volume of a container."""
    monkeypatch.chdir(open_folder)
    volumes = {"team": 0o2775, "sticky": 0o1777, "open": 0o777}
    for name, mode in volumes.items():
        os.mkdir(name)
        os.chown(name, 0, STRANGER)
        os.chmod(name, mode)
    program = f"""
        import os
        from jupyter_distrib import load, save
        os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})
        for volume in {[*volumes]}:
            for options in ({{}}, {{"keep": 1}}):
                folder = volume + "/run" if options else volume
                for number in (1, 2):
                    save(folder, a=number, **options)
                    assert load(folder) == {{"a": number}}, volume
                for path in ([] if options else os.listdir(volume)):
                    os.unlink(volume + "/" + path)
            os.system("rm -r " + folder)
            save(volume, a=3, keep=1)
            assert load(volume) == {{"a": 3}}, volume
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True, timeout=60, env=env)


@as_two_users
def test_a_series_whose_place_another_folder_takes_makes_and_removes_nothing_there() -> None:
    """Whoever owns the folder above can rename it; its owner, and root, choose what is written below."""
    for number in (1, 2):
        save("precious", keep=2, number=number)
    finish()
    os.mkdir("team")
    give("team")
    save("team/run", keep=1, a=1)
    periodic.wait(Path("team/run"))
    held = CheckpointFolder(Path("team/run"))
    held.close()
    stranger_does("os.rename('team/run', 'team/moved'); os.symlink('../precious', 'team/run')")

    assert refused(save, "team/run", keep=1, a=2).startswith("team/run was replaced by another folder")
    assert refused(series.prune, Path("team/run"), 1, held.identity).startswith(
        "team/run was replaced by another folder"
    )
    assert sorted(os.listdir("precious")) == ["save-000001", "save-000002"]
    assert load("precious") == {"number": 2}
    finish()


@as_two_users
def test_a_checkpoint_whose_place_another_one_takes_before_it_is_written_leaves_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save("precious", a=1)
    os.mkdir("team")
    give("team")
    save("team/run", a=1)

    def swapped() -> str:
        stranger_does("os.rename('team/run', 'team/moved'); os.symlink('../precious', 'team/run')")
        return "id"

    monkeypatch.setattr("jupyter_distrib.checkpoints.foreground.new_save_id", swapped)

    assert refused(save, "team/run", a=2).startswith("team/run was replaced by another folder")
    assert load("precious") == load("team/moved") == {"a": 1}


@as_two_users
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_writes_into_what_has_taken_the_place_of_its_new_folder(rank: int) -> None:
    os.mkdir("elsewhere")
    os.symlink("elsewhere", "a_link")
    os.mkdir("theirs")
    give("theirs")

    with pytest.raises(NotADirectoryError):
        _ = Writer(Path("a_link"), "id", rank, is_new=True).place
    writer = Writer(Path("theirs"), "id", rank, is_new=True)
    with pytest.raises(DistributedError, match="theirs was replaced by another folder"):
        _ = writer.place
    writer.clean_up()
    writer.close()
    assert os.path.isdir("theirs")


@as_two_users
def test_a_copy_that_is_made_as_the_message_says_loads_whatever_the_umask() -> None:
    before = os.umask(0)
    try:
        save("here", third=Fraction(1, 3))
        for path in [Path("here"), *Path("here").iterdir()]:
            path.chmod(0o777)
        subprocess.run(refused(load, "here").partition("(")[2].partition(")")[0], shell=True, check=True)
    finally:
        os.umask(before)

    assert load("COPY") == {"third": Fraction(1, 3)}


@as_two_users
def test_a_link_of_somebody_else_leads_to_no_checkpoint_of_mine() -> None:
    save("other", a=1)
    os.mkdir("team")
    os.chmod("team", 0o777)
    stranger_does("os.symlink('../other', 'team/run')")

    assert refused(save, "team/run", a=2).startswith(f"team/run belongs to {THEY}")
    assert "holds other files" not in refused(save, "team/run", keep=1, a=2)
    assert load("other") == {"a": 1}


@as_two_users
def test_what_a_colleague_has_put_into_the_series_beforehand_is_refused_by_name_and_never_read() -> None:
    """A team's folder: setgid, and every member writes."""
    os.mkdir("ckpt")
    os.chown("ckpt", 0, STRANGER)
    os.chmod("ckpt", 0o2775)
    plant = f"{BOMB}\nos.mkdir('ckpt/save-00000' + number)\n"
    plant += "open('ckpt/save-00000' + number + '/.metadata.part-1', 'wb').write(pickle.dumps(Bomb()))"
    save("ckpt", keep=2, a=1)
    finish()
    stranger_does(f"number = '2'\n{plant}")

    assert refused(save, "ckpt", keep=2, a=2).startswith(
        f"ckpt/save-000002 belongs to {THEY}, not to root, the owner of ckpt"
    )
    assert load("ckpt") == {"a": 1}


@as_two_users
def test_a_folder_that_is_planted_after_the_first_save_is_passed_over() -> None:
    os.mkdir("ckpt")
    os.chmod("ckpt", 0o777)
    save("ckpt", keep=1, a=1)
    periodic.wait(Path("ckpt"))
    stranger_does("os.mkdir('ckpt/save-000002'); os.symlink('/etc', 'ckpt/save-000003')")
    save("ckpt", keep=1, a=2)
    finish()

    assert load("ckpt/save-000004") == {"a": 2}
    assert sorted(os.listdir("ckpt")) == ["save-000002", "save-000003", "save-000004"]
    assert os.path.isdir("/etc")


def test_prune_follows_no_link_and_counts_none() -> None:
    save("precious", a=1)
    save("ckpt", keep=2, a=1)
    finish()
    os.rename("ckpt/save-000001", "ckpt/save-000003")
    os.symlink("../precious", "ckpt/save-000001")
    os.symlink("../precious", "ckpt/save-000009")

    series.prune(Path("ckpt"), 1)

    assert load("precious") == {"a": 1}
    assert series.newest(Path("ckpt")) == Path("ckpt/save-000003")
    assert "holds other files (save-000001)" in refused(save, "ckpt", keep=1, a=2)


def test_prune_removes_only_what_a_save_has_written() -> None:
    """Other programs name folders so, too, and whoever may rename folders beside one's checkpoints can do it."""
    for path in ("ckpt/save-100/model.safetensors", "ckpt/save-7/sub/notes.txt"):
        Path(path).parent.mkdir(parents=True)
        Path(path).touch()
    save("ckpt", keep=1, a=1)
    finish()
    Path("ckpt/save-000101/notes.txt").touch()
    save("ckpt", keep=1, a=2)
    finish()

    files = sorted(str(path) for path in Path("ckpt").rglob("*") if path.is_file() and "000102" not in str(path))
    assert files == ["ckpt/save-000101/notes.txt", "ckpt/save-100/model.safetensors", "ckpt/save-7/sub/notes.txt"]
    assert resume("ckpt") == {"a": 2}


def test_no_checkpoint_gets_a_name_that_is_never_found() -> None:
    """Whoever may rename folders there can give one the greatest number."""
    save("ckpt", keep=2, a=1)
    finish()
    os.rename("ckpt/save-000001", "ckpt/save-999999999999999999")

    assert refused(save, "ckpt", keep=2, a=2).startswith("ckpt has no room for another checkpoint")
    assert resume("ckpt") == {"a": 1}


HOSTILE = "x\x1b]0;title\x07\nAll is well: \u202e"


def test_names_of_others_add_no_line_or_terminal_code_to_a_message(tmp_path: Path) -> None:
    for each in (f"ckpt/{HOSTILE}", f"beside/{HOSTILE}/.metadata"):
        Path(each).parent.mkdir(parents=True)
        Path(each).touch()
    writer, place = Writer(tmp_path / "ckpt", "id", 0, is_new=True), CheckpointFolder(tmp_path / "ckpt")
    said = [
        refused(save, "ckpt", keep=1, a=1),
        refused(load, "beside/none"),
        refused(writer._check_new, place),
    ]
    place.close()
    for each in said:
        assert each.isprintable(), each
        assert "All is well" in each


@as_two_users
@pytest.mark.parametrize("value", [torch.ones(2), Fraction(1, 3), {HOSTILE: 1}], ids=["tensor", "object", "dict"])
def test_names_in_a_checkpoint_of_somebody_else_add_nothing_to_a_message(value: object) -> None:
    save("ckpt", **{HOSTILE: value})
    give("ckpt")

    said = refused(load, "ckpt")
    assert "cannot be read" in said
    assert said.isprintable(), said


def test_prune_takes_no_link_for_the_folder_whose_place_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    save("precious", a=1)
    for number in range(2):
        save("ckpt", keep=2, a=number)
    finish()
    own = series._remove

    def swapped(place: CheckpointFolder, name: str) -> None:
        shutil.rmtree(place.path / name)
        (place.path / name).symlink_to(Path("precious").absolute())
        own(place, name)

    monkeypatch.setattr(series, "_remove", swapped)
    series.prune(Path("ckpt"), 1)

    assert load("precious") == {"a": 1}


def test_a_save_does_not_write_through_a_link_that_is_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("victim").write_text("as it was")
    os.mkdir("here")
    monkeypatch.setattr("jupyter_distrib.checkpoints.foreground.new_save_id", lambda: "known")
    os.symlink("../victim", "here/__known__0_0.distcp")

    assert "here could not be written: FileExistsError" in refused(save, "here", a=1)

    os.mkdir("again")
    os.symlink("../victim", "again/.metadata.known.pending")
    assert "again could not be written: FileExistsError" in refused(save, "again", a=1)
    assert Path("victim").read_text() == "as it was"


def test_a_folder_that_is_swapped_during_the_save_gets_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, and those of the earlier checkpoint removed, in the folder that was looked at."""
    save("precious", a=1)
    own = Writer.finish

    def swapped(self: Writer, *args: Any) -> None:
        os.rename("here", "moved")
        os.symlink("precious", "here")
        own(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "finish", swapped)
        save("here", a=2)

    assert load("precious") == {"a": 1}
    assert load("moved") == {"a": 2}


def test_files_of_a_checkpoint_can_be_written_by_nobody_else_whatever_the_umask() -> None:
    before = os.umask(0)
    try:
        save("here", a=1)
        save("series", keep=1, a=1)
        finish()
    finally:
        os.umask(before)

    paths = [Path("here"), *Path("here").iterdir(), *Path("series").rglob("*")]
    assert len(paths) >= 6
    assert not [path for path in paths if path.stat().st_mode & 0o022]


def test_this_user_is_who_the_file_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file server that maps root to nobody: what we make belongs to somebody else than we are called."""
    monkeypatch.setattr(os, "geteuid", lambda: 777)
    monkeypatch.setattr(os, "getuid", lambda: 777)
    save("here", a=Fraction(1, 3))
    save("series", keep=1, a=Fraction(1, 3))
    finish()

    assert load("here") == load("series") == {"a": Fraction(1, 3)}


# ------------------------------------------------------------------------------------------------ parts of other ranks


def good_part() -> dict[str, Any]:
    return {
        "name": "model.weight",
        "path": ["model", "weight"],
        "tensor": {"dtype": "float32", "size": [8, 4], "offsets": [4, 0], "sizes": [4, 4]},
        "sharded": True,
        "file": "__id__1_0.distcp",
        "offset": 0,
        "length": 10,
    }


def planted(content: bytes) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(content))


def void(_: object) -> None:
    pass


def with_fields(**fields: Any) -> Callable[[Path], None]:
    return planted(json.dumps([{**good_part(), **fields}]).encode())


def a_link(path: Path) -> None:
    path.with_name("elsewhere").write_text("[]")
    path.symlink_to("elsewhere")


def a_huge_one(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(part.MOST_BYTES + 1)


def tensor(**fields: Any) -> dict[str, Any]:
    return {**good_part()["tensor"], **fields}


PARTS = {
    "a pickle": planted(pickle.dumps([Bomb()])),
    "brackets": planted(b"[" * 100_000),
    "cut off": planted(b'[{"name": "a"'),
    "an object": planted(b"{}"),
    "bytes": planted(b"\xff\x00\xfe"),
    "a huge number": planted(b"[" + b"9" * 10_000 + b"]"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link": a_link,
    "a huge one": a_huge_one,
    "a file above": with_fields(file="../__id__1_0.distcp"),
    "a file elsewhere": with_fields(file="/etc/passwd"),
    "a file with a line": with_fields(file="__id__1_0.distcp\n"),
    "a file of rank 0": with_fields(file="__id__0_0.distcp"),
    "a file of another save": with_fields(file="__ie__1_0.distcp"),
    "a negative offset": with_fields(offset=-1),
    "true for a number": with_fields(length=True),
    "a fraction": with_fields(length=1.0),
    "beyond 64 bits": with_fields(length=1 << 63),
    "no path": with_fields(path=[]),
    "a path of objects": with_fields(path=[{}]),
    "no name": with_fields(name=None),
    "one field more": with_fields(more=1),
    "not sharded as a string": with_fields(sharded="no"),
    "another type": with_fields(tensor=tensor(dtype="nn")),
    "a function for a type": with_fields(tensor=tensor(dtype="load")),
    "unequal shapes": with_fields(tensor=tensor(offsets=[0])),
    "negative sizes": with_fields(tensor=tensor(sizes=[-1, 4])),
    "a thousand dimensions": with_fields(tensor=tensor(size=[1] * 1000, sizes=[1] * 1000, offsets=[0] * 1000)),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_is_none_is_refused_with_its_path(kind: str) -> None:
    os.mkdir("here")
    PARTS[kind](Path("here/.metadata.id.part-1"))
    writer = Writer(Path("here"), "id", 0, is_new=False)
    try:
        said = refused(writer.part, 1)
    finally:
        writer.close()

    assert said.startswith("here/.metadata.id.part-1 was not written by rank 1: ")
    assert len(said) < 500


def test_a_part_comes_back_as_it_was() -> None:
    plan, results = part.from_json(json.dumps([good_part()]).encode(), save_id="id", rank=1)

    assert json.loads(part.as_json(plan, results)) == [good_part()]


@as_two_users
@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), b"[]"], ids=["a pickle", "an empty part"])
def test_a_part_of_somebody_else_fails_the_save_with_their_name_and_without_waiting(content: bytes) -> None:
    os.mkdir("here")
    path = Path("here/.metadata.id.part-1")
    path.write_bytes(content)
    os.chown(path, STRANGER, STRANGER)
    whole = []
    snapshot = Snapshot({"a": 1}, Path("here"), save_id="id", rank=0, ranks=2, on_whole=lambda: whole.append(1))

    said = refused(snapshot.wait)

    assert said == (f"here/.metadata.id.part-1 was not written by rank 1: it belongs to {THEY}. None of it was used.")
    assert not whole
    assert not os.path.exists("here/.metadata")


RANKS = """%%distributed --ranks 2 --strategy fsdp
import torch, jupyter_distrib
from torch import nn
model = nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 5)).sum().backward()
optimizer.step()
{body}
"""


@as_two_users
@pytest.mark.slow
def test_ranks_that_save_their_shards_do_not_believe_the_parts_of_a_colleague(shared_notebook: Notebook) -> None:
    """The names of parts are known beforehand here, as they are to one who watches the folder."""
    book = shared_notebook
    book.ok(f"import os; os.mkdir('team'); os.chown('team', 0, {STRANGER}); os.chmod('team', 0o2775)")
    plant = f"""
import os, pickle
from pathlib import Path
from jupyter_distrib.checkpoints import folder, periodic
{BOMB}
def planted(self, rank):
    path = self.folder / self._part(rank)
    path.write_bytes(pickle.dumps(Bomb()))
    os.chown(path, {STRANGER}, {STRANGER})
    print("planted")
    return True
has_part, leave_part = folder.Writer.has_part, folder.Writer.leave_part
folder.Writer.has_part, folder.Writer.leave_part = planted, lambda self, *_: None
try:
    jupyter_distrib.save("team/ckpt", keep=2, model=model)
    if rank == 0:
        periodic.wait(Path("team/ckpt"))
    torch.distributed.barrier()
finally:
    folder.Writer.has_part, folder.Writer.leave_part = has_part, leave_part
"""
    failed = book.fails(RANKS.format(body=plant))

    assert "planted" in failed.text
    assert f"rank 1: it belongs to {THEY}" in failed.traceback
    assert book.ok("[*__import__('pathlib').Path('.').rglob('exploded')]").result == "[]"
    assert "rank 1" in book.ok(RANKS.format(body="jupyter_distrib.save('team/whole', model=model)\nrank")).result
    assert book.ok("import jupyter_distrib; len(jupyter_distrib.load('team/whole')['model'])").result == "4"


# ------------------------------------------------------------------------------------------------ what we read


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7])


@as_two_users
@pytest.mark.parametrize("options", [{}, {"keep": 1}])
def test_a_colleagues_checkpoint_loads(options: dict[str, Any]) -> None:
    model, optimizer, scheduler = trained()
    plain = {"epoch": 3, "note": "ü", "losses": [0.5, {1: (2, None)}], "best": torch.ones(2)}
    save("here", model=model, optimizer=optimizer, scheduler=scheduler, **plain, **options)
    finish()
    give("here")
    again, its_own, schedule = trained()

    read = resume("here", model=again, optimizer=its_own, scheduler=schedule)

    assert torch.equal(again.weight, model.weight)
    assert torch.equal(its_own.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert schedule.milestones == Counter([3, 7])
    assert read["losses"] == plain["losses"]
    assert (read["epoch"], read["note"]) == (3, "ü")
    assert torch.equal(load("here")["best"], torch.ones(2))


@as_two_users
@pytest.mark.parametrize("of_them", ["here", "here/.metadata", "data"])
def test_a_value_that_needs_code_is_refused_with_its_owner_until_it_is_copied(of_them: str) -> None:
    save("here", third=Fraction(1, 3), epoch=1)
    for path in Path().glob("here/__*" if of_them == "data" else of_them):
        os.chown(path, STRANGER, STRANGER)

    said = refused(load, "here")

    where = ".metadata" if of_them == "here/.metadata" else "__"
    assert said.startswith(f"here/{where}")
    assert f"belongs to {THEY}, and `third` in it is more than numbers, strings and tensors" in said
    assert said.endswith("copy the folder and load the copy (cp -rL here COPY && chmod -R go-w COPY).")
    subprocess.run(["cp", "-rL", "here", "COPY"], check=True)
    assert load("COPY") == {"third": Fraction(1, 3), "epoch": 1}


def _linked() -> None:
    (data,) = Path("here").glob("__*")
    data.rename("downloaded")
    data.symlink_to("../downloaded")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: os.chmod("here", 0o777), "is in a folder that can be written by every user"),
        (lambda: [path.chmod(0o666) for path in Path("here").iterdir()], "can be written by every user"),
        (_linked, "is a link"),
    ],
)
def test_a_file_that_others_could_have_put_there_is_read_without_running_it(
    change: Callable[[], object], told: str
) -> None:
    save("here", third=Fraction(1, 3))
    save("plain", third=0.3)
    change()

    assert told in refused(load, "here")
    for path in Path("plain").iterdir():
        path.chmod(0o666)
    assert load("plain") == {"third": 0.3}


def test_modes_count_only_where_a_file_has_the_mode_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    save("here", third=Fraction(1, 3))
    os.chmod("here", 0o777)
    monkeypatch.setattr(CheckpointFolder, "created", lambda _: ThisUser(uid=os.geteuid(), has_modes=False))

    assert load("here") == {"third": Fraction(1, 3)}


@as_two_users
def test_a_planted_pickle_does_not_run(tmp_path: Path) -> None:
    save("here", a=1)
    save("value", a=Bomb())
    give("value")
    os.chmod("here", 0o777)
    stranger_does(f"{BOMB}\nos.unlink('here/.metadata'); open('here/.metadata', 'wb').write(pickle.dumps(Bomb()))")

    assert f"it belongs to {THEY}, so nothing is run that it names" in refused(load, "here")
    assert "`a` in it is more than numbers" in refused(load, "value")


@as_two_users
def test_a_planted_checkpoint_with_a_higher_number_is_not_the_newest() -> None:
    save("ckpt", keep=3, number=1)
    finish()
    os.chmod("ckpt", 0o1777)
    stranger_does(
        f"{BOMB}\nos.mkdir('ckpt/save-999999')\nopen('ckpt/save-999999/.metadata', 'wb').write(pickle.dumps(Bomb()))"
    )

    with pytest.warns(
        UserWarning, match=f"save-999999 belongs to {THEY}, not to root, the owner of ckpt, so ckpt/save-"
    ):
        assert resume("ckpt") == {"number": 1}
    shutil.rmtree("ckpt/save-000001")
    with pytest.warns(UserWarning, match=f"belongs to {THEY}, .* so nothing is loaded"):
        assert resume("ckpt") == {}
    assert "cannot be read: UnpicklingError" in refused(load, "ckpt/save-999999")


@as_two_users
def test_metadata_that_are_planted_beside_a_series_do_not_hide_it() -> None:
    save("ckpt", keep=3, number=1)
    finish()
    os.chmod("ckpt", 0o1777)
    stranger_does(f"{BOMB}\nopen('ckpt/.metadata', 'wb').write(pickle.dumps(Bomb()))")

    assert resume("ckpt") == load("ckpt") == {"number": 1}


def test_a_new_folder_that_is_swapped_for_another_checkpoint_leaves_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        save("precious", keep=2, number=number)
    finish()
    make = series.make_following

    def swapped(*folder: Any) -> Path:
        made = make(*folder)
        os.rename("ckpt", "moved")
        shutil.rmtree("precious/save-000001")
        os.rename("precious/save-000002", "precious/save-000001")
        os.rename("precious", "ckpt")
        return made

    monkeypatch.setattr(series, "make_following", swapped)
    save("ckpt", keep=1, number=3)

    assert "ckpt/save-000001 holds" in refused(finish)
    assert load("ckpt/save-000001") == {"number": 2}


class Reduced:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def metadata() -> Any:
    save("for_metadata", weight=torch.ones(2, 2), a=1)
    return pickle.loads(Path("for_metadata/.metadata").read_bytes())


def test_metadata_of_somebody_else_are_those_that_were_written() -> None:
    own, read = metadata(), strict_metadata.metadata_from(Path("for_metadata/.metadata").read_bytes())

    assert (read.state_dict_metadata, read.planner_data) == (own.state_dict_metadata, own.planner_data)
    assert read.storage_data == own.storage_data


def test_metadata_are_read_that_some_versions_of_python_311_pickle_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    assert b"getattr" in (content := pickle.dumps(metadata()))
    assert strict_metadata.metadata_from(content).state_dict_metadata.keys() == {"weight", "a"}


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", ".", "..", "a/b", 3, None])
def test_metadata_of_somebody_else_name_files_in_their_folder_alone(name: Any) -> None:
    found = metadata()
    for each in found.storage_data.values():
        each.relative_path = name

    with pytest.raises((ValueError, KeyError)):
        strict_metadata.metadata_from(pickle.dumps(found))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Bomb()),
        pickle.dumps(Reduced(eval, ("1",))),
        pickle.dumps(Reduced(torch.load, ("x",))),
        b"ctorch\nload\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0cnn.functional\x93.",
        b"cjupyter_distrib.checkpoints.strict_metadata\n_Held\n.",
        b"I1\n.",
        b"",
    ],
)
def test_metadata_of_somebody_else_may_name_nothing_but_their_own_classes(content: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError, EOFError)):
        strict_metadata.metadata_from(content)


def _doubled(first: bytes, again: bytes) -> bytes:
    """Return the operations for a value that holds one twice, which holds one twice, and so on."""
    parts = [first + b"q\x00"]
    parts += [again.replace(b"?", b"h" + bytes([place])) + b"q" + bytes([place + 1]) for place in range(80)]
    return b"".join(parts)


_SIZED = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x13\x00\x00\x00state_dict_metadata"


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(_SIZED + b"(" + _doubled(b")", b"??\x86") + b"l" + b"sb.", id="tuples"),
        pytest.param(_SIZED + b"}(" + _doubled(b")", b"??\x86") + b"tNsb.", id="as a key"),
        pytest.param(_SIZED + b"(" + _doubled(b"]", b"](??e") + b"lsb.", id="lists"),
        pytest.param(_SIZED + b"}(" + _doubled(b")", b"2\x86") + b"tNsb.", id="by DUP"),
        pytest.param(
            _SIZED + b"}(" + _doubled(b")", b"ctorch.serialization\n_get_layout\n??\x86\x85R") + b"tNsb.",
            id="by a call",
        ),
        pytest.param(_SIZED + b"}(" + _doubled(b")", b"(??tNq\xff0") + b"tNsb.", id="by POP"),
    ],
)
def test_metadata_of_somebody_else_end_in_finite_time(pickled: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError, TypeError, KeyError)):
        strict_metadata.metadata_from(pickled)


@pytest.mark.parametrize(
    "keys",
    [
        [pickle.dumps(number * (2**61 - 1), 2)[2:-1] for number in range(100_000)],
        [pickle.dumps(signs, 2)[2:-1] for signs in itertools.islice(itertools.product((-1, -2), repeat=17), 50_000)],
    ],
    ids=["numbers", "tuples"],
)
def test_metadata_of_somebody_else_have_no_keys_with_one_hash(keys: list[bytes]) -> None:
    pickled = _SIZED + b"}(" + b"".join(key + b"N" for key in keys) + b"usb."
    began_s = time.monotonic()
    with pytest.raises(pickle.UnpicklingError, match="it has keys other than names"):
        strict_metadata.metadata_from(pickled)
    assert time.monotonic() - began_s < 20


# Each would end this process, or keep it busy for ever, so it is loaded in another one.
_DEEP = b"\x80\x02}N" + b"\x85" * 1_000_000 + b"K\x01s."
_WIDE = b"\x80\x02](" + _doubled(b")", b"??\x86") + b"e}hPK\x01s\x86."
_LOAD = "import sys; sys.path[:] = {path}; from jupyter_distrib import load; load(sys.argv[1])"


def _torch_file(pickled: bytes) -> bytes:
    """Return what `torch.save` writes, with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def _said_in_another_process(name: str) -> str:
    program = _LOAD.format(path=sys.path)
    command = [sys.executable, "-c", program, name]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended
    return ended.stderr.splitlines()[-1]


@pytest.mark.slow
@as_two_users
@pytest.mark.parametrize("pickled", [_DEEP, _WIDE], ids=["deep", "wide"])
@pytest.mark.parametrize("place", ["a value", "a tensor", "metadata"])
def test_a_pickle_of_somebody_else_neither_ends_the_process_nor_keeps_it_busy(place: str, pickled: bytes) -> None:
    save("here", value=1, tensor=torch.ones(2))
    if place == "metadata":
        Path("here/.metadata").write_bytes(pickled)
    else:
        found = pickle.loads(Path("here/.metadata").read_bytes())
        (key,) = (each for each in found.storage_data if place.endswith(each.fqn))
        Path("here/planted").write_bytes(content := _torch_file(pickled))
        info = found.storage_data[key]
        info.relative_path, info.offset, info.length = "planted", 0, len(content)
        Path("here/.metadata").write_bytes(pickle.dumps(found))
    give("here")

    said = _said_in_another_process("here")

    assert "it has more values within one another than can be read" in said
    assert THEY in said


@pytest.mark.parametrize(
    "value",
    [
        [0.5] * 100_000,
        {str(number): (number, [None, {"a": b"x"}]) for number in range(1000)},
        [(1, 2)] * 1000,
        functools.reduce(lambda inner, _: [inner], range(100), 1),
        Counter("aab"),
        [bytearray(), bytearray(b"abc")],
    ],
    ids=["long", "many", "shared", "nested", "counter", "bytes"],
)
def test_what_people_save_is_within_the_limits(value: object) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        strict_metadata.check_extent(pickle.dumps(value, protocol))


_SIZE = b"\x8a\x05" + (10**11).to_bytes(5, "little")


@pytest.mark.parametrize(
    "called",
    [
        pytest.param(b"cbuiltins\nbytearray\n" + _SIZE + b"\x85R", id="bytearray"),
        pytest.param(b"cbuiltins\nbytearray\nctorch\nSize\n" + _SIZE + b"\x85\x85RR", id="through a shape"),
        pytest.param(b"ctorch\nTensor\n" + _SIZE + b"\x85R", id="tensor"),
        pytest.param(b"ctorch.storage\nUntypedStorage\n" + _SIZE + b"\x85\x81", id="storage"),
        pytest.param(b"ctorch.nn.parameter\nParameter\n)R(NK\x00" + _SIZE + b"\x85K\x01\x85tb", id="state"),
        pytest.param(
            b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nN" + _SIZE + b"\x85NtR", id="through torch"
        ),
    ],
)
def test_a_pickle_of_somebody_else_makes_no_object_of_a_size_that_it_only_names(called: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it calls what makes an object of any size"):
        strict_metadata.check_extent(b"\x80\x02" + called + b".")


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"\x80\x020.", b"\x80\x02h\x05.", b"\x80\x02(0.", b"\x80\x02N}s."]
)
def test_a_damaged_pickle_is_said_to_be_one(content: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        strict_metadata.check_extent(content)


def _compressed(content: bytes) -> bytes:
    """Return a file of `torch.save` with every part compressed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as given, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in given.infolist():
            archive.writestr(part.filename, given.read(part))
    return made.getvalue()


def _often(content: bytes) -> bytes:
    """Return a file of `torch.save` that lists its largest part a thousand times."""
    made = io.BytesIO(content)
    with zipfile.ZipFile(made, "a") as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
        archive.filelist += [largest] * 1000
        archive.writestr("archive/more", b"")  # so that the list is written anew
    return made.getvalue()


@as_two_users
@pytest.mark.parametrize("smaller", [_compressed, _often])
@pytest.mark.parametrize("name", ["value", "tensor"])
def test_an_entry_of_somebody_else_takes_no_more_memory_and_time_than_it_has_bytes(
    name: str, smaller: Callable[[bytes], bytes]
) -> None:
    save("here", value=1, tensor=torch.ones(2))
    torch.save(torch.zeros(1_000_000), file := io.BytesIO())
    content = smaller(file.getvalue())
    found = pickle.loads(Path("here/.metadata").read_bytes())
    (key,) = (each for each in found.storage_data if each.fqn == name)
    Path("here/planted").write_bytes(content)
    info = found.storage_data[key]
    info.relative_path, info.offset, info.length = "planted", 0, len(content)
    Path("here/.metadata").write_bytes(pickle.dumps(found))
    give("here")

    said = refused(load, "here")

    assert said.startswith(f"here/planted belongs to {THEY}, and `{name}` in it is not loaded: "), said
    assert said.endswith(("a part of it is compressed, which torch.save does not do.", "parts of it overlap."))


@as_two_users
def test_what_torch_says_of_a_tensor_of_somebody_else_adds_no_terminal_code() -> None:
    save("here", tensor=torch.ones(2))
    found = pickle.loads(Path("here/.metadata").read_bytes())
    (info,) = found.storage_data.values()
    content = _torch_file(b"\x80\x02cmodule\x1b[31m\nname\x1b]0;x\x07\n.")
    Path("here/planted").write_bytes(content)
    info.relative_path, info.offset, info.length = "planted", 0, len(content)
    Path("here/.metadata").write_bytes(pickle.dumps(found))
    give("here")

    said = refused(load, "here")
    assert said.isprintable(), said
    assert "here could not be read" in said


@as_two_users
def test_folders_that_are_closed_to_this_user_are_passed_over_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a place that all may write into, anybody can put a folder beside others, and close it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        monkeypatch.chdir(place)
        _use_a_folder_with_closed_ones()
        monkeypatch.undo()


def _use_a_folder_with_closed_ones() -> None:
    save("shared/mine", keep=1, a=1)
    finish()
    os.chmod("shared/mine", 0o1777)
    give("shared/mine/save-000001", 777)
    os.chown("shared/mine", 777, 777)
    stranger_does(
        "for name in ('save-000009', 'closed'): os.mkdir('shared/mine/' + name); os.chmod('shared/mine/' + name, 0)"
    )
    os.setegid(777)
    os.seteuid(777)
    try:
        assert resume("shared/mine") == {"a": 1}
        said = refused(load, "shared/mine/none")
        closed = "shared/mine/closed/x"
        errors = [refused(load, closed), refused(resume, closed), refused(save, closed, a=1)]
        errors.append(refused(save, closed, keep=1, a=1))
    finally:
        os.seteuid(0)
        os.setegid(0)

    assert said.endswith("there is save-000001.")
    assert [each.rpartition(" be ")[2] for each in errors] == [
        "read: Permission denied.",
        "read: Permission denied.",
        "written: Permission denied.",
        "written: Permission denied.",
    ]


def test_metadata_of_somebody_else_change_no_class() -> None:
    """`BUILD` on a class sets its attributes."""
    for name in ("Metadata", "MetadataIndex", "TensorProperties"):
        pickled = f"c{strict_metadata._MODULE}\n{name}\n(N}}(S'spoilt'\nI1\nutb.".encode()
        with pytest.raises((ValueError, TypeError)):
            strict_metadata.metadata_from(pickled)
        assert not hasattr(getattr(torch.distributed.checkpoint.metadata, name), "spoilt")
    for name in (b"ctorch\nSize\n", b"cpathlib\nPosixPath\n", b"ctorch.serialization\n_get_layout\n"):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            strict_metadata.metadata_from(name + b"(N}(S'spoilt'\nI1\nutb.")
    assert not hasattr(torch.Size, "spoilt")
    assert not hasattr(Path, "spoilt")
    assert not hasattr(torch.serialization._get_layout, "spoilt")
