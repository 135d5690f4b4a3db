"""The forms for pools, as a page asks for them: fields, what is wrong, a test of the connection, and the file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.pool_definitions import of_kinds
from tests.notebook import Notebook, ask
from tests.processes import wait_until_gone

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels without these


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "work").mkdir()
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host gpu1 *\n")
    return home


@pytest.fixture(scope="module")
def kernel(home: Path) -> Iterator[Notebook]:
    with Notebook(home / "work", {"HOME": str(home), "RAY_ADDRESS": "ray://head:10001"}) as book:
        book.ok("%load_ext jupyter_distrib")
        yield book


@pytest.fixture
def book(kernel: Notebook, home: Path) -> Notebook:
    for path in (home / ".config" / "jupyter_distrib" / "pools.toml", home / "work" / "jupyter_distrib.toml"):
        path.unlink(missing_ok=True)
    return kernel


def pools(book: Notebook) -> dict[str, Any]:
    seen = ask(book, op="overview")["overview"]
    return {pool["name"]: pool for pool in seen["pools"]}


def write(book: Notebook, name: str, kind: str, file: str = "user", **values: str) -> dict[str, Any]:
    return ask(book, op="write_pool", name=name, kind=kind, file=file, values=values)


def trial(book: Notebook, wanted: str = "", **more: Any) -> dict[str, str]:
    """The test of the connection that is asked for, once it has ended."""
    answer = ask(book, op="try_pool", id=wanted or "t", file="user", **more)
    assert answer["ok"], answer
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen: dict[str, str] = ask(book, op="overview")["overview"]["trial"]
        if seen["state"] != "running":
            return seen
    raise AssertionError("the test does not end")


def test_the_fields_of_a_form_are_the_options_that_its_kind_declares(book: Notebook) -> None:
    answer = ask(book, op="pool_forms")

    told = {each["kind"]: [field["name"] for field in each["fields"]] for each in answer["kinds"]}
    declared = {kind: {option.name for option in options} for kind, options in of_kinds(POOLS, STRATEGIES).items()}
    assert {kind: set(names) for kind, names in told.items()} == declared
    assert "inline" not in told
    ssh = next(each for each in answer["kinds"] if each["kind"] == "ssh")
    assert ssh["about"] == "The pool of hosts that ssh reaches."
    hosts = ssh["fields"][0]
    assert (hosts["name"], hosts["main"], hosts["example"], hosts["switch"]) == ("hosts", True, "a,b", False)
    assert [field["main"] for field in ssh["fields"]] == sorted(
        (field["main"] for field in ssh["fields"]), reverse=True
    )
    strategy = next(field for field in ssh["fields"] if field["name"] == "strategy")
    assert {"none", "ddp"} <= set(strategy["choices"])
    assert next(field for field in ssh["fields"] if field["name"] == "copy_files")["switch"]


def test_what_is_on_this_machine_is_offered_and_the_files_can_be_chosen(book: Notebook) -> None:
    answer = ask(book, op="pool_forms")

    found = {each["text"]: each["options"] for each in answer["found"]}
    assert found["ssh: gpu1 (~/.ssh/config)"] == {"hosts": "gpu1"}
    assert found["Ray: ray://head:10001 (RAY_ADDRESS)"] == {"address": "ray://head:10001"}
    assert [(each["key"], each["shown"], each["problem"]) for each in answer["files"]] == [
        ("user", "~/.config/jupyter_distrib/pools.toml", ""),
        ("project", "jupyter_distrib.toml", ""),
    ]


def test_a_pool_that_is_written_can_be_used_and_changed_at_once(book: Notebook, home: Path) -> None:
    answer = write(book, "pair", "local", ranks="2", strategy="ddp")
    assert answer["told"] == "The pool pair is in ~/.config/jupyter_distrib/pools.toml, and can be used."
    assert "pair" in [pool["name"] for pool in answer["overview"]["pools"]]
    assert book.ok("%%distributed --pool pair\nworld_size").result == "ranks 0-1: 2"
    book.ok("%distributed_pool stop pair")

    edited = ask(book, op="pool_forms", pool="pair")["edited"]
    assert edited == {"name": "pair", "kind": "local", "values": {"ranks": "2", "strategy": "ddp"}, "file": "user"}
    change = {"op": "write_pool", "name": "pair", "kind": "local", "file": "user", "before": edited["values"]}
    assert "told" in ask(book, **change, values={"ranks": "3", "strategy": "ddp"})
    assert "ranks = 3" in (home / ".config" / "jupyter_distrib" / "pools.toml").read_text()
    assert "was changed meanwhile" in ask(book, **change, values={"ranks": "4"})["error"]
    assert "not in a settings file" in ask(book, op="pool_forms", pool="local")["error"]


def test_a_wrong_field_is_reported_and_nothing_is_written(book: Notebook, home: Path) -> None:
    answer = write(book, "9", "ssh", hosts="a b")
    assert answer["errors"].keys() == {"name", "hosts"}
    assert write(book, "x", "ssh")["errors"] == {"hosts": "hosts is needed: write, for example, a,b"}
    assert "there is no kind of pool moon" in write(book, "x", "moon")["error"]
    assert "names no settings file" in write(book, "x", "local", file="/etc/passwd")["error"]
    assert not (home / ".config" / "jupyter_distrib" / "pools.toml").exists()

    write(book, "x", "local")
    assert "from ~/.config/jupyter_distrib/pools.toml" in write(book, "x", "local", "project")["errors"]["name"]
    book.ok("%distributed_pool add mine --kind local")
    assert "from this notebook" in write(book, "mine", "local")["errors"]["name"]
    book.ok("%distributed_pool remove mine")


def test_a_file_with_a_mistake_is_reported_and_stays(book: Notebook, home: Path) -> None:
    path = home / ".config" / "jupyter_distrib" / "pools.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[pools.x\n")

    assert "pools.toml, line 1: not valid TOML" in write(book, "y", "local")["error"]
    assert path.read_text() == "[pools.x\n"
    assert ask(book, op="pool_forms")["kinds"]
    path.write_text('colour = "red"\n')
    assert "unknown option colour" in write(book, "y", "local")["error"]
    assert path.read_text() == 'colour = "red"\n'


def test_where_a_pool_is_and_that_it_waits_for_trust_is_reported(book: Notebook, home: Path) -> None:
    write(book, "far", "ssh", hosts="a,b:2", reconnect="30")
    (home / "work" / "jupyter_distrib.toml").write_text('[pools.evil]\nkind = "ssh"\nhosts = "e"\nssh = "evil"\n')
    seen = pools(book)

    assert (seen["far"]["where"], seen["far"]["editable"], seen["far"]["waits"]) == ("hosts a,b:2", True, None)
    assert not seen["local"]["editable"]
    waits = seen["evil"]["waits"]
    assert waits["sets"] == "kind = ssh and hosts = e and ssh = evil"
    assert waits["file"] == "jupyter_distrib.toml"

    values = ask(book, op="pool_forms", pool="evil")["edited"]["values"]
    attempt = {"op": "try_pool", "id": "e", "name": "evil", "kind": "ssh", "file": "project"}
    assert "not used yet" in ask(book, **attempt, values=values, before=values)["error"]
    (home / "work" / "jupyter_distrib.toml").write_text('[pools.evil]\nkind = "ssh"\nhosts = "e"\nssh = "worse"\n')
    refused = ask(book, op="trust_pool", pool="evil", digest=waits["digest"])
    assert "has changed since you looked at it" in refused["error"]
    digest = pools(book)["evil"]["waits"]["digest"]
    told = ask(book, op="trust_pool", pool="evil", digest=digest)
    assert told["told"].startswith("jupyter_distrib.toml is trusted until it changes")
    assert pools(book)["evil"]["waits"] is None


def test_a_connection_is_tested_also_while_a_cell_runs(book: Notebook, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    book.start(f"open({str(fifo)!r}).read()")

    good = trial(book, "g", name="x", kind="local", values={})
    assert (good["id"], good["state"]) == ("g", "good")
    assert good["text"].startswith("This machine has Python ")
    values = {"hosts": "a", "start": "no-such-program {host} {python}"}
    bad = trial(book, "b", name="x", kind="command", values=values)
    assert bad["state"] == "bad"
    assert bad["text"].startswith("no-such-program cannot be started")
    assert ask(book, op="try_pool", id="x", name="x", file="user", kind="ssh", values={})["errors"].keys() == {"hosts"}
    fifo.write_text("")
    book.finish()


def test_a_test_that_is_cancelled_ends_and_so_does_one_behind_which_another_begins(
    book: Notebook, tmp_path: Path
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    values = {"hosts": "a", "start": f"sh -c 'echo $$ > {fifo}; sleep 1000 # {{host}} {{python}}'"}
    attempt = {"op": "try_pool", "name": "x", "kind": "command", "file": "user", "values": values}
    pids = []
    for name in ("one", "two"):
        assert ask(book, **attempt, id=name)["overview"]["trial"]["id"] == name
        pids.append(int(fifo.read_text()))
    wait_until_gone({pids[0]})

    assert ask(book, op="end_trial", id="one")["overview"]["trial"]["id"] == "two"
    assert ask(book, op="end_trial", id="two")["overview"]["trial"] is None
    wait_until_gone({pids[1]})
