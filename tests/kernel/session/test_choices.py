"""The choices made in a notebook, over the settings of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.settings.cell_options import GroupSize, Options
from jupyter_distrib.kernel.settings.choices import Choices
from jupyter_distrib.kernel.settings.settings import NOTEBOOK, SIDEBAR, NamedPool

FOUR_GPUS = GroupSize(count=4)
THREE_CPUS = GroupSize(count=3, gpus=False)


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choices:
    """No file says anything but one, which gives the pool `lab` two GPUs of a type."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("JUPYTER_DISTRIB_POOL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jupyter_distrib.toml").write_text('[pools.lab]\nkind = "local"\ngpus = 2\ngpu_type = "A10"\n')
    return Choices()


def test_a_size_that_was_chosen_counts_for_more_than_the_file(choices: Choices) -> None:
    assert choices.settings.size_of("lab") == GroupSize(count=2, gpu_type="A10")
    choices.resize("lab", THREE_CPUS)
    filled = choices.settings.filled(Options(pool="lab"))
    assert (filled.gpus, filled.ranks, filled.gpu_type) == (None, 3, None)


@pytest.mark.parametrize("options", [Options(pool="lab", gpus=1), Options(pool="lab", ranks=1)])
def test_a_size_of_the_cell_counts_for_more_than_one_that_was_chosen(choices: Choices, options: Options) -> None:
    choices.resize("lab", FOUR_GPUS)
    assert choices.settings.filled(options).size == options.size


def test_a_type_of_gpu_of_the_cell_goes_with_the_number_that_was_chosen(choices: Choices) -> None:
    choices.resize("lab", FOUR_GPUS)
    assert choices.settings.filled(Options(pool="lab", gpu_type="H100")).size == GroupSize(count=4, gpu_type="H100")


def test_a_cell_that_names_ranks_gets_no_size(choices: Choices) -> None:
    assert choices.settings.filled(Options(pool="lab", on=(0,))).size == GroupSize()


def test_only_a_size_from_the_sidebar_is_reported_as_the_origin(choices: Choices) -> None:
    choices.resize("local", FOUR_GPUS, NOTEBOOK)
    assert choices.settings.origins(Options()) == ""
    choices.resize("local", THREE_CPUS, SIDEBAR)
    assert choices.settings.origins(Options()) == "number of ranks from the sidebar"


def test_the_empty_size_is_what_the_pool_gives_by_itself(choices: Choices) -> None:
    choices.pick(pool="lab", size=THREE_CPUS)
    choices.pick(size=GroupSize())
    assert choices.settings.size_of("lab") == GroupSize(count=2, gpu_type="A10")


def test_a_pool_that_is_removed_leaves_no_choice_behind(choices: Choices) -> None:
    choices.add(NamedPool(name="mine", kind="local"))
    choices.use("mine")
    choices.resize("mine", FOUR_GPUS)
    assert choices.pool == "mine"
    choices.remove("mine")
    assert (choices.pool, choices.sizes, choices.added) == ("local", {}, {})


def test_a_pool_of_a_file_is_not_the_notebooks_to_remove(choices: Choices) -> None:
    with pytest.raises(PoolError, match=r"lab comes from jupyter_distrib\.toml, not from this notebook"):
        choices.check_removable("lab")
    with pytest.raises(PoolError, match="the pool local is built in, so it cannot be removed"):
        choices.check_removable("local")


# ---------------------------------------------------------------------------------------------------- project files


EVIL = """[pools.lab]
kind = "local"
python = "./evil"
[pools.local]
kind = "local"
python = "./evil"
"""


def refused(choices: Choices, pool: str) -> str:
    try:
        choices.check_trusted(choices.settings.pools[pool])
    except PoolError as error:
        return str(error)
    return ""


@pytest.fixture
def evil(tmp_path: Path, choices: Choices) -> Path:
    file = tmp_path / "jupyter_distrib.toml"
    file.write_text(EVIL)
    return file


def test_a_program_of_a_project_is_refused_with_what_to_do(evil: Path, choices: Choices) -> None:
    assert refused(choices, "lab") == (
        f"the pool lab is not used yet: jupyter_distrib.toml sets python = {evil.parent}/evil for it, which you have not "
        "allowed. If you trust this file, run %distributed_pool trust lab."
    )
    assert refused(choices, "ray") == ""


def test_a_project_does_not_replace_what_there_is(evil: Path, choices: Choices) -> None:
    assert refused(choices, "local") == ""
    assert choices.settings.pools["local"].options == {}


def test_trust_is_remembered_for_this_content_of_the_file(evil: Path, choices: Choices) -> None:
    choices.trust("lab")
    for each in (choices, Choices()):
        assert refused(each, "lab") == ""
        assert "python" in each.settings.pools["local"].options, "it is the file that is trusted"
    evil.write_text(EVIL.replace("./evil", "./worse"))
    for each in (choices, Choices()):
        assert "worse" in refused(each, "lab")
        assert each.settings.pools["local"].options == {}


def test_trust_without_a_file_that_needs_it_says_so(choices: Choices) -> None:
    choices.trust()
    assert choices.trust() == "Nothing here waits for your trust."


def test_a_file_that_is_not_read_is_reported_once(evil: Path, choices: Choices) -> None:
    evil.chmod(0o666)
    assert choices.unannounced(choices.settings) == [f"{evil} is not read, since it can be written by every user."]
    assert choices.unannounced(choices.settings) == []


def test_settings_are_made_anew_only_when_something_has_changed(choices: Choices) -> None:
    made = [choices.settings]
    for change in (
        lambda: choices.add(NamedPool(name="mine", kind="local")),
        lambda: choices.use("mine"),
        lambda: choices.resize("mine", GroupSize(count=3)),
        lambda: choices.pick(strategy="ddp"),
        choices.sizes.clear,
        choices.unpick,
        lambda: choices.remove("mine"),
    ):
        change()
        assert choices.settings is choices.settings
        assert choices.settings is not made[-1]
        made.append(choices.settings)
    assert [(each.pool, each.strategy_for(), "mine" in each.pools) for each in made] == [
        ("local", "none", False),
        ("local", "none", True),
        ("mine", "none", True),
        ("mine", "none", True),
        ("mine", "ddp", True),
        ("mine", "ddp", True),
        ("mine", "none", True),
        ("local", "none", False),
    ]
