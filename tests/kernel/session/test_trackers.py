"""How trackers are chosen, without the library of any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.agent import install_packages
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel import trackers
from jupyter_distrib.kernel.analysis import run_facts
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.settings import config_files
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.cell_options import Options, parse_line
from jupyter_distrib.kernel.settings.help import help_text
from jupyter_distrib.kernel.trackers import mlflow, wandb
from jupyter_distrib.libraries.mlflow_store import MLflowUse
from jupyter_distrib.wire import messages as m
from tests.installed_package import bring
from tests.notebook import Notebook
from tests.settings_files import write_trusted

THEIRS = """
from jupyter_distrib.extend import Observer

library = "json"  # not called like the tracker

def follow(run):
    return Observer_() if "aim" in run.trackers else None

class Observer_(Observer):
    def begin(self):
        return {"TRACKED_BY": "aim"}
"""


ORDER = m.OpenWorkerGroup(group="g", size=1, gpus=False, packages=m.Packages(mode="check", packages=(), limit_bytes=1))


def options(line: str) -> Options:
    return parse_line(line, strategies=STRATEGIES, pools=POOLS)


def observed(notes: list[str], **options: Any) -> ObservedRun:
    return ObservedRun(
        id="r-1", label="x", source="", options=options, strategy="none", pool="local", ranks=(0,), world_size=1,
        gpus=False, detached=False, attached=False, began_at_s=0.0, note=notes.append, context={},
    )  # fmt: skip


def here(uri: str) -> mlflow.Here:
    return mlflow.Here(parent=None, uri=uri, experiment="", resumed="")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://u:hunter2@host:5000/", "MLflow: http://host:5000/#/experiments/7/runs/"),
        ("postgresql://u:hunter2@db/x", "MLflow: run  of experiment 7 in postgresql://db/x"),
        ("sqlite:///mlruns.db", "MLflow: run  of experiment 7 in sqlite:///mlruns.db"),
    ],
)
def test_the_note_of_mlflow_has_no_password(address: str, told: str) -> None:
    assert mlflow.MLflowObserver(observed([]), here(address), MLflowUse())._where("7") == told


@pytest.mark.parametrize("address", ["http://u:hunter2@127.0.0.1:1", "http://u:12/hunter2@h:x", "http://u:hunter2/@h"])
def test_neither_has_the_error_about_a_server_that_is_away(address: str) -> None:
    with pytest.raises(ConnectionError) as raised:
        mlflow._check_answers(address)
    assert "hunter2" not in str(raised.value)


def test_neither_has_the_error_about_a_run_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = mlflow.MLflowObserver(observed([]), here("postgresql://u:hunter2@db/x"), MLflowUse())
    observer._client = SimpleNamespace(search_experiments=list)
    monkeypatch.setattr(mlflow, "find_run", lambda *_: None)
    with pytest.raises(LookupError, match=r"in postgresql://db/x$"):
        observer._find()


def test_the_note_of_wandb_has_no_key() -> None:
    """Its address of a run without an account holds one."""
    notes: list[str] = []
    written = SimpleNamespace(url="https://wandb.example/a/b/runs/1?apiKey=hunter2")
    library = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: written)
    observer = wandb.WandbObserver(observed(notes), library, None)
    observer._id, observer._mode = "1", "online"
    observer._opened()
    assert notes == ["W&B: https://wandb.example/a/b/runs/1"]


def test_parameters_of_a_run_have_no_password() -> None:
    given = run_facts.parameters(observed([], config="https://u:hunter2@host/zero.json", zero=3))
    assert (given["option.config"], given["option.zero"]) == ("https://host/zero.json", "3")


def test_packages_that_are_lacking_are_named_without_passwords(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = m.Package(name="x", version="1", requirement="x @ https://u:hunter2@host/x.whl")

    def refuse(_: object) -> None:
        raise install_packages.Refused(install_packages._lacking([package]))

    monkeypatch.setattr(install_packages, "compare", refuse)
    monkeypatch.setattr(install_packages, "decode_frame", lambda _: (ORDER, 0))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(read=bytes)))
    install_packages.main()
    assert "x @ https://host/x.whl" in capsys.readouterr().out


def test_every_module_of_the_folder_is_a_tracker() -> None:
    assert set(trackers.names()) >= {"mlflow", "tensorboard", "wandb"}


def test_the_line_names_trackers() -> None:
    assert options("--track mlflow,wandb --track tensorboard").track == ("mlflow", "wandb", "tensorboard")
    assert options("").track == ()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--track mlfow", "--track mlfow is not known: did you mean mlflow?"),
        ("--track", "--track needs a value: write --track NAMES"),
    ],
)
def test_a_wrong_name_is_refused(line: str, why: str) -> None:
    with pytest.raises(OptionsError) as raised:
        options(line)
    assert str(raised.value) == why


@pytest.mark.parametrize(
    ("content", "track"),
    [('track = ["mlflow", "wandb"]', ("mlflow", "wandb")), ('track = "tensorboard"', ("tensorboard",))],
)
def test_the_settings_name_trackers_for_cells_that_name_none(
    content: str, track: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trusted(tmp_path, content)
    settings = config_files.load(POOLS, STRATEGIES)
    assert settings.filled(options("")).track == track
    assert settings.filled(options("--track none")).track == ("none",)


def test_an_unknown_tracker_in_the_settings_is_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jupyter_distrib.toml").write_text('strategy = "ddp"\ntrack = ["tensorbord"]')
    with pytest.raises(OptionsError, match=r"toml, line 2: track tensorbord is not known: did you mean tensorboard"):
        config_files.load(POOLS, STRATEGIES)


def test_a_tracker_whose_library_is_missing_is_refused_with_the_command() -> None:
    code = dedent("""\
        import sys, importlib.util
        importlib.util.find_spec = lambda name: None
        from jupyter_distrib.kernel import trackers
        trackers.check_installed(('mlflow',))""")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "jupyter_distrib.errors.OptionsError: --track mlflow needs the package mlflow, which is not installed here: "
        "run %pip install 'jupyter_distrib[mlflow]', or leave --track mlflow out"
    )


def test_trackers_whose_library_is_not_loaded_are_asked_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in trackers.names():
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert trackers.wanted(()) == []
    assert trackers.wanted(("wandb",)) == ["wandb"]
    monkeypatch.setitem(sys.modules, "mlflow", sys)
    assert trackers.wanted(()) == ["mlflow"]
    assert trackers.wanted(("none",)) == []


LINES = """
library = {library!r}

def active_run():
    return "the run that is open"

def follow(run):
    return None
"""


@pytest.fixture
def built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Adds a module to the folder of trackers."""
    monkeypatch.setattr(trackers, "__path__", [*trackers.__path__, str(tmp_path)])

    def add(name: str, library: str) -> None:
        (tmp_path / f"{name}.py").write_text(LINES.format(library=library))
        forget()

    def forget() -> None:
        trackers._built_in.cache_clear()
        trackers._tracker.cache_clear()

    yield add
    for each in tmp_path.glob("*.py"):
        sys.modules.pop(f"{trackers.__name__}.{each.stem}", None)
        vars(trackers).pop(each.stem, None)
    monkeypatch.undo()
    forget()


def test_a_tracker_may_need_no_library(built_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    built_in("jsonlines", library="")
    monkeypatch.setitem(sys.modules, "jsonlines", sys)  # another package has a module of that name

    trackers.check_installed(["jsonlines"])

    assert trackers.wanted(["jsonlines"]) == ["jsonlines"]
    assert trackers.wanted([]) == []


def test_a_tracker_follows_while_the_library_that_it_names_is_loaded(
    built_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in("comet", library="comet_ml")
    assert trackers.wanted([]) == []
    monkeypatch.setitem(sys.modules, "comet_ml", sys)

    assert trackers.wanted([]) == ["comet"]
    assert trackers.wanted([], attached=True) == []
    assert trackers.context([]) == {"comet": "the run that is open"}


@pytest.mark.parametrize("library", ["no_such_library", "no_such.library"])
def test_the_library_that_a_tracker_names_must_be_installed(built_in: Callable[..., None], library: str) -> None:
    built_in("comet", library=library)
    with pytest.raises(OptionsError, match=f"needs the package {library},"):
        trackers.check_installed(["comet"])


def test_the_help_names_every_tracker(built_in: Callable[..., None]) -> None:
    built_in("comet", library="")
    assert "trackers: comet, mlflow, tensorboard, wandb; or `none`" in help_text(strategies=STRATEGIES, pools=POOLS)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    points = "[jupyter_distrib.trackers]\naim = theirs:follow\nlacking = lacking:follow\nbroken = broken:follow\n"
    env = bring(
        tmp_path_factory.mktemp("package"),
        points,
        theirs=THEIRS,
        lacking=LINES.format(library="no_such_library"),
        broken="raise ValueError('of its own')",
    )
    with Notebook(tmp_path_factory.mktemp("notebook"), env=env) as book:
        book.ok("%load_ext jupyter_distrib\nimport os")
        yield book


@pytest.mark.slow
def test_another_package_brings_a_tracker_that_is_loaded_when_it_is_asked_for(book: Notebook) -> None:
    code = "str(os.environ.get('TRACKED_BY'))"
    assert book.ok(f"%%distributed --ranks 1\n{code}").result == "rank 0: 'None'"
    assert book.ok("import sys\n'theirs' in sys.modules").result == "False"
    assert book.ok(f"%%distributed --ranks 1 --track aim\n{code}").result == "rank 0: 'aim'"


@pytest.mark.slow
def test_the_library_of_a_tracker_of_another_package_must_be_installed(book: Notebook) -> None:
    refused = book.fails("%%distributed --ranks 1 --track lacking\n1").text
    assert "needs the package no_such_library" in refused


@pytest.mark.slow
def test_a_tracker_that_cannot_be_imported_does_not_hold_up_the_run(book: Notebook) -> None:
    outcome = book.ok("%%distributed --ranks 1 --track broken\nrank")
    assert outcome.result == "rank 0: 0"
    assert "The observer broken was dropped: ValueError: of its own" in outcome.view
