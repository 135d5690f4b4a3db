"""How trackers are chosen, without the library of any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib import trackers
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings import config_files
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.cell_options import Options, parse_line
from tests.installed_package import bring
from tests.notebook import Notebook

THEIRS = """
from jupyter_distrib.extend import Observer

def follow(run):
    return Observer_() if "aim" in run.trackers else None

class Observer_(Observer):
    def begin(self):
        return {"TRACKED_BY": "aim"}
"""


def options(line: str) -> Options:
    return parse_line(line, strategies=STRATEGIES, pools=POOLS)


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
    (tmp_path / "jupyter_distrib.toml").write_text(content)
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
    code = (
        "import sys, importlib.util\nimportlib.util.find_spec = lambda name: None\n"
        "from jupyter_distrib import trackers\ntrackers.check_installed(('mlflow',))"
    )
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


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    points = "[jupyter_distrib.trackers]\naim = theirs:follow\n"
    env = bring(tmp_path_factory.mktemp("package"), points, theirs=THEIRS)
    with Notebook(tmp_path_factory.mktemp("notebook"), env=env) as book:
        book.ok("%load_ext jupyter_distrib\nimport os")
        yield book


@pytest.mark.slow
def test_another_package_brings_a_tracker_that_is_loaded_when_it_is_asked_for(book: Notebook) -> None:
    code = "str(os.environ.get('TRACKED_BY'))"
    assert book.ok(f"%%distributed --ranks 1\n{code}").result == "rank 0: 'None'"
    assert book.ok("import sys\n'theirs' in sys.modules").result == "False"
    assert book.ok(f"%%distributed --ranks 1 --track aim\n{code}").result == "rank 0: 'aim'"
