"""Pools that are written into settings files: what the file had stays, and nothing is written that means anything else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.settings import config_files, find_files, pool_files, settings_text
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.pool_files import Definition, SettingsFile
from jupyter_distrib.kernel.settings.settings import Settings
from tests.notebook import ROOT

MINE = """# my pools
pool = "lab"   # the fast one

[pools.lab]
kind = "ssh"
hosts = "a,b"   # the 'two' # in the lab
# python is the one of the course
python = "~/envs/course/bin/python"

[pools.other]
kind = "local"
ranks = 2
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a project in it, where the notebook is."""
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "JUPYTER_DISTRIB_CONFIG", "JUPYTER_DISTRIB_POOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(find_files, "LOOK_ROUND_S", 1e-9)
    return tmp_path


def settings() -> Settings:
    return config_files.load(POOLS, STRATEGIES)


def file(key: str = "user") -> SettingsFile:
    return next(each for each in pool_files.files() if each.key == key)


def put(text: str, key: str = "user") -> Path:
    path = Path(file(key).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def write(name: str, kind: str, *, key: str = "user", before: dict[str, str] | None = None, **values: str) -> Path:
    pool_files.write(Definition(name=name, kind=kind, values=values, before=before), file(key), settings())
    return Path(file(key).path)


def refusal(name: str, kind: str, *, key: str = "user", before: dict[str, str] | None = None, **values: str) -> str:
    with pytest.raises(DistributedError) as caught:
        write(name, kind, key=key, before=before, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["user", "project"])
def test_a_pool_in_a_file_that_is_not_there_yet_can_be_used_at_once(home: Path, key: str) -> None:
    path = write("gpus", "ssh", key=key, hosts="gpu1,gpu2:4", ranks="4", copy_files="true")

    pool = settings().pools["gpus"]
    assert pool.options == {"hosts": "gpu1,gpu2:4", "copy_files": ""}
    assert pool.size.count == 4
    assert pool.project_file is None
    assert path.stat().st_mode & 0o022 == 0
    assert path.read_text() == '[pools.gpus]\nkind = "ssh"\nhosts = "gpu1,gpu2:4"\nranks = 4\ncopy_files = true\n'


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n"])
def test_what_a_file_had_stays_as_it_was(home: Path, end: str, last: str) -> None:
    before = (MINE.rstrip("\n") + last).replace("\n", end)
    path = put(before)

    write("gpus", "command", hosts="x", start="docker exec -i {host} {python}")
    after = path.read_bytes().decode()
    assert after.startswith(before.rstrip())
    assert after.count("\n") == after.count(end)
    assert tomllib.loads(after)["pools"].keys() == {"lab", "other", "gpus"}


def test_a_change_touches_only_the_keys_that_were_changed(home: Path) -> None:
    path = put(MINE)
    _, old = pool_files.present(file(), "lab")

    write("lab", "ssh", before=old, hosts="a,b,c", python=old["python"], nodes="2")
    after = MINE.replace('hosts = "a,b" ', 'hosts = "a,b,c" ').replace('bin/python"\n', 'bin/python"\nnodes = 2\n')
    assert path.read_text() == after
    _, old = pool_files.present(file(), "lab")
    write("lab", "ssh", before=old, hosts="a,b")
    assert "python =" not in path.read_text()
    assert "# python is the one of the course" in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        'pools = {lab = {kind = "ssh", hosts = "a"}}\n',
        'pools.lab = {kind = "ssh", hosts = "a"}\n',
        '[pools]\nlab = {kind = "ssh", hosts = "a"}\n',
        '[pools]\nlab.kind = "ssh"\nlab.hosts = "a"\n',
        '[pools.lab]\nkind = "ssh"\nhosts = """\\\na"""\n',
    ],
)
def test_a_file_that_is_written_in_another_way_is_left_as_it_was(home: Path, text: str) -> None:
    path = put(text)
    _, old = pool_files.present(file(), "lab")

    assert "change it in an editor" in refusal("lab", "ssh", before=old, hosts="b")
    assert path.read_text() == text


@pytest.mark.parametrize(
    "value", ['"', "\\", "ä\U0001f600", "a#b", "'", "a=b", "007", "1e3", "true", "x\x7f", "{}", "[pools.a]", '"""']
)
def test_any_text_comes_back_as_it_was_written(home: Path, value: str) -> None:
    changes: dict[str, str | None] = {"python": settings_text.literal(POOLS["local"][0], value)}
    new = settings_text.with_pool("", "a.b", changes)
    again = settings_text.with_pool(new, "a.b", {**changes, "gpus": "2"})

    assert str(tomllib.loads(new)["pools"]["a.b"]["python"]) == value
    assert tomllib.loads(again)["pools"] == {"a.b": {"python": tomllib.loads(new)["pools"]["a.b"]["python"], "gpus": 2}}


def test_a_name_that_is_there_already_is_refused_unless_it_is_the_same_pool(home: Path) -> None:
    path = put(MINE)

    assert "there is a pool lab already in ~/.config" in refusal("lab", "ssh", hosts="z")
    write("other", "local", ranks="2")  # as when a page asks a second time, since it has heard no answer
    assert path.read_text() == MINE
    new = Definition(name="lab", kind="ssh", values={"hosts": "z"})
    assert "from ~/.config/jupyter_distrib/pools.toml" in pool_files.name_taken(new, file("project"), settings())


def test_a_change_on_top_of_what_another_has_changed_meanwhile_is_refused(home: Path) -> None:
    path = put(MINE)
    _, old = pool_files.present(file(), "lab")
    path.write_text(changed := MINE.replace('"a,b"', '"a,b,d"'))

    assert "was changed meanwhile" in refusal("lab", "ssh", before=old, hosts="a")
    path.write_text(gone := 'pool = "local"\n')
    assert "any more" in refusal("lab", "ssh", before=old, hosts="a")
    assert path.read_text() == gone != changed


def test_a_file_that_is_broken_or_cannot_be_written_is_reported_and_stays(home: Path) -> None:
    path = put("pool = = 1\n")
    good = Settings(pools={}, kinds=POOLS, strategies=STRATEGIES)
    with pytest.raises(DistributedError, match="line 1: not valid TOML"):
        pool_files.write(Definition(name="x", kind="local", values={}), file(), good)
    assert path.read_text() == "pool = = 1\n"

    put(MINE).chmod(0o444)
    assert file().problem == "it is read-only"
    assert "cannot be written: it is read-only" in refusal("x", "local")
    path.unlink()
    path.mkdir()
    assert "it is not a regular file" in refusal("x", "local")


def test_a_failed_write_leaves_the_file_and_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(MINE)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "no space left on device" in refusal("x", "local")
    assert path.read_text() == MINE
    assert [each.name for each in path.parent.iterdir()] == ["pools.toml"]


def test_a_link_stays_a_link_and_the_mode_stays(home: Path) -> None:
    path = put("")
    real = home / "dotfiles.toml"
    path.replace(real)
    real.chmod(0o640)
    path.symlink_to(real)

    write("x", "local", ranks="3")
    assert path.is_symlink()
    assert "ranks = 3" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640


def test_the_folders_of_the_users_own_file_are_the_users_alone_whatever_the_umask(home: Path) -> None:
    shutil.rmtree(home / ".config", ignore_errors=True)
    before = os.umask(0)
    try:
        write("x", "local", ranks="3")
    finally:
        os.umask(before)
    made = [home / ".config", *(home / ".config").rglob("*")]
    assert {each.stat().st_mode & 0o777 for each in made if each.is_dir()} == {0o700}
    assert any(each.name == "pools.toml" for each in made)


def test_a_folder_that_others_write_is_not_offered(home: Path) -> None:
    (home / "project").chmod(0o777)

    assert "its folder can be written by" in file("project").problem
    assert "is not read" in refusal("x", "local", key="project")
    assert not Path(file("project").path).exists()


def test_nothing_else_in_the_file_of_a_project_is_trusted_by_adding_a_pool(home: Path) -> None:
    put('[pools.evil]\nkind = "local"\npython = "/tmp/evil"\n', "project")
    assert settings().pools["evil"].project_file is not None

    write("mine", "ssh", key="project", hosts="a")
    assert settings().pools["evil"].project_file is not None
    assert settings().pools["mine"].project_file is not None

    put('strategy = "ddp"\n', "project")
    write("mine", "ssh", key="project", hosts="a")
    assert settings().pools["mine"].project_file is None


ADD = """
import sys
from tests.kernel.settings.test_pool_files import write
for number in map(int, sys.argv[1:]):
    write(f"pool{number}", "local", ranks=str(number + 1))
"""


@pytest.mark.slow
def test_notebooks_that_write_at_once_all_find_their_pools(home: Path) -> None:
    put("# mine\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    numbers = [[str(each) for each in range(first, 12, 3)] for first in range(3)]
    started = [subprocess.Popen([sys.executable, "-c", ADD, *each], env=env) for each in numbers]
    assert [each.wait(60) for each in started] == [0, 0, 0]

    assert {f"pool{number}" for number in range(12)} <= settings().pools.keys()
    assert Path(file().path).read_text().startswith("# mine\n")


def test_who_writes_for_too_long_is_not_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_files, "WAIT_S", 0.05)

    with pool_files._alone():
        assert "another notebook is writing" in refusal("x", "local")
    write("x", "local")


def test_each_wrong_field_is_reported_by_its_name(home: Path) -> None:
    put(MINE)
    wrong = {"hosts": "a b", "nodes": "0", "gpus": "2", "ranks": "2", "colour": "red", "python": "a\nb"}
    found = pool_files.problems(Definition(name="9", kind="ssh", values=wrong), settings())

    assert found.keys() == {"name", "hosts", "nodes", "ranks", "colour", "python"}
    assert "a letter first" in found["name"]
    assert "got 'a b'" in found["hosts"]
    assert "at least 1" in found["nodes"]
    assert "exclude each other" in found["ranks"]
    assert (
        "start is needed: write, for example, docker exec"
        in (pool_files.problems(Definition(name="x", kind="command", values={"hosts": "a"}), settings())["start"])
    )
    with pytest.raises(PoolError, match="up needs down"):
        pool_files.pool_of(Definition(name="x", kind="ssh", values={"hosts": "a", "up": "go"}), settings(), "/x/y.toml")
