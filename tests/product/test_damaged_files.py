"""Whatever has become of the files that this package keeps, cells run, and the status and the history can be seen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.kernel.session import detached, saved_runs
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.settings import find_files
from jupyter_distrib.system import run_list
from jupyter_distrib.system.run_list import ListedRun
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook
from tests.processes import agents, wait_until, wait_until_gone

CONTENTS = {
    "nothing": b"",
    "random": bytes(range(256)) * 3,
    "list": b"[1]",
    "brackets": b"[" * 5000,
    "objects": b'{"run":' * 5000,
    "digits": b"9" * 5000,
    "null": b"null",
    "numbers": b'{"run": 1, "began_at_s": "x", "elapsed_s": [], "label": null, "notebook": {}, "state": 1e30}',
    "not_a_number": b'{"began_at_s": NaN, "elapsed_s": Infinity, "number": -1, "pid": 1e400}',
    "half": b'{"run": "\\ud800", "label": "\\udfff"',
    "zeros": b"\0" * 1000,
}


def as_content(content: bytes) -> Callable[[Path], None]:
    return lambda path: Path(path).write_bytes(content)


def other_owner(path: Path) -> None:
    path.write_text("{}")
    os.chown(path, 12345, 12345)
    path.chmod(0o600)


OTHERS: dict[str, Callable[[Path], None]] = {
    "folder": lambda path: (path / "inside").mkdir(parents=True),
    "dangling": lambda path: path.symlink_to("/nowhere/at/all"),
    "circle": lambda path: path.symlink_to(path),
    "elsewhere": lambda path: path.symlink_to("/etc/hostname"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "fifo": os.mkfifo,
    "other": other_owner,
}
DAMAGES = {**{name: as_content(content) for name, content in CONTENTS.items()}, **OTHERS}


def replace_by(damage: Callable[[Path], None], path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    damage(path)


def files_below(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*")) if not path.is_dir()]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The folders of state and of sockets, of this test alone."""
    state, runtime = tmp_path / "state", tmp_path / "run"
    for name, path in (("XDG_STATE_HOME", state), ("JUPYTER_DISTRIB_RUNTIME_DIR", runtime)):
        monkeypatch.setenv(name, str(path))
    monkeypatch.delenv("JUPYTER_DISTRIB_LOG_DIR", raising=False)
    runtime.mkdir(0o700)
    yield state / "jupyter_distrib", runtime
    for pid in agents(runtime):
        os.kill(pid, signal.SIGTERM)
    assert not wait_until_gone(agents(runtime), 60)


def detached_run(runtime: Path) -> ListedRun:
    run = ListedRun(
        run="aaa-1", label="Cell In[1]", holder="b.ipynb", notebook="", began_at_s=1.0, ended=False, server="agent-1",
        pid=os.getpid(), protocol=m.PROTOCOL,
    )  # fmt: skip
    run_list.write(runtime, run)
    return run


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_of_a_detached_run_that_is_damaged_is_left_out(folders: tuple[Path, Path], damage: str) -> None:
    _, runtime = folders
    run = detached_run(runtime)
    replace_by(DAMAGES[damage], runtime / "bbb-2.detached")
    assert detached.runs() == [run]
    assert detached.choose(None, KernelIdentity()) == run
    assert detached.damage().startswith("Of detached runs, one entry is damaged and left out: ")
    replace_by(DAMAGES[damage], runtime / "aaa-1.detached")
    assert detached.runs() == []
    assert detached.damage().startswith("Of detached runs, 2 entries are damaged and left out: ")
    assert detached_run(runtime) in detached.runs(), "a new entry takes the place"


@pytest.mark.parametrize("field", ListedRun.__dataclass_fields__)
@pytest.mark.parametrize("value", ["1e30", "[]", "{}", "null", '"x"', "true", "-1", "NaN", "9" * 400, '"../../x"'])
def test_each_field_of_an_entry_may_be_anything(folders: tuple[Path, Path], field: str, value: str) -> None:
    _, runtime = folders
    run = detached_run(runtime)
    path = runtime / "aaa-1.detached"
    content = json.loads(path.read_text())
    content[field] = "HERE"
    path.write_text(json.dumps(content).replace('"HERE"', value))
    for found in detached.runs():
        assert {
            name: type(getattr(found, name)) for name in ListedRun.__dataclass_fields__ if name != "began_at_s"
        } == {name: type(getattr(run, name)) for name in ListedRun.__dataclass_fields__ if name != "began_at_s"}
        assert 0 <= found.began_at_s <= 1e11
        assert "/" not in found.server


@pytest.mark.parametrize("damage", OTHERS)
def test_whole_folders_may_be_anything(folders: tuple[Path, Path], damage: str) -> None:
    state, _ = folders
    find_files.trust("/a", "1")
    replace_by(DAMAGES[damage], state / "detached")
    assert saved_runs.lost() == []
    replace_by(DAMAGES[damage], state / "trusted_files.json")
    assert not find_files.is_trusted("/a", "1")
    find_files.trust("/a", "1")
    assert find_files.is_trusted("/a", "1")


def used(folder: Path, state: Path) -> None:
    """Leave files of every kind: of an agent, runs with logs, the history, a detached run, a trusted file."""
    (folder / "jupyter_distrib.toml").write_text("history = 100\n")
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_pool trust")
        book.ok(
            dedent("""\
                %%distributed --ranks 1
                import jupyter_distrib
                jupyter_distrib.report(loss=1.0)
                print('text')""")
        )
        book.ok("%%distributed --ranks 1 --detach --out job\nprint('text')")
        book.ok("job.result()")
        assert "done" in book.ok("%distributed_runs").result


@pytest.mark.slow
def test_cells_run_whatever_the_files_are(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """All files at once, also those of an agent that is alive; each kernel leaves those for the next damage."""
    used(tmp_path, folders[0])
    for damage in ("random", "numbers", "folder", "elsewhere", "fifo", "other"):
        files = files_below(*folders)
        kinds = {path.suffix for path in files}
        assert {".json", ".log", ".lock", ".sock", ".detached", ""} <= kinds, f"files of every kind are there: {damage}"
        for path in files:
            replace_by(DAMAGES[damage], path)
        with Notebook(tmp_path) as book:
            cells_run(book)


def cells_run(book: Notebook) -> None:
    book.ok("%load_ext jupyter_distrib")
    assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
    assert "damaged and left out" in book.ok("%distributed_status").result
    listed = book.ok("%distributed_runs").result
    assert "left out, since" in listed
    assert book.fails("%distributed_runs 1").ename == "DistributedError"
    assert "logs" in book.ok("%distributed_status --doctor").result
    book.ok("%distributed_pool")
    assert book.fails("%distributed_attach").ename == "PoolError"
    book.ok("%%distributed --ranks 1 --detach --out job\nprint('again')")
    assert book.ok("job.result();print(job.logs(0))").stdout == "again\n\n"
    book.ok("%%distributed --ranks 1 \nprint('saved')")
    assert wait_until(lambda: "done" in book.ok("%distributed_runs").result, 20)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_two_notebooks_share_an_agent_where_a_stranger_has_made_the_folder_for_sockets(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="jd", dir="/tmp") as shared:  # its path is short, as of a folder for all
        os.chmod(shared, 0o1777)
        os.mkdir(theirs := f"{shared}/jupyter_distrib-{os.getuid()}", 0o777)
        os.chown(theirs, 12345, 12345)
        env = {
            "JUPYTER_DISTRIB_RUNTIME_DIR": "",
            "XDG_RUNTIME_DIR": "",
            "TMPDIR": shared,
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        with Notebook(tmp_path, env) as one, Notebook(tmp_path, env) as other:
            for book in (one, other):
                book.ok("%load_ext jupyter_distrib")
                assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
            found = agents(Path(f"{theirs}-"))
            assert len(found) == 1
        os.kill(found[0], signal.SIGTERM)
        assert not wait_until_gone(found, 60)
        assert os.listdir(theirs) == []


def test_a_failure_is_shown_although_the_settings_have_got_an_error_meanwhile(tmp_path: Path) -> None:
    settings = tmp_path / "pools.toml"
    settings.write_text("")
    (tmp_path / "fails.py").write_text(f"open({str(settings)!r}, 'w').write('[pools')\nraise ValueError('mine')\n")
    with Notebook(tmp_path, {"JUPYTER_DISTRIB_CONFIG": str(settings)}) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.fails("%distributed_run --ranks 1 fails.py").evalue == "mine"
        assert "pools.toml: not valid TOML" in book.fails("%%distributed --ranks 1\nrank").text
        settings.write_text("")
        failed = book.fails("%%distributed --ranks 1\n" + (tmp_path / "fails.py").read_text())
        assert (failed.ename, failed.evalue) == ("ValueError", "mine")


def test_ranks_can_be_seen_and_stopped_while_the_settings_have_an_error(tmp_path: Path) -> None:
    settings = tmp_path / "pools.toml"
    settings.write_text("[pools.two]\nkind = 'local'\nranks = 2\n")
    with Notebook(tmp_path, {"JUPYTER_DISTRIB_CONFIG": str(settings)}) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.ok("%%distributed --pool two\nrank").result == "rank 0: 0\nrank 1: 1"
        settings.write_text("[pools")
        for line in ("%distributed_status", "%distributed_pool"):
            shown = book.ok(line).text
            assert "pools.toml: not valid TOML" in shown
            assert "two" in shown
        assert "not valid TOML" in book.fails("%distributed_pool restart two").text
        book.ok("%distributed_pool stop two")
        assert "No ranks are up" in book.ok("%distributed_status").text
        assert "not valid TOML" in book.ok("%distributed_status --doctor").text

    with Notebook(tmp_path, {"JUPYTER_DISTRIB_CONFIG": str(settings)}) as book:
        book.ok("%load_ext jupyter_distrib")
        assert "not valid TOML" in book.ok("%distributed_status").text
        assert "not valid TOML" in book.ok("%distributed_pool stop").text
        assert "Only the built-in pools are known" in book.fails("%distributed_pool stop two").text
